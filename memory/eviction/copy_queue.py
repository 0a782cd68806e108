"""Queue of copies between adapter tiers. Copies that a request waits for are made first."""

from __future__ import annotations

import logging
from collections.abc import Callable
from concurrent.futures import Executor
from dataclasses import dataclass
from threading import Lock
from typing import Generic, TypeVar

from memory.errors import release_frames

log = logging.getLogger(__name__)

T = TypeVar("T")


@dataclass(slots=True, eq=False)
class Copy(Generic[T]):
    """A copy of an adapter from one tier to another."""

    work: Callable[[], T]
    """Makes the copy. Called on the queue's thread without the lock."""
    done: Callable[[T | BaseException], None]
    """Receives the result of `work`, or the exception that it raised. Called with the lock held,
    unless the copy was cancelled."""
    is_awaited: bool = False
    """Whether a request waits for the copy. May change while the copy is queued."""


class CopyQueue(Generic[T]):
    """Queue that chooses the next copy when its thread is free, not when a copy is submitted.

    executor: executor with one thread. `submit` and `cancel` must be called with the lock held.
    """

    def __init__(self, executor: Executor, lock: Lock) -> None:
        self._executor = executor
        self._lock = lock
        self._waiting: list[Copy[T]] = []
        """Queued copies in the order of submission."""
        self.num_open = 0
        """Number of queued and running copies."""

    def submit(self, copy: Copy[T]) -> None:
        self._waiting.append(copy)
        self.num_open += 1
        self._executor.submit(self._run_next)

    def cancel(self, copy: Copy[T]) -> bool:
        """Removes a copy that has not started. Returns False if it has started or ended."""
        if copy not in self._waiting:
            return False
        self._waiting.remove(copy)
        self.num_open -= 1
        return True

    def close(self) -> None:
        """Waits for the running copy and shuts the executor down. The caller must not hold the
        lock."""
        self._executor.shutdown()

    def _run_next(self) -> None:
        with self._lock:
            if not self._waiting:
                return
            copy = min(self._waiting, key=lambda copy: not copy.is_awaited)
            self._waiting.remove(copy)
        try:
            outcome = copy.work()
        except BaseException as error:
            release_frames(error)
            # The traceback would form a cycle with this frame, which would keep the error alive.
            outcome = error.with_traceback(None)
        with self._lock:
            self.num_open -= 1
            try:
                copy.done(outcome)
            except Exception:
                log.exception("completing a copy failed")
                raise
