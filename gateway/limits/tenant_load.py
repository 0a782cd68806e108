"""Limits the load that one tenant puts on a gateway's event loop with large bodies and with refused
requests, whatever the tenant's own limits are."""

from __future__ import annotations

import time
from collections.abc import Callable

from gateway import telemetry
from gateway.exceptions import TooManyRefusals
from web.token_buckets import TokenBuckets

LARGE = 64 << 10
"""Minimum size in bytes of a large body. A smaller body never waits."""
BYTES_PER_S = 8 << 20
"""Maximum bytes of a tenant's large bodies that are processed per second. This many bytes contain
about two million prompt tokens, and occupy the event loop for at most half of the time."""
MAX_TENANTS = 10_000
"""Maximum number of remembered tenants whose newest request was refused."""
UNIT_BYTES = 16 << 10
"""Number of bytes of a refused request's body that count like one more refused request."""
BURST_S = 60.0
"""Maximum part of the limit that may be used at once, expressed as the seconds until this part is
available again."""
MAX_DEBT_S = 60.0
"""Maximum seconds that a tenant must wait after it has exceeded its limit. A tenant can exceed it,
because a body is counted after it was read."""
UNREAD_PER_S, UNREAD_BYTES_PER_S = 400.0, 64 << 20
"""Maximum number of a tenant's requests per second that are refused before their bodies are read,
and maximum bytes per second of such bodies that are discarded. Further refusals are answered later,
so that clients that retry immediately use only about 10 % of a core."""
UNREAD_BURST_S = 0.25
"""A refusal without reading the body may be answered this many seconds before its scheduled time.
Refusals are scheduled at the rates `UNREAD_PER_S` and `UNREAD_BYTES_PER_S`."""
MAX_DELAY_S = 5.0
"""Maximum delay in seconds of the answer to a request that is refused without reading its body. If
the delay would be longer, the connection is closed."""


class BodyPace:
    """Times at which each tenant's next large body may be processed in one gateway.

    Decoding, rendering and tokenising a large body occupies the event loop for up to 60 ms for each
    MiB, in several steps between which other requests run. With many large bodies at once, another
    request would wait for a step of each body. So each large body of a tenant waits until the time
    for the tenant's earlier bodies has passed.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._begun = TokenBuckets(0.0, clock=clock)

    def delay_s(self, tenant_id: str, num_bytes: int) -> float:
        """Returns the seconds that a body must wait for the tenant's earlier bodies, and counts the
        body as the newest of them."""
        if num_bytes < LARGE:
            return 0.0
        delay_s = self._begun.missing_s(tenant_id)
        self._begun.charge(tenant_id, num_bytes / BYTES_PER_S)
        return delay_s


class RefusalLimit:
    """Limit of each tenant's refused requests in one gateway.

    A refused request counts as at most one request in the tenant's limit of requests per minute,
    but the gateway may have read, decoded and tokenised a large prompt for it. So requests that are
    refused after their bodies were read count against a separate limit. Once a tenant has used up
    this limit, its requests are refused at little cost, before their bodies are read.
    """

    def __init__(self, per_minute: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._unit_s = 60 / per_minute
        self._read = TokenBuckets(BURST_S, clock=clock, tolerance_s=self._unit_s / 2)
        """Refusals of requests whose bodies were read. The bytes of small bodies are tolerated."""
        self._unread = TokenBuckets(UNREAD_BURST_S + MAX_DELAY_S, clock=clock)
        """Refusals of requests whose bodies were not read."""
        self._open: dict[str, int] = {}
        """Cost in bytes if all requests of the tenant that are not answered yet were refused."""
        self._refused: set[str] = set()

    def begin(self, tenant_id: str, num_bytes: int) -> None:
        """Begins a request. `num_bytes` is the size of its body, as far as it is known. Raises
        TooManyRefusals if the tenant's limit is used up.

        Once half of `BURST_S` is used, requests without an answer count as if they were refused.
        Otherwise, all clients of a tenant would be admitted as soon as a part of the limit is
        available again, and would use up the limit of the next seconds.
        """
        open_bytes = self._open.get(tenant_id, 0)
        if used_s := self._read.missing_s(tenant_id):
            num_counted = 1 + (open_bytes / UNIT_BYTES if used_s > BURST_S / 2 else 0)
            if wait_s := self._read.wait_s(tenant_id, num_counted * self._unit_s):
                raise TooManyRefusals(min(wait_s, MAX_DEBT_S))
        self._open[tenant_id] = open_bytes + UNIT_BYTES + num_bytes

    def end(self, tenant_id: str, num_bytes: int, num_refused_bytes: int | None) -> None:
        """Ends a request. `num_bytes` must be the number passed to `begin`. `num_refused_bytes` is
        the number of bytes of its body that were read before it was refused, or None if it was not
        refused."""
        self._open[tenant_id] -= UNIT_BYTES + num_bytes
        if not self._open[tenant_id]:
            del self._open[tenant_id]
        if num_refused_bytes is not None:
            room_s = BURST_S + MAX_DEBT_S - self._read.missing_s(tenant_id)
            cost_s = (1 + num_refused_bytes / UNIT_BYTES) * self._unit_s
            self._read.charge(tenant_id, min(cost_s, room_s))
            telemetry.refused_bytes.add(num_refused_bytes)

    def add_unread(self, tenant_id: str, num_bytes: int) -> None:
        """Counts bytes of a body that are discarded after the request was refused. These bytes
        delay the answers to the tenant's next refused requests."""
        self._unread.charge(tenant_id, num_bytes / UNREAD_BYTES_PER_S)
        telemetry.refused_bytes.add(num_bytes)

    def delay_s(self, tenant_id: str) -> float:
        """Returns the seconds to wait before answering a request that is refused without reading
        its body. If this is `MAX_DELAY_S`, the caller must close the connection instead."""
        if self._unread.take(tenant_id, 1 / UNREAD_PER_S):
            return MAX_DELAY_S
        return max(0.0, self._unread.missing_s(tenant_id) - UNREAD_BURST_S)

    def note_newest(self, tenant_id: str, *, is_refused: bool) -> None:
        """Records whether the tenant's newest request was refused before a worker ran it."""
        if is_refused:
            self._refused.add(tenant_id)
            if len(self._refused) > MAX_TENANTS:
                self._refused.clear()
        else:
            self._refused.discard(tenant_id)

    def was_refused(self, tenant_id: str) -> bool:
        """Returns whether the tenant's newest request was refused before a worker ran it. The next
        one then loads no adapter before it is admitted, so that refused requests evict none."""
        return tenant_id in self._refused
