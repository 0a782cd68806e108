"""Limits a gateway's retries, so that a failing worker does not multiply the load on the others."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable

WINDOW_S = 60
SHARE = 0.1
FLOOR = 32
"""Minimum retries per window, so that a quiet gateway can retry too."""


class RetryBudget:
    """Limit of retries to a tenth of the sequences sent in the last minute, but at least `FLOOR`
    retries."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._seconds: deque[list[int]] = deque()
        """Counts of the last `WINDOW_S` seconds, as [second, sent, retried]."""

    @property
    def has_room(self) -> bool:
        self._now()
        num_sent, num_retried = (sum(each[part] for each in self._seconds) for part in (1, 2))
        return num_retried < max(FLOOR, SHARE * num_sent)

    def note_sent(self, num_sequences: int) -> None:
        self._now()[1] += num_sequences

    def take(self) -> bool:
        """Counts one retry if the budget allows it. Returns False otherwise."""
        if not self.has_room:
            return False
        self._now()[2] += 1
        return True

    def _now(self) -> list[int]:
        second = int(self._clock())
        if not self._seconds or self._seconds[-1][0] != second:
            self._seconds.append([second, 0, 0])
            while self._seconds[0][0] <= second - WINDOW_S:
                self._seconds.popleft()
        return self._seconds[-1]
