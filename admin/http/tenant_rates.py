"""Rate limit of a tenant's calls to the admin plane, because each change grows the audit log."""

from __future__ import annotations

import time
from collections.abc import Callable

from web.errors import RateExceeded
from web.token_buckets import TokenBuckets

BURST_MINUTES = 5
"""Maximum burst, as minutes of calls at the full rate, for pipelines that move many aliases."""
READS_PER_WRITE = 20
"""Number of calls without changes that cost as much as one change."""


class TenantRates:
    """Token bucket for each tenant, in this process only."""

    def __init__(self, writes_per_minute: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._writes_per_minute = writes_per_minute
        self._buckets = TokenBuckets(60.0 * BURST_MINUTES, clock=clock)

    def take(self, tenant_id: str, *, is_write: bool) -> None:
        """Counts one call of the tenant. Raises RateExceeded if the bucket is empty."""
        cost_s = 60 / self._writes_per_minute / (1 if is_write else READS_PER_WRITE)
        if wait_s := self._buckets.take(tenant_id, cost_s):
            raise RateExceeded(
                "This tenant calls the admin API too often: "
                f"{self._writes_per_minute} changes a minute are allowed.",
                retry_after_s=wait_s,
            )
