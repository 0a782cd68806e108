"""Queue of copies between adapter tiers. Accounts take turns."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable
from concurrent.futures import Executor
from dataclasses import dataclass
from operator import itemgetter
from threading import Lock
from typing import Generic, TypeVar

from memory.accounts import LAST_TURN, Turn
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
    turns: dict[str, Turn]
    """Turn of each account that requested the adapter, empty if none did. May change while the copy
    is queued."""


class CopyQueue(Generic[T]):
    """Queue that chooses the next copy when a thread is free, not when a copy is submitted.

    The account whose last copy began first is next, so that the backlog of one account delays
    another account by one copy. Of the account's copies, the one with the lowest turn is made.
    Copies that no account requested are last. If there are several threads, one account uses at
    most all but one, because its store may not answer for a long time.

    executor: executor with `num_threads` threads. `submit` and `cancel` must be called with the
    lock held.
    """

    def __init__(self, executor: Executor, lock: Lock, *, num_threads: int = 1) -> None:
        self._executor = executor
        self._lock = lock
        self._max_running = max(num_threads - 1, 1)
        """Maximum number of copies of one account that are made at the same time."""
        self._waiting: list[Copy[T]] = []
        """Queued copies in the order of submission."""
        self._running = Counter[str]()
        """Number of copies in progress, by the account whose turn it was."""
        self._served: dict[str, None] = {}
        """Accounts in the order of their last turns, since the queue was last empty."""
        self._num_passed = 0
        """Number of threads that found no copy, because the accounts of all queued copies had as
        many copies in progress as they may have."""
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
        """Waits for the running copies and shuts the executor down. The caller must not hold the
        lock."""
        self._executor.shutdown()

    def _run_next(self) -> None:
        with self._lock:
            if not self._waiting:
                return
            chosen = self._choose()
            if chosen is None:
                self._num_passed += 1
                return
            copy, account = chosen
            self._waiting.remove(copy)
            self._running[account] += 1
            self._served.pop(account, None)
            self._served[account] = None
        try:
            outcome = copy.work()
        except BaseException as error:
            release_frames(error)
            # The traceback would form a cycle with this frame, which would keep the error alive.
            outcome = error.with_traceback(None)
        with self._lock:
            self._end(account)
            try:
                copy.done(outcome)
            except Exception:
                log.exception("completing a copy failed")
                raise

    def _choose(self) -> tuple[Copy[T], str] | None:
        """Returns the next copy and the account whose turn it is. Returns None if the accounts of
        all queued copies have as many copies in progress as they may have."""
        served = {account: place for place, account in enumerate(self._served, start=1)}
        asked = [
            (
                (not copy.turns, served.get(account, 0), copy.turns.get(account, LAST_TURN)),
                copy,
                account,
            )
            for copy in self._waiting
            for account in copy.turns or [""]
            if self._running[account] < self._max_running
        ]
        if not asked:
            return None
        _, copy, account = min(asked, key=itemgetter(0))
        return copy, account

    def _end(self, account: str) -> None:
        self.num_open -= 1
        self._running[account] -= 1
        if not self._waiting:
            self._served.clear()
            self._running = +self._running
            self._num_passed = 0
        elif self._num_passed:
            self._num_passed -= 1
            self._executor.submit(self._run_next)
