"""Reads from Linux how long threads waited for a core, and how busy the cores are."""

from __future__ import annotations

import os
import time
from collections.abc import Iterable
from pathlib import Path

PROC = Path("/proc")
IDLE_FIELDS = (3, 4)
"""Indices of the times `idle` and `iowait` in a core's line of /proc/stat."""


class SchedulerTimes:
    """Reader of the times of this process and of its cores. On systems other than Linux,
    `run_delay` returns 0 and `free_cores` returns None."""

    def __init__(self, proc: Path = PROC) -> None:
        self._proc = proc
        self._before: tuple[float, float] | None = None

    def run_delay(self, thread_ids: Iterable[int]) -> float:
        """Returns the total seconds that these threads of the process have waited for a core, since
        they started, although they were ready to run."""
        return sum(self._thread_delay(thread_id) for thread_id in thread_ids)

    def free_cores(self) -> float | None:
        """Returns the average number of this process's cores that other processes did not use since
        the previous call. Returns None at the first call, or if the number is unknown."""
        cores = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else set[int]()
        busy = self._busy_seconds(cores)
        before, self._before = self._before, None
        if busy is None:
            return None
        now, others = time.monotonic(), busy - time.process_time()
        self._before = now, others
        if before is None or now == before[0]:
            return None
        return len(cores) - (others - before[1]) / (now - before[0])

    def _thread_delay(self, thread_id: int) -> float:
        try:
            fields = (self._proc / f"self/task/{thread_id}/schedstat").read_text().split()
            return int(fields[1]) / 1e9
        except (OSError, IndexError, ValueError):
            return 0.0

    def _busy_seconds(self, cores: set[int]) -> float | None:
        try:
            lines = (self._proc / "stat").read_text().splitlines()
        except OSError:
            return None
        names, ticks = {f"cpu{core}" for core in cores}, 0
        for name, *fields in (line.split() for line in lines):
            if name in names:
                # Fields after the eighth are times of guests, which the first two already include.
                ticks += sum(int(each) for i, each in enumerate(fields[:8]) if i not in IDLE_FIELDS)
        return ticks / os.sysconf("SC_CLK_TCK")
