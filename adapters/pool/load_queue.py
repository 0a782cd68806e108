"""Loads that wait for a loader thread, what somebody waits for first."""

from __future__ import annotations

import logging
from collections.abc import Callable
from concurrent.futures import Executor
from dataclasses import dataclass
from threading import Lock

from adapters.pool.image import AdapterImage

log = logging.getLogger(__name__)


@dataclass(slots=True, eq=False)
class Load:
    """A fetch to the host or a copy to the device. is_awaited may change while it waits."""

    work: Callable[[], AdapterImage]
    done: Callable[[AdapterImage | BaseException], None]
    """What came of it. Not called for a load that was cancelled."""
    is_awaited: bool


class LoadQueue:
    """Chooses when a thread is free, not when a load is submitted.

    executor: one thread, which works without the lock and holds it for the rest. All others call
    with the lock held.
    """

    def __init__(self, executor: Executor, lock: Lock) -> None:
        self._executor = executor
        self._lock = lock
        self._waiting: list[Load] = []
        """In the order of submission."""
        self.num_open = 0
        """Loads that wait or are in progress."""

    def submit(self, load: Load) -> None:
        self._waiting.append(load)
        self.num_open += 1
        self._executor.submit(self._run_next)

    def cancel(self, load: Load) -> bool:
        """False: it has begun."""
        if load not in self._waiting:
            return False
        self._waiting.remove(load)
        self.num_open -= 1
        return True

    def _run_next(self) -> None:
        with self._lock:
            if not self._waiting:
                return
            load = min(self._waiting, key=lambda load: not load.is_awaited)
            self._waiting.remove(load)
        try:
            image = load.work()
        except BaseException as error:
            self._end(load, error)
        else:
            self._end(load, image)

    def _end(self, load: Load, outcome: AdapterImage | BaseException) -> None:
        with self._lock:
            self.num_open -= 1
            try:
                load.done(outcome)
            except Exception:
                log.exception("the end of a load was not taken")
                raise
