"""Number of the CPU kernels' threads, which drops while other processes delay them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

WINDOW_S = 0.1
"""Seconds of computing after which the number is considered."""
MAX_DELAY = 0.25
"""Share of a window's time for which threads may together wait for cores before their number
drops. Pauses between steps belong to the window: where steps are short beside them, a delay costs
little, and where it costs much, the steps are long."""
SLACK = 0.25
"""Cores that others may use before a thread more is too many."""


class Times(Protocol):
    """See `ops.scheduler_times.SchedulerTimes`."""

    def run_delay(self, thread_ids: Sequence[int]) -> float: ...
    def free_cores(self) -> float | None: ...


class ThreadCount:
    """Number of threads, at most `limit`.

    A step has more than a hundred barriers, and at each of them all threads wait for one that is
    not running: beside one busy process, two threads on two cores are many times slower than one.
    So threads are given up when they are delayed, and taken back when other processes leave their
    cores free. A process of low priority uses cores and delays nobody, so that it changes nothing.
    """

    def __init__(
        self, limit: int, times: Times, thread_ids: Callable[[int], Sequence[int]]
    ) -> None:
        """thread_ids: returns the ids of a team of that many threads of the calling thread."""
        self.limit = limit
        self.current = limit
        self._times = times
        self._thread_ids = thread_ids
        self._team: Sequence[int] = ()
        self._delay = 0.0
        self._computed = 0.0
        self._begin: float | None = None

    def record_step(self, begin: float, end: float) -> int:
        """Records when a step began and ended, in seconds, on the thread that computed it. Returns
        the number of threads for the next step."""
        if self.limit == 1:
            return 1
        self._begin = begin if self._begin is None else self._begin
        self._computed += end - begin
        if self._computed >= WINDOW_S:
            length = end - self._begin
            if self.current > 1 and (share := self._delayed_seconds() / length) > MAX_DELAY:
                self._set(max(1, self.current - max(1, round(share))))
                self._times.free_cores()  # what is free is measured from here on
            elif self.current < self.limit and (free := self._times.free_cores()) is not None:
                self._set(min(self.limit, max(self.current, int(free + SLACK))))
            self._computed, self._begin = 0.0, end
        return self.current

    def _set(self, count: int) -> None:
        if count != self.current:
            self.current, self._team = count, ()

    def _delayed_seconds(self) -> float:
        """Returns the seconds for which threads waited in this window, or 0 in the first window of
        a team."""
        is_new = not self._team
        if is_new:
            self._team = self._thread_ids(self.current)
        before, self._delay = self._delay, self._times.run_delay(self._team)
        return 0.0 if is_new else self._delay - before
