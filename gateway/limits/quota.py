"""Tracks a gateway's lease of one limit in one window of time.

The leases of all gateways together never exceed the limit. Before a client's request runs, an
amount is reserved from the lease of the gateway that runs it. When the request ends, the amount is
replaced by the actual usage. The database deducts the usage from the lease when it loads the usage
record. The gateway continues to count this usage as used, so that the gateway and the database
agree on the unused part of the lease, which is granted - used - reserved.
"""

from __future__ import annotations

import math

import msgspec

from gateway.quota_types import BUDGETS, Limit, Window

IDLE_S = 10.0
"""Seconds without use after which an unused lease is returned."""
ENDLESS = 1 << 62

Key = tuple[str, str, str]
"""Key of a limit's window in the database: id of the subject (tenant or key), name of the kind, and
name of the window."""


class QuotaWindow:
    """State of one limit in one window in this gateway: the amounts granted, used and reserved, and
    the requests that wait."""

    def __init__(self, limit: Limit, window: Window) -> None:
        self.kind = limit.kind
        self.key: Key = (limit.subject, limit.kind.value, window.name)
        self.window = window
        self.limit = self.highest = limit.amount
        """Current amount of the limit, and its highest amount in this window."""
        self.granted = 0
        self.used = 0
        """Amount used by requests that have ended."""
        self.reserved = 0
        """Amount reserved for requests in flight."""
        self.remaining = 0
        """Amount of the limit that no gateway had used or leased at the last renewal."""
        self.used_at = max(0.0, window.start)
        self.last_grant = 0
        """Amount of the last grant. A further grant is requested as soon as less than a quarter of
        this amount can be reserved."""
        self.num_waiting = 0
        self.needed = 0
        """Amount that the first waiting request needed when the last renewal was sent."""
        self.is_refused = False
        """Whether less than `needed` could be reserved after the last response, and no gateway
        still had to return leases for this gateway's recall."""
        self.refused_at = -math.inf
        """Time of the last refusal, in seconds of time.monotonic()."""
        self.refused_amount = 0
        """Amount that the last refused request needed."""
        self.recall = 0
        """Id of this gateway's recall that not all other gateways have followed yet, or 0."""
        self.recall_to_answer = 0
        """Id of the newest recall by another gateway that this gateway has not followed yet, or
        0."""
        self.may_share = 0.0
        """Fraction of a limit per minute that this gateway may use without a grant while the
        database is unavailable."""
        self.taken = 0
        """Amount taken without a grant and not yet reported to the database."""
        self.returning = 0
        """Unused amount that the next renewal returns to the database."""
        self.is_void = False
        """Whether the limit was deleted from the database. This gateway's catalog may still contain
        it."""

    @property
    def ready(self) -> int:
        """Amount that can be reserved without a renewal."""
        return ENDLESS if self.is_void else self.spare

    @property
    def spare(self) -> int:
        """Amount of the lease that is neither used nor reserved. Negative if more is used and
        reserved than granted."""
        return self.granted - self.used - self.reserved

    @property
    def left(self) -> int:
        """Estimated amount that this gateway could still admit, at least 0."""
        return max(0, self.ready) + max(0, self.remaining)

    @property
    def is_low(self) -> bool:
        """Whether so little is left that a further grant should be requested before a request needs
        it."""
        return self.ready * 4 < self.last_grant and self.remaining > 0

    def is_past(self, now: float) -> bool:
        """Returns whether nothing more can be reserved in this window. A daily or monthly budget is
        never past, because a request that was admitted in its window may reserve more."""
        return self.window.end <= now and self.kind not in BUDGETS

    def wants_more(self, now: float) -> bool:
        """Returns whether to request a grant although no request waits for one."""
        return self.is_low or (self.last_grant == 0 and self.window.start > now)

    def gives_back(self, now: float) -> bool:
        """Returns whether the unused lease must be returned, because it is recalled or no longer
        needed in this gateway."""
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
        """Whether the lease covers the hold, so that it can be reserved now."""
        return self.quota.ready >= self.amount

    @property
    def is_refused(self) -> bool:
        """Whether the last response shows that no gateway can cover the hold."""
        return self.quota.is_refused and not self.fits and self.amount >= self.quota.needed
