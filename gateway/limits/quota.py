"""One limit in one window of time, as this gateway's lease covers it.

The leases of all gateways together never exceed the limit. A client's request reserves from its
gateway's lease before it runs, and settles with the amount used. The database deducts that amount
from the lease when it loads the usage. The gateway keeps counting it as used, so that both agree on
the unused lease: granted - used - reserved.
"""

from __future__ import annotations

import math

import msgspec

from gateway.quota_types import BUDGETS, Limit, Window

IDLE_S = 10.0
"""Seconds without use after which an unused lease is returned."""
ENDLESS = 1 << 62

Key = tuple[str, str, str]
"""Subject, kind and window of a limit, by their names in the database."""


class QuotaWindow:
    """One limit in one window: amounts granted, used, reserved and waited for in this gateway."""

    def __init__(self, limit: Limit, window: Window) -> None:
        self.kind = limit.kind
        self.key: Key = (limit.subject, limit.kind.value, window.name)
        self.window = window
        self.limit = self.highest = limit.amount
        """Current limit, and the highest in this window."""
        self.granted = 0
        self.used = 0
        """Amount settled by requests that have ended."""
        self.reserved = 0
        """Amount promised to requests in flight."""
        self.remaining = 0
        """Amount that no gateway held at the last renewal."""
        self.used_at = max(0.0, window.start)
        self.last_grant = 0
        """More is requested ahead of need when less than a quarter of this amount is ready."""
        self.num_waiting = 0
        self.needed = 0
        """Amount that the first waiting request needed when the last renewal was sent."""
        self.is_refused = False
        """Whether the last response left less than `needed`, with no recall open."""
        self.refused_at = -math.inf
        """Time of the last refusal, in seconds of time.monotonic()."""
        self.refused_amount = 0
        """Amount that the last refused request needed."""
        self.recall = 0
        """Number of this gateway's recall that others have not all followed, or 0."""
        self.recall_to_answer = 0
        """Number of the newest recall by another gateway that is to be followed, or 0."""
        self.may_share = 0.0
        """Fraction of a rate that may be taken while the database is unavailable."""
        self.taken = 0
        """Amount taken without a grant and not yet reported."""
        self.returning = 0
        """Amount that the next renewal returns."""
        self.is_void = False
        """Whether the limit no longer exists in the database. The catalog follows soon."""

    @property
    def ready(self) -> int:
        """Amount that can be reserved without a renewal."""
        return ENDLESS if self.is_void else self.spare

    @property
    def spare(self) -> int:
        """Amount of the lease that is neither used nor reserved. Negative if over-committed."""
        return self.granted - self.used - self.reserved

    @property
    def left(self) -> int:
        """Estimated amount that this gateway could still admit, at least 0."""
        return max(0, self.ready) + max(0, self.remaining)

    @property
    def is_low(self) -> bool:
        """Whether more should be requested ahead of need."""
        return self.ready * 4 < self.last_grant and self.remaining > 0

    def is_past(self, now: float) -> bool:
        """Returns whether nothing more can be taken. A budget is never past, because a request that
        was admitted in its window may continue."""
        return self.window.end <= now and self.kind not in BUDGETS

    def wants_more(self, now: float) -> bool:
        """Returns whether to request more although no request waits."""
        return self.is_low or (self.last_grant == 0 and self.window.start > now)

    def gives_back(self, now: float) -> bool:
        """Returns whether to return the unused lease, because it is recalled or not needed here."""
        return self.recall_to_answer > 0 or self.is_past(now) or self.is_done(now)

    def is_done(self, now: float) -> bool:
        """Returns whether all of the lease can be returned and the window forgotten."""
        is_open = self.reserved or self.num_waiting
        return not is_open and (self.window.end <= now or now - self.used_at > IDLE_S)


class Hold(msgspec.Struct, frozen=True):
    """Amount of a quota window that one request reserves."""

    quota: QuotaWindow
    amount: int

    @property
    def fits(self) -> bool:
        """Whether the hold can be reserved now."""
        return self.quota.ready >= self.amount

    @property
    def is_refused(self) -> bool:
        """Whether the last response shows that no gateway can cover the hold."""
        return self.quota.is_refused and not self.fits and self.amount >= self.quota.needed
