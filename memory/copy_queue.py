"""Copies between tiers that wait for a thread, those first that a request waits for."""

from __future__ import annotations

import logging
from collections.abc import Callable
from concurrent.futures import Executor
from dataclasses import dataclass
from threading import Lock
from typing import Generic, TypeVar

log = logging.getLogger(__name__)

T = TypeVar("T")


@dataclass(slots=True, eq=False)
class Copy(Generic[T]):
    """A copy of an adapter from one tier to another."""

    work: Callable[[], T]
    """Copies, on the queue's thread, without the lock."""
    done: Callable[[T | BaseException], None]
    """Is told the result of `work`, or what it raised, with the lock held. Not called for a copy
    that was cancelled."""
    is_awaited: bool = False
    """Whether a request waits for it; may change while it waits."""


class CopyQueue(Generic[T]):
    """Chooses the next copy when the thread is free, not when a copy is submitted.

    executor: one thread. `submit` and `cancel` are called with the lock held.
    """

    def __init__(self, executor: Executor, lock: Lock) -> None:
        self._executor = executor
        self._lock = lock
        self._waiting: list[Copy[T]] = []
        """In the order of submission."""
        self.num_open = 0
        """Copies that wait or are in progress."""

    def submit(self, copy: Copy[T]) -> None:
        """Adds a copy."""
        self._waiting.append(copy)
        self.num_open += 1
        self._executor.submit(self._run_next)

    def cancel(self, copy: Copy[T]) -> bool:
        """Removes a copy that has not begun. False: it has begun, or has ended."""
        if copy not in self._waiting:
            return False
        self._waiting.remove(copy)
        self.num_open -= 1
        return True

    def _run_next(self) -> None:
        with self._lock:
            if not self._waiting:
                return
            copy = min(self._waiting, key=lambda copy: not copy.is_awaited)
            self._waiting.remove(copy)
        try:
            outcome = copy.work()
        except BaseException as error:
            self._end(copy, error)
        else:
            self._end(copy, outcome)

    def _end(self, copy: Copy[T], outcome: T | BaseException) -> None:
        with self._lock:
            self.num_open -= 1
            try:
                copy.done(outcome)
            except Exception:
                log.exception("the end of a copy was not taken")
                raise
