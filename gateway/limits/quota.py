"""One limit in one window of time, as far as this gateway holds it.

All gateways together hold, as leases, at most what is left of a limit. A client's request reserves
from its gateway's lease before it runs, and settles with what it used. Its use leaves the lease in
the database when its usage is loaded there; here it stays used, so both sides agree on what is held
ready: granted - used - reserved.
"""

from __future__ import annotations

import math

import msgspec

from gateway.quota_types import BUDGETS, Limit, Window

IDLE_S = 10.0
"""Seconds without use after which what a lease holds ready goes back."""
ENDLESS = 1 << 62

Key = tuple[str, str, str]
"""Subject, kind and window of a limit, by the names that the database has for them."""


class QuotaWindow:
    """One limit in one window: what is granted, used, reserved and waited for here."""

    def __init__(self, limit: Limit, window: Window) -> None:
        self.kind = limit.kind
        self.key: Key = (limit.subject, limit.kind.value, window.name)
        self.window = window
        self.limit = self.highest = limit.amount
        """The limit as it is, and the highest it was in this window."""
        self.granted = 0
        self.used = 0
        """Settled by requests that have ended."""
        self.reserved = 0
        """Promised to requests in flight."""
        self.remaining = 0
        """What no gateway held at the last renewal."""
        self.used_at = max(0.0, window.start)
        self.last_grant = 0
        """When less than a quarter of it is ready, more is requested ahead of need."""
        self.num_waiting = 0
        self.needed = 0
        """What the first waiting request needed when the last renewal was sent."""
        self.is_refused = False
        """Whether the last response left less than `needed`, with no recall open."""
        self.refused_at = -math.inf
        """When a request was refused last, as time.monotonic() has it."""
        self.refused_amount = 0
        """What that request needed."""
        self.recall = 0
        """Number of our recall that other gateways have not all followed; 0: none."""
        self.recall_to_answer = 0
        """Number of the newest recall by another gateway, to be followed; 0: none."""
        self.may_share = 0.0
        """Fraction of a rate that it may take in an outage: its share of the window before."""
        self.taken = 0
        """Taken without a grant, in an outage or while the limit was void; not yet reported."""
        self.returning = 0
        """What the next renewal returns."""
        self.is_void = False
        """Whether the database has no such limit any more. The catalog follows soon."""

    @property
    def ready(self) -> int:
        """What can be reserved without a renewal."""
        return ENDLESS if self.is_void else self.spare

    @property
    def spare(self) -> int:
        """What it holds and has neither used nor reserved; negative while over-committed."""
        return self.granted - self.used - self.reserved

    @property
    def left(self) -> int:
        """What this gateway could give out, as far as it knows; at least 0."""
        return max(0, self.ready) + max(0, self.remaining)

    @property
    def is_low(self) -> bool:
        """Whether more should be requested ahead of need."""
        return self.ready * 4 < self.last_grant and self.remaining > 0

    def is_past(self, now: float) -> bool:
        """Whether nothing can be taken of it any more. A budget is never past: a request admitted
        in its window may go on."""
        return self.window.end <= now and self.kind not in BUDGETS

    def wants_more(self, now: float) -> bool:
        """Whether to request more although no request waits."""
        return self.is_low or (self.last_grant == 0 and self.window.start > now)

    def gives_back(self, now: float) -> bool:
        """Whether to return what it has to spare: it is recalled, or not needed here."""
        return self.recall_to_answer > 0 or self.is_past(now) or self.is_done(now)

    def is_done(self, now: float) -> bool:
        """Whether all of it can be returned and the window forgotten."""
        is_open = self.reserved or self.num_waiting
        return not is_open and (self.window.end <= now or now - self.used_at > IDLE_S)


class Hold(msgspec.Struct, frozen=True):
    """The part of a quota window that one request reserves."""

    quota: QuotaWindow
    amount: int

    @property
    def fits(self) -> bool:
        """Whether it can be reserved now."""
        return self.quota.ready >= self.amount

    @property
    def is_refused(self) -> bool:
        """Whether the last response shows that no gateway can cover it."""
        return self.quota.is_refused and not self.fits and self.amount >= self.quota.needed
