"""Number of threads of the CPU kernels. It is lowered while other processes delay the threads."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

WINDOW_S = 0.1
"""Seconds of computation after which the number of threads is reconsidered."""
MAX_DELAY = 0.25
"""Seconds that all threads together wait for cores, per second of time, above which their number is
lowered. The time includes pauses between steps, because delays matter little if steps are short
compared with the pauses."""
SLACK = 0.25
"""Fraction of a core that other processes may use while the core still counts as free."""


class Times(Protocol):
    """Interface of `ops.scheduler_times.SchedulerTimes`."""

    def run_delay(self, thread_ids: Sequence[int]) -> float: ...
    def free_cores(self) -> float | None: ...


class ThreadCount:
    """Number of threads for the next step, at most `limit`.

    A step has more than a hundred barriers. At each of them, a thread that gets no core delays all
    other threads. Alongside one busy process, two threads on two cores are many times slower than
    one. Therefore the number is lowered while threads are delayed, and raised when other processes
    leave cores free. A process of low priority delays no thread, so it does not lower the number.
    """

    def __init__(
        self, limit: int, times: Times, thread_ids: Callable[[int], Sequence[int]]
    ) -> None:
        """thread_ids: function that takes a number of threads, and returns the thread ids of the
        calling thread's team of that size."""
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
                self._times.free_cores()  # starts a new measurement
            elif self.current < self.limit and (free := self._times.free_cores()) is not None:
                self._set(min(self.limit, max(self.current, int(free + SLACK))))
            self._computed, self._begin = 0.0, end
        return self.current

    def _set(self, count: int) -> None:
        if count != self.current:
            self.current, self._team = count, ()

    def _delayed_seconds(self) -> float:
        """Returns the seconds that the threads together waited for cores in this window, or 0 in
        the first window after their number changed."""
        is_new = not self._team
        if is_new:
            self._team = self._thread_ids(self.current)
        before, self._delay = self._delay, self._times.run_delay(self._team)
        return 0.0 if is_new else self._delay - before
