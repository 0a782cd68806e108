"""Messages between a program and its sandbox."""

from __future__ import annotations

from typing import Literal

import msgspec


class Bounds(msgspec.Struct, frozen=True):
    """Limits of the process that works on one task."""

    memory_bytes: int
    """Maximum bytes of address space, in addition to those in use before the task (Linux only)."""
    cpu_s: float
    wall_s: float
    stack_bytes: int = 8 << 20
    file_bytes: int = 0
    """Maximum size in bytes of a file that the process writes."""
    outcome_bytes: int = 1 << 20
    """Maximum bytes of the JSON of the task's outcome."""


class Task(msgspec.Struct, frozen=True):
    bounds: Bounds
    work: msgspec.Raw


class Done(msgspec.Struct, frozen=True, tag=True):
    outcome: msgspec.Raw


class Died(msgspec.Struct, frozen=True, tag=True):
    """Answer for a task whose process was killed or crashed."""

    why: Literal["memory", "timeout", "crashed"]


Answer = Done | Died
