"""How often a tenant's keys may call the admin plane: each change leaves a row of the audit log."""

from __future__ import annotations

import time
from collections.abc import Callable

import msgspec

from admin.errors import RateExceeded

BURST_MINUTES = 5
"""Minutes' worth of calls that may come at once, as when a pipeline moves all its aliases."""
READS_PER_WRITE = 20
"""A change costs as much as so many calls that change nothing."""
MAX_TENANTS = 10_000
"""Buckets kept; beyond, those that are full again are forgotten."""


class _Bucket(msgspec.Struct):
    level: float
    """Calls that change nothing that may come at once."""
    at: float


class TenantRates:
    """A token bucket for each tenant, in this process."""

    def __init__(self, writes_per_minute: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._writes_per_minute = writes_per_minute
        self._per_s = writes_per_minute * READS_PER_WRITE / 60
        self._burst = 60.0 * BURST_MINUTES * self._per_s
        self._clock = clock
        self._buckets: dict[str, _Bucket] = {}

    def take(self, tenant_id: str, *, is_write: bool) -> None:
        """Counts one call. Raises RateExceeded."""
        now = self._clock()
        bucket = self._buckets.get(tenant_id)
        if bucket is None:
            if len(self._buckets) >= MAX_TENANTS:
                self._forget(now)
            bucket = self._buckets[tenant_id] = _Bucket(self._burst, now)
        bucket.level = self._level(bucket, now)
        bucket.at = now
        cost = READS_PER_WRITE if is_write else 1
        if bucket.level < cost:
            raise RateExceeded(
                "This tenant calls the admin API too often: "
                f"{self._writes_per_minute} changes a minute are allowed.",
                retry_after_s=(cost - bucket.level) / self._per_s,
            )
        bucket.level -= cost

    def _level(self, bucket: _Bucket, now: float) -> float:
        return min(self._burst, bucket.level + (now - bucket.at) * self._per_s)

    def _forget(self, now: float) -> None:
        self._buckets = {
            tenant_id: bucket
            for tenant_id, bucket in self._buckets.items()
            if self._level(bucket, now) < self._burst
        }
