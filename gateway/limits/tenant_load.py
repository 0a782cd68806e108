"""Limits the load that one tenant puts on a gateway's event loop with large bodies and with refused
requests, whatever the tenant's own limits are."""

from __future__ import annotations

import time
from collections.abc import Callable

from gateway import telemetry
from gateway.exceptions import TooManyRefusals

LARGE = 64 << 10
"""Minimum size in bytes of a large body. A smaller body never waits."""
BYTES_PER_S = 8 << 20
"""Maximum bytes of a tenant's large bodies that are processed per second. This many bytes contain
about two million prompt tokens, and occupy the event loop for at most half of the time."""
MAX_TENANTS = 10_000
"""Maximum number of tenants remembered. If there are more, BodyPace forgets tenants without waiting
bodies, and RefusalLimit forgets tenants whose whole limit is available."""
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


class _Use:
    """State of the limit on refused requests per minute for one tenant."""

    __slots__ = ("answers_at", "num_open", "was_refused", "whole_at")

    def __init__(self) -> None:
        self.whole_at = 0.0
        """Time at which the whole limit is available again (GCRA, ITU-T I.371)."""
        self.answers_at = 0.0
        """Time at which the last delayed refusal is answered."""
        self.num_open = 0.0
        """Number of refusals that would count against the limit if all requests of the tenant that
        are not answered yet were refused."""
        self.was_refused = False

    def is_idle(self, now: float) -> bool:
        return self.num_open <= 0 and max(self.whole_at, self.answers_at) <= now


class RefusalLimit:
    """Limit of each tenant's refused requests in one gateway.

    A refused request counts as at most one request in the tenant's limit of requests per minute,
    but the gateway may have read, decoded and tokenised a large prompt for it. So requests that are
    refused after their bodies were read count against a separate limit. Once a tenant has used up
    this limit, its requests are refused at little cost, before their bodies are read.
    """

    def __init__(self, per_minute: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._unit_s = 60 / per_minute
        self._clock = clock
        self._tenants: dict[str, _Use] = {}

    def begin(self, tenant_id: str, num_bytes: int) -> None:
        """Begins a request. `num_bytes` is the size of its body, as far as it is known. Raises
        TooManyRefusals if the tenant's limit is used up.

        Once half of `BURST_S` is used, requests without an answer count as if they were refused.
        Otherwise, all clients of a tenant would be admitted as soon as a part of the limit is
        available again, and would use up the limit of the next seconds.
        """
        use, now = self._use(tenant_id), self._clock()
        used_s = max(use.whole_at - now, 0.0)
        if used_s > BURST_S / 2:
            used_s += use.num_open * self._unit_s
        excess_s = used_s + self._unit_s - BURST_S
        # The tolerance of half a refusal allows for rounding errors.
        if used_s and excess_s > self._unit_s / 2:
            raise TooManyRefusals(min(excess_s, MAX_DEBT_S))
        use.num_open += _units(num_bytes)

    def end(self, tenant_id: str, num_bytes: int, num_refused_bytes: int | None) -> None:
        """Ends a request. `num_bytes` must be the number passed to `begin`. `num_refused_bytes` is
        the number of bytes of its body that were read before it was refused, or None if it was not
        refused."""
        use, now = self._use(tenant_id), self._clock()
        use.num_open -= _units(num_bytes)
        if num_refused_bytes is not None:
            cost_s = _units(num_refused_bytes) * self._unit_s
            most = now + BURST_S + MAX_DEBT_S
            use.whole_at = min(max(use.whole_at, now) + cost_s, most)
            telemetry.refused_bytes.add(num_refused_bytes)

    def add_unread(self, tenant_id: str, num_bytes: int) -> None:
        """Counts bytes of a body that are discarded after the request was refused. These bytes
        delay the answers to the tenant's next refused requests."""
        use, now = self._use(tenant_id), self._clock()
        use.answers_at = max(use.answers_at, now) + num_bytes / UNREAD_BYTES_PER_S
        telemetry.refused_bytes.add(num_bytes)

    def delay_s(self, tenant_id: str) -> float:
        """Returns the seconds to wait before answering a request that is refused without reading
        its body. If this is `MAX_DELAY_S`, the caller must close the connection instead."""
        use, now = self._use(tenant_id), self._clock()
        answers_at = max(use.answers_at, now) + 1 / UNREAD_PER_S
        delay_s = answers_at - now - UNREAD_BURST_S
        if delay_s >= MAX_DELAY_S:
            return MAX_DELAY_S
        use.answers_at = answers_at
        return max(0.0, delay_s)

    def note_newest(self, tenant_id: str, *, is_refused: bool) -> None:
        """Records whether the tenant's newest request was refused before a worker ran it."""
        self._use(tenant_id).was_refused = is_refused

    def was_refused(self, tenant_id: str) -> bool:
        """Returns whether the tenant's newest request was refused before a worker ran it. The next
        one then loads no adapter before it is admitted, so that refused requests evict none."""
        return self._use(tenant_id).was_refused

    def _use(self, tenant_id: str) -> _Use:
        use = self._tenants.get(tenant_id)
        if use is None:
            if len(self._tenants) >= MAX_TENANTS:
                now = self._clock()
                self._tenants = {t: u for t, u in self._tenants.items() if not u.is_idle(now)}
            use = self._tenants[tenant_id] = _Use()
        return use


def _units(num_bytes: int) -> float:
    return 1 + num_bytes / UNIT_BYTES
