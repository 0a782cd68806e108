"""Token buckets, which limit rates."""

from __future__ import annotations

import time
from collections.abc import Callable
from heapq import nlargest
from operator import itemgetter


class TokenBuckets:
    """One token bucket for each key. Amounts are expressed as the seconds in which a bucket regains
    them. A bucket is stored as the time at which it is full again (GCRA, ITU-T I.371).

    If there are more than `max_keys` buckets, the fuller half is dropped. A dropped bucket counts
    as full.
    """

    def __init__(
        self,
        capacity_s: float,
        max_keys: int = 10_000,
        clock: Callable[[], float] = time.monotonic,
        *,
        tolerance_s: float = 1e-6,
    ) -> None:
        """`tolerance_s` is an amount that a bucket may lack, for example because of rounding."""
        self._capacity_s = capacity_s
        self._max_keys = max_keys
        self._clock = clock
        self._tolerance_s = tolerance_s
        self._full_at: dict[str, float] = {}

    def __len__(self) -> int:
        return len(self._full_at)

    def missing_s(self, key: str) -> float:
        """Returns the amount that is missing in the bucket."""
        return max(self._full_at.get(key, 0.0) - self._clock(), 0.0)

    def wait_s(self, key: str, amount_s: float) -> float:
        """Returns the seconds until the bucket has this amount, or 0 if it has the amount now."""
        lacking_s = self.missing_s(key) + amount_s - self._capacity_s
        return lacking_s if lacking_s > self._tolerance_s else 0.0

    def take(self, key: str, amount_s: float) -> float:
        """Takes an amount and returns 0. If the bucket does not have it, takes nothing and returns
        the seconds until it does."""
        wait_s = self.wait_s(key, amount_s)
        if not wait_s:
            self.charge(key, amount_s)
        return wait_s

    def charge(self, key: str, amount_s: float) -> None:
        """Takes an amount, even if the bucket does not have it."""
        self._full_at[key] = self._clock() + self.missing_s(key) + amount_s
        if len(self._full_at) > self._max_keys:
            emptier = nlargest(self._max_keys // 2, self._full_at.items(), key=itemgetter(1))
            self._full_at = dict(emptier)
