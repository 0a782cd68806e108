"""How much a gateway may try again: a worker that fails must not be answered with more load."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable

WINDOW_S = 60
SHARE = 0.1
FLOOR = 32
"""Retries that a window has in any case: a quiet gateway may lose a worker too."""


class RetryBudget:
    """Retries are at most a tenth of the sequences sent in the last minute, or `FLOOR`."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._seconds: deque[list[int]] = deque()
        """Counts of the window, as [second, sent, retried]."""

    @property
    def has_room(self) -> bool:
        self._now()
        num_sent, num_retried = (sum(each[part] for each in self._seconds) for part in (1, 2))
        return num_retried < max(FLOOR, SHARE * num_sent)

    def note_sent(self, num_sequences: int) -> None:
        self._now()[1] += num_sequences

    def take(self) -> bool:
        """Whether there is room for one more, which then is taken."""
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
