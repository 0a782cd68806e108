"""Finds the tenants that use more than their share, and limits them.

A tenant is over its share if it recently used more than its share plus the fraction `LEEWAY` of the
shares of all other tenants with work. Four rules protect the other tenants:

- time: prompts and tokens of over-share tenants lengthen a step by at most `ADDED_PART`;
- room: a blocked sequence of an over-share tenant holds up only over-share tenants;
- free slots: some sequence slots are reserved for tenants within their share that hold few slots;
- taken slots: if no slot is free, an over-share tenant gives one up to a tenant within its share.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

from workers.policies.fair_queue import FairQueue
from workers.policies.tenant_queue import TenantQueue
from workers.scheduling.sequence import Sequence

RECENT_TOKENS = 4096.0
"""Once this number of tokens has been charged to all tenants together, earlier charges count 1/e in
a tenant's `recent_part`."""
LEEWAY = 0.25
"""Fraction of the other tenants' shares that a tenant may use beyond its own share before it counts
as over its share."""
ADDED_PART = 0.4
"""Time that over-share tenants may add to a step with their tokens and prompts, as a fraction of
the step's time without them."""
LEAST_KEPT, MOST_KEPT = 1 / 16, 1 / 8
"""Minimum and maximum fraction of all slots that is reserved for tenants with few slots."""


class OverShare:
    """Record of the tenants of a fair queue that are over their share, with the limits on them."""

    def __init__(self, queue: FairQueue, max_num_seqs: int) -> None:
        self._queue = queue
        self._max_num_seqs = max_num_seqs
        self._num_charged = 0.0
        self.is_closed = False
        """Whether over-share tenants may start no more sequences in this step."""

    def record(self, tenant: TenantQueue, cost: float) -> None:
        """Records a charge to the tenant. cost: charge in tokens."""
        part = self._recent_part(tenant)
        tenant.recent_part = part - (1.0 - part) * math.expm1(-cost / RECENT_TOKENS)
        self._num_charged += cost
        tenant.recent_at = self._num_charged

    def includes(self, tenant: TenantQueue) -> bool:
        """Whether the tenant recently used more than its share plus the leeway (see `LEEWAY`)."""
        if tenant.recent_part <= LEEWAY:
            return False
        return self._recent_part(tenant) > _with_leeway(self._queue.share(tenant))

    def is_closed_to(self, tenant: TenantQueue) -> bool:
        """Whether the tenant may start no more sequences in this step."""
        return self.is_closed and self.includes(tenant)

    def may_have_slot(self, tenant: TenantQueue, num_free: int) -> bool:
        """Whether the tenant may have one of `num_free` free slots.

        Some free slots, about one for each other tenant with work, are reserved for tenants that
        are within their share and hold few slots.
        """
        least, most = (int(part * self._max_num_seqs) for part in (LEAST_KEPT, MOST_KEPT))
        if num_free > most:
            return True
        share = self._queue.share(tenant)
        if num_free > min(max(round(1.0 / share) - 1, least), most):
            return True
        limit = _with_leeway(min(share, 0.5)) * self._max_num_seqs
        return num_free > 0 and tenant.num_running < limit and not self.includes(tenant)

    def victim(self, tenant: TenantQueue, running: Iterable[Sequence]) -> Sequence | None:
        """Returns the running sequence that must give up its slot to the tenant. Chooses the
        over-share tenant that holds the most slots relative to its share, and of this tenant's
        sequences the newest one. A tenant gives up no slot if it would then hold fewer slots,
        relative to its share, than the tenant. Returns None if no tenant must give up a slot, or
        if the tenant is itself over its share."""
        if self.includes(tenant):
            return None
        level = (tenant.num_running + 1) / self._queue.share(tenant)
        over_share = [
            other
            for other in dict.fromkeys(self._queue.tenant_of(each) for each in running)
            if (other.num_running - 1) / self._queue.share(other) >= level and self.includes(other)
        ]
        if not over_share:
            return None
        most = max(over_share, key=lambda other: other.num_running / self._queue.share(other))
        own = (each for each in running if self._queue.tenant_of(each) is most)
        return max(own, key=lambda sequence: sequence.times.arrival_s)

    def _recent_part(self, tenant: TenantQueue) -> float:
        """Returns the fraction of the recently charged tokens that was charged to the tenant."""
        num_since = self._num_charged - tenant.recent_at
        return tenant.recent_part * math.exp(-num_since / RECENT_TOKENS)


def _with_leeway(share: float) -> float:
    """Returns the share plus the fraction `LEEWAY` of all other tenants' shares."""
    return share + LEEWAY * (1.0 - share)
