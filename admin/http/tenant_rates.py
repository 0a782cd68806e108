"""Rate limit of a tenant's calls to the admin plane, because each change grows the audit log."""

from __future__ import annotations

import time
from collections.abc import Callable

from web.errors import RateExceeded

BURST_MINUTES = 5
"""Maximum burst, as minutes of calls at the full rate, for pipelines that move many aliases."""
READS_PER_WRITE = 20
"""Number of calls without changes that cost as much as one change."""
MAX_TENANTS = 10_000
"""Maximum number of buckets. If there are more, full buckets are dropped."""


class TenantRates:
    """Token bucket for each tenant, in this process only. A bucket is stored as the time at which
    it is full again (GCRA, ITU-T I.371)."""

    def __init__(self, writes_per_minute: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._writes_per_minute = writes_per_minute
        self._call_s = 60 / (writes_per_minute * READS_PER_WRITE)
        """Seconds that one call without changes costs."""
        self._clock = clock
        self._full_at: dict[str, float] = {}

    def take(self, tenant_id: str, *, is_write: bool) -> None:
        """Counts one call of the tenant. Raises RateExceeded if the bucket is empty."""
        now = self._clock()
        if tenant_id not in self._full_at and len(self._full_at) >= MAX_TENANTS:
            self._full_at = {each: at for each, at in self._full_at.items() if at > now}
        cost = READS_PER_WRITE if is_write else 1
        full_at = max(self._full_at.get(tenant_id, now), now) + cost * self._call_s
        excess_s = full_at - now - 60.0 * BURST_MINUTES
        # Allows for rounding errors, which are less than the cost of half a call.
        if excess_s > self._call_s / 2:
            raise RateExceeded(
                "This tenant calls the admin API too often: "
                f"{self._writes_per_minute} changes a minute are allowed.",
                retry_after_s=excess_s,
            )
        self._full_at[tenant_id] = full_at
