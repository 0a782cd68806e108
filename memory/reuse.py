"""Recent uses of KV pages and adapters, and recent times, from which future ones are estimated."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass

HALF_LIFE_S = 60.0
"""Seconds after which a use counts half."""
RECENT = 0.9
"""Factor by which each new term of a `RecentRatio` reduces the weight of earlier terms."""
MAX_KEYS = 1 << 16
"""Maximum number of keys in a `ReuseByKey`. When it is full, it forgets the one that was asked for
longest ago."""


@dataclass(slots=True)
class Reuse:
    """Count of recent uses, which halves every `HALF_LIFE_S` seconds. Times are seconds of a
    monotonic clock."""

    count: float = 0.0
    at_s: float = 0.0

    def note(self, now: float, amount: float = 1.0) -> None:
        """Adds `amount` to the count. A negative amount subtracts, but not below a count of 0."""
        self.count = max(self.expected(now) + amount, 0.0)
        self.at_s = now

    def expected(self, now: float) -> float:
        """Returns the count at the time `now`, as an estimate of the number of future uses."""
        if self.count == 0.0:
            return 0.0
        return self.count * 2.0 ** ((self.at_s - now) / HALF_LIFE_S)


class ReuseByKey:
    """`Reuse` of each item, by key. Only one thread changes it. Other threads may call `expected`,
    and get the count before or after a concurrent change."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._reuse: OrderedDict[str, Reuse] = OrderedDict()

    def of(self, key: str) -> Reuse:
        reuse = self._reuse.setdefault(key, Reuse())
        self._reuse.move_to_end(key)
        if len(self._reuse) > MAX_KEYS:
            self._reuse.popitem(last=False)
        return reuse

    def expected(self, key: str) -> float:
        reuse = self._reuse.get(key)
        return 0.0 if reuse is None else reuse.expected(self._clock())


class RecentRatio:
    """Ratio of two recent sums, for example of seconds and of bytes. Each new term reduces the
    weight of earlier terms, which begin with `over` and `under`, by `RECENT`."""

    def __init__(self, over: float = 0.0, under: float = 0.0) -> None:
        self._over, self._under = over, under

    def add(self, over: float, under: float) -> None:
        self._over = RECENT * self._over + over
        self._under = RECENT * self._under + under

    @property
    def value(self) -> float:
        """Current ratio; 0 before the first term."""
        return self._over / self._under if self._under > 0.0 else 0.0
