"""How often something was used of late: the expected reuse of KV pages and adapters alike."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

HALF_LIFE_S = 60.0
"""A use this old counts half."""
MAX_KEYS = 1 << 16
"""Keys of a `ReuseByKey`; the half least used are then forgotten."""


@dataclass(slots=True)
class Reuse:
    """A count that fades by half each half-life. All have one clock, in seconds that never go
    back."""

    count: float = 0.0
    at_s: float = 0.0

    def note(self, now: float, amount: float = 1.0) -> None:
        """A negative amount takes back what was noted; less than nothing is nothing."""
        self.count = max(self.expected(now) + amount, 0.0)
        self.at_s = now

    def expected(self, now: float) -> float:
        """Uses to be expected in the time to come, if it is like the past."""
        if self.count == 0.0:
            return 0.0
        return self.count * 2.0 ** ((self.at_s - now) / HALF_LIFE_S)

    @property
    def rank(self) -> float:
        """Orders any two by their `expected` at any one time, for all fade alike."""
        if self.count == 0.0:
            return -math.inf
        return math.log2(self.count) + self.at_s / HALF_LIFE_S


class ReuseByKey:
    """Reuse of things by name, wherever they are. Written by one thread; others may read
    `expected`, a count just before or after it changes."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._reuse: dict[str, Reuse] = {}

    def of(self, key: str) -> Reuse:
        if key not in self._reuse and len(self._reuse) >= MAX_KEYS:
            by_rank = sorted(self._reuse.items(), key=lambda item: item[1].rank)
            self._reuse = dict(by_rank[MAX_KEYS // 2 :])
        return self._reuse.setdefault(key, Reuse())

    def expected(self, key: str) -> float:
        reuse = self._reuse.get(key)
        return 0.0 if reuse is None else reuse.expected(self._clock())
