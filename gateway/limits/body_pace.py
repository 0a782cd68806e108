"""Limits the pace at which a gateway processes the large request bodies of one tenant.

Decoding, rendering and tokenising a large body occupies the event loop for up to 60 ms for each
MiB, in several steps between which other requests run. With many large bodies at once, another
request would wait for a step of each of them. So each large body of a tenant waits until the time
for the tenant's earlier bodies has passed.
"""

from __future__ import annotations

import time
from collections.abc import Callable

LARGE = 64 << 10
"""Minimum size in bytes of a body that may wait."""
BYTES_PER_S = 8 << 20
"""Bytes of a tenant's large bodies that are processed per second. That is about two million prompt
tokens, and occupies the event loop for at most half of the time."""
MAX_TENANTS = 10_000
"""Maximum number of tenants remembered. If there are more, tenants without waiting bodies are
forgotten."""


class BodyPace:
    """Times at which each tenant's next large body may be processed in one gateway."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._next_at: dict[str, float] = {}

    def delay_s(self, tenant_id: str, num_bytes: int) -> float:
        """Returns the seconds that a body must wait for the tenant's earlier bodies, and counts the
        body as the newest of them."""
        if num_bytes < LARGE:
            return 0.0
        now = self._clock()
        begins_at = max(self._next_at.get(tenant_id, now), now)
        self._next_at[tenant_id] = begins_at + num_bytes / BYTES_PER_S
        if len(self._next_at) > MAX_TENANTS:
            self._next_at = {tenant: at for tenant, at in self._next_at.items() if at > now}
        return begins_at - now
