"""Demand of an engine for the device, used to decide which base models are loaded."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Demand:
    """Work of a model's engine. num_extents: of KV, for its first waiting sequence. is_short:
    whether the model is loaded but that sequence finds no room."""

    num_running: int = 0
    num_waiting: int = 0
    num_extents: int = 0
    is_short: bool = False
