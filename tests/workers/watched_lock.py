"""A memory lock that notices what must not happen while it is held: a wait for a thread, a grammar
or a device, a call of its driver, a sleep, an opened file; and that an event loop takes it."""

from __future__ import annotations

import asyncio
import sys
import threading
from collections.abc import Callable
from typing import Any

import pytest

import memory.arena
from ops.base import PassedEvent
from tests.workers.host_virtual_memory import HostVirtualMemory
from workers.device.cuda_memory import CudaDriver
from workers.device.weight_image import Arrival
from workers.execution.engine import InFlightStep

violations: list[str] = []
"""What happened under a lock since the list was last read, with the stack."""

_held = threading.local()


def note(what: str) -> None:
    """No source lines, which would be read from files."""
    frame, stack = sys._getframe(2), list[str]()
    while frame is not None and len(stack) < 16:
        code = frame.f_code
        stack.append(f"{code.co_filename}:{frame.f_lineno} {code.co_name}")
        frame = frame.f_back
    violations.append("\n  ".join([what, *stack]))


def is_held() -> bool:
    """Whether this thread holds a memory lock. While it starts another, it waits a moment."""
    return getattr(_held, "count", 0) > 0 and not getattr(_held, "starts", False)


def start_thread(thread: threading.Thread, start: Callable[..., None]) -> None:
    _held.starts = True
    try:
        start(thread)
    finally:
        _held.starts = False


class WatchedLock:
    """A lock as of `threading`; a thread that takes it twice fails instead of standing still."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._owner: int | None = None

    def acquire(self, blocking: bool = True, timeout: float = -1) -> bool:
        if asyncio._get_running_loop() is not None:  # pyright: ignore
            note("an event loop took the memory lock")
        if self._owner == threading.get_ident():
            raise AssertionError("the thread holds the memory lock already")
        is_taken = self._lock.acquire(blocking, timeout)
        if is_taken:
            self._owner = threading.get_ident()
            _held.count = getattr(_held, "count", 0) + 1
        return is_taken

    def release(self) -> None:
        self._owner = None
        _held.count -= 1
        self._lock.release()

    def locked(self) -> bool:
        return self._lock.locked()

    def __enter__(self) -> None:
        self.acquire()

    def __exit__(self, *_: object) -> None:
        self.release()


def watch(patch: pytest.MonkeyPatch) -> None:
    """Makes every memory lock a watched one."""
    patch.setattr(memory.arena, "Lock", WatchedLock)
    _watch(patch, threading.Condition, "wait", "a wait for another thread")
    _watch(patch, InFlightStep, "wait", "a wait for a step")
    _watch(patch, PassedEvent, "synchronize", "a wait for the device")
    for name in ("create", "release", "reserve", "map", "unmap", "pin"):
        _watch(patch, HostVirtualMemory, name, "a call of the driver")
    _watch(patch, CudaDriver, "call", "a call of the driver")
    _watch(patch, Arrival, "synchronize", "a wait for a copy")
    start = threading.Thread.start
    patch.setattr(threading.Thread, "start", lambda thread: start_thread(thread, start))  # pyright: ignore
    if not _has_hook:
        sys.addaudithook(_audit)
        _has_hook.append(True)


_has_hook: list[bool] = []
"""A hook cannot be removed: it is added once."""


def _audit(event: str, arguments: tuple[Any, ...]) -> None:
    is_source = str(arguments[:1]).endswith(".py',)")  # which a logged exception quotes
    if event in ("open", "time.sleep", "subprocess.Popen") and is_held() and not is_source:
        note(f"{event} {arguments[:1]}")


def _watch(patch: pytest.MonkeyPatch, owner: Any, name: str, what: str) -> None:
    method: Callable[..., Any] = getattr(owner, name)

    def watched(*arguments: Any, **options: Any) -> Any:
        # Executors wait for 0 seconds to learn whether a thread is idle.
        if is_held() and arguments[1:] != (0,):
            note(f"{what}: {owner.__name__}.{name}")
        return method(*arguments, **options)

    patch.setattr(owner, name, watched)
