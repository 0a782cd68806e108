"""Pace at which a gateway processes the large bodies of one tenant.

Decoding, rendering and tokenising a large body takes up to 60 ms of the event loop for each MiB, in
sections between which other requests run. Many large bodies at once would run many sections between
two turns of another request. So each body of a tenant waits until its predecessors have had time.
"""

from __future__ import annotations

import time
from collections.abc import Callable

LARGE = 64 << 10
"""Minimum size in bytes of a body that may wait."""
BYTES_PER_S = 8 << 20
"""Bytes of a tenant's large bodies processed per second: prompts of two million tokens, or at most
half of the event loop's time."""
MAX_TENANTS = 10_000
"""Maximum number of tenants remembered. Beyond it, tenants without waiting bodies are forgotten."""


class BodyPace:
    """Times at which each tenant's next large body may be processed in one gateway."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._next_at: dict[str, float] = {}

    def delay_s(self, tenant_id: str, num_bytes: int) -> float:
        """Returns the seconds that a body must wait for the tenant's earlier bodies."""
        if num_bytes < LARGE:
            return 0.0
        now = self._clock()
        begins_at = max(self._next_at.get(tenant_id, now), now)
        self._next_at[tenant_id] = begins_at + num_bytes / BYTES_PER_S
        if len(self._next_at) > MAX_TENANTS:
            self._next_at = {tenant: at for tenant, at in self._next_at.items() if at > now}
        return begins_at - now
