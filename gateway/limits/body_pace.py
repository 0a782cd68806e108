"""Pace at which a gateway works on large bodies of one tenant.

To decode, render and tokenise a large body takes up to 60 ms of the event loop for each MiB, in
sections between which other requests go on. Many large bodies at once would have many sections
between two turns of another request. So each body of a tenant waits until its predecessors have
had time.
"""

from __future__ import annotations

import time
from collections.abc import Callable

LARGE = 64 << 10
"""Bodies of fewer bytes never wait."""
BYTES_PER_S = 8 << 20
"""Bytes of large bodies of a tenant that are worked on in a second: prompts of two million tokens,
or half of the event loop's time at most."""
MAX_TENANTS = 10_000
"""Tenants remembered. Beyond that, those that nothing waits for are forgotten."""


class BodyPace:
    """When each tenant's next large body may be worked on in one gateway."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._next_at: dict[str, float] = {}

    def delay_s(self, tenant_id: str, num_bytes: int) -> float:
        """Seconds that a body of so many bytes is to wait for the tenant's bodies before it."""
        if num_bytes < LARGE:
            return 0.0
        now = self._clock()
        begins_at = max(self._next_at.get(tenant_id, now), now)
        self._next_at[tenant_id] = begins_at + num_bytes / BYTES_PER_S
        if len(self._next_at) > MAX_TENANTS:
            self._next_at = {tenant: at for tenant, at in self._next_at.items() if at > now}
        return begins_at - now
