"""Keeps this gateway's leases: how much of each limit the gateway may still use, and what it
requests in the next renewal.

`leases.py` sends the requests to the database.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import msgspec

from gateway.limits.quota import IDLE_S, Hold, Key, QuotaWindow
from gateway.quota_types import BUDGETS, Limit, Span, Window, window

AHEAD_S = 3.0
"""A lease of the next window is requested this many seconds before a window in use ends."""


class LeaseRequest(msgspec.Struct, frozen=True):
    """Part of a renewal for one limit in one window: the amounts that are used without a grant,
    returned, and requested. Passed as a row to the SQL function `quota_exchange`."""

    subject: str
    kind: str
    start: str
    taken: int = 0
    """Amount used without a grant since the last renewal."""
    returned: int = 0
    answered: int = 0
    """Id of the newest recall that this gateway has followed, or 0."""
    need: int = 0
    """Amount that the first waiting request lacks. If the limit has less left, the database grants
    nothing, and recalls the leases of other gateways."""
    want: int = 0
    call: int = 0
    """Id of this gateway's recall that not all other gateways have followed yet, or 0."""

    @property
    def is_empty(self) -> bool:
        return not (self.taken or self.returned or self.answered or self.need or self.want)


class LeaseResponse(msgspec.Struct, frozen=True):
    """Response of the database to one `LeaseRequest`."""

    granted: int
    remaining: int | None
    """Amount of the limit that is neither used nor leased by any gateway. None if the limit no
    longer exists."""
    unanswered: int
    """Number of gateways that have not followed this gateway's recall yet."""
    call: int


class LeaseRecall(msgspec.Struct, frozen=True):
    """Request by another gateway to return the unused part of this gateway's lease of a limit."""

    subject: str
    kind: str
    start: str
    call: int


class Waiter:
    """Client request that waits because the gateway's leases do not cover it."""

    def __init__(self, holds: Sequence[Hold]) -> None:
        self.holds = holds
        self.is_done = False
        self.is_served = False
        self.refused: Hold | None = None
        """Hold that is refused. None if the waiter is served, or if the window has ended and the
        waiter must try again."""

    @property
    def quotas(self) -> list[QuotaWindow]:
        return [hold.quota for hold in self.holds]


class LeaseBook:
    """Set of all quota windows of this gateway. Does no I/O itself: `gather` returns the requests
    of the next renewal, and `apply` receives the responses."""

    def __init__(self) -> None:
        self.waiters: list[Waiter] = []
        """Waiting requests in the order of arrival. Requests for the same limit are served in this
        order."""
        self._current: dict[tuple[str, str], QuotaWindow] = {}
        self._held: dict[Key, QuotaWindow] = {}
        """Current windows, windows that begin next, and past windows with requests in flight."""
        self._due: dict[QuotaWindow, None] = {}
        """Windows that the next renewal must consider, in the order in which they became due. The
        dict is used as an ordered set."""
        self._recalls: list[LeaseRecall] = []
        """Received recalls of limits of which this gateway has no lease. The next renewal only
        confirms them."""
        self._requested: list[QuotaWindow | None] = []
        """Window of each LeaseRequest in the renewal in flight. None for a LeaseRequest that only
        confirms a recall."""
        self._windows: dict[Span, Window] = {}

    @property
    def is_due(self) -> bool:
        """Whether a renewal should be sent now instead of after the next sweep."""
        return bool(self._due or self._recalls)

    def quota(self, limit: Limit, at: float, now: float) -> QuotaWindow:
        """Returns the limit's window that contains the time `at`, which is `now` or the time at
        which a request in flight was admitted. Creates the window if it is new, and adopts the
        limit's present amount, which an admin may have changed."""
        place = limit.subject, limit.kind.value
        quota = self._current.get(place)
        if quota is None or not quota.window.holds(at):
            before, quota = quota, self._open(limit, self._window(limit.kind.span, at), quota)
            if before is None or before.window.end <= quota.window.start:
                self._current[place] = quota
        if limit.amount < quota.limit:
            self._give_up(quota)
        elif limit.amount > quota.limit:
            quota.refused_at = -math.inf
        quota.limit = limit.amount
        quota.highest = max(quota.highest, limit.amount)
        quota.used_at = now
        return quota

    def take(self, holds: Sequence[Hold]) -> bool:
        """Reserves all holds, or none. Returns False if the request must wait for a renewal or for
        earlier requests."""
        if not all(hold.fits and not hold.quota.num_waiting for hold in holds):
            return False
        self._commit(holds)
        return True

    def settle(self, hold: Hold, used: int) -> None:
        """Replaces a reservation by the amount used. Must be called once for each hold that `take`
        or a waiter has reserved."""
        hold.quota.reserved -= hold.amount
        hold.quota.used += used

    def wait(self, holds: Sequence[Hold]) -> Waiter:
        """Queues a request for which `take` has returned False."""
        waiter = Waiter(holds)
        self.waiters.append(waiter)
        for quota in waiter.quotas:
            quota.is_refused = quota.is_refused and quota.num_waiting > 0
            quota.num_waiting += 1
            self._due[quota] = None
        return waiter

    def leave(self, waiter: Waiter) -> None:
        self.waiters.remove(waiter)
        waiter.is_done = True
        for quota in waiter.quotas:
            quota.num_waiting -= 1
            if not quota.num_waiting:
                quota.recall = 0

    def serve(self, now: float) -> list[Waiter]:
        """Reserves, in the order of arrival, the holds of waiters that this gateway's leases now
        cover. Removes and returns the waiters that are served or refused, or whose window has
        ended."""
        done: list[Waiter] = []
        blocked: set[QuotaWindow] = set()
        for waiter in list(self.waiters):
            first = [hold for hold in waiter.holds if hold.quota not in blocked]
            waiter.is_served = len(first) == len(waiter.holds) and all(hold.fits for hold in first)
            if waiter.is_served:
                self._commit(waiter.holds)
            else:
                waiter.refused = next((hold for hold in first if hold.is_refused), None)
                is_past = any(quota.is_past(now) for quota in waiter.quotas)
                if waiter.refused is None and not is_past:
                    blocked.update(waiter.quotas)
                    continue
            self.leave(waiter)
            done.append(waiter)
        for quota in blocked:
            self._due[quota] = None
        return done

    def hear(self, recall: LeaseRecall) -> None:
        """Records another gateway's recall. The next renewal returns the unused lease of the
        recalled limit."""
        quota = self._held.get((recall.subject, recall.kind, recall.start))
        if quota is None:
            self._recalls.append(recall)
        else:
            quota.recall_to_answer = max(quota.recall_to_answer, recall.call)
            self._due[quota] = None

    def share(self) -> None:
        """Lets this gateway use, without a grant, a share of each limit for which requests wait.
        The share is the part of the limit that the gateway had leased in the previous window.
        Called while the database is unavailable."""
        for quota in {quota for waiter in self.waiters for quota in waiter.quotas}:
            part = int(quota.limit * quota.may_share)
            quota.granted += part
            quota.taken += part
            quota.may_share = 0.0

    def sweep(self, now: float) -> None:
        """Opens windows that begin soon. Marks each window as due for which an amount must be
        reported, requested or returned. Called about once a second."""
        for place, quota in self._current.items():
            if quota.window.end <= now + AHEAD_S and now - quota.used_at < IDLE_S:
                limit = Limit(place[0], quota.kind, quota.limit)
                self._open(limit, window(limit.kind.span, quota.window.end), quota)
        for quota in self._held.values():
            if quota.taken or quota.wants_more(now) or quota.gives_back(now):
                self._due[quota] = None

    def gather(self, now: float) -> list[LeaseRequest]:
        """Returns the next renewal's requests. `apply` must follow before the next `gather`."""
        needs = self._needs()
        requests: list[LeaseRequest] = []
        self._requested = []
        for quota in list(self._due):
            request = self._request(quota, needs.get(quota, (0, 0)), now)
            if not request.is_empty:
                requests.append(request)
                self._requested.append(quota)
            if quota.is_done(now):
                self._forget(quota)
        self._due.clear()
        for each in self._recalls:
            requests.append(LeaseRequest(each.subject, each.kind, each.start, answered=each.call))
            self._requested.append(None)
        self._recalls.clear()
        return requests

    def apply(self, responses: Sequence[LeaseResponse]) -> None:
        """Applies the database's responses to the requests that `gather` returned last."""
        for quota, response in zip(self._requested, responses, strict=True):
            if quota is None:
                continue
            # Amounts taken without a grant since the request was sent are deducted from the grant.
            taken_of_it = min(quota.taken, response.granted)
            quota.taken -= taken_of_it
            quota.granted += response.granted - taken_of_it
            quota.last_grant = response.granted or quota.last_grant
            quota.remaining = response.remaining or 0
            quota.is_void = response.remaining is None
            quota.may_share = 0.0
            quota.recall = response.call if response.unanswered else 0
            quota.is_refused = quota.needed > quota.ready and not response.unanswered
        self._requested = []

    def see_nothing(self) -> None:
        """Sets the remaining amounts of all limits to 0, because they are unknown after a failed
        renewal."""
        for quota in self._held.values():
            quota.remaining = 0

    def give_up(self) -> None:
        """Makes the next renewal return all unused leases."""
        for quota in self._held.values():
            self._give_up(quota)

    def give_back(self, now: float) -> list[LeaseRequest]:
        """Returns the requests for the last renewal at shutdown, which gives back the unused leases
        of minute windows. Amounts in use remain leased until the minute ends. `apply` need not be
        called."""
        requests: list[LeaseRequest] = []
        for quota in self._held.values():
            if quota.kind.span is Span.MINUTE and not quota.is_past(now):
                self._give_up(quota)
                requests.append(LeaseRequest(*quota.key, quota.taken, quota.returning))
        return [request for request in requests if not request.is_empty]

    def lose(self) -> None:
        """Forgets all leases and waiters. Requests in flight continue without reservations."""
        for waiter in list(self.waiters):
            self.leave(waiter)
        self._current.clear()
        self._held.clear()
        self._due.clear()
        self._recalls.clear()
        self._requested = []

    def believe_catalog(self) -> None:
        """Clears `is_void`, which marks limits that the database reported as deleted. Called with
        each new catalog, which shows the limits that exist now."""
        for quota in self._held.values():
            quota.is_void = False

    def _open(self, limit: Limit, window: Window, before: QuotaWindow | None) -> QuotaWindow:
        quota = QuotaWindow(limit, window)
        known = self._held.setdefault(quota.key, quota)
        # Only limits per minute are shared while the database is unavailable, because gateways that
        # reach the database may be granted all of a daily or monthly budget.
        is_new_rate = known is quota and limit.kind not in BUDGETS
        if is_new_rate and before is not None and before.window.end == window.start:
            share = max(0, before.granted) / max(1, before.highest)
            quota.may_share = min(1.0, share)
        return known

    def _forget(self, quota: QuotaWindow) -> None:
        self._held.pop(quota.key, None)
        if self._current.get(quota.key[:2]) is quota:
            del self._current[quota.key[:2]]

    def _window(self, span: Span, at: float) -> Window:
        known = self._windows.get(span)
        if known is None or not known.holds(at):
            known = self._windows[span] = window(span, at)
        return known

    def _commit(self, holds: Sequence[Hold]) -> None:
        for hold in holds:
            quota = hold.quota
            quota.reserved += hold.amount
            if quota.is_void and quota.spare < 0:
                # The deleted limit may be set again. When the database then loads this usage, it
                # deducts the usage from the lease, so the amount must count as leased.
                quota.taken -= quota.spare
                quota.granted -= quota.spare
            if quota.is_low:
                self._due[quota] = None

    def _needs(self) -> dict[QuotaWindow, tuple[int, int]]:
        """Returns, for each window with waiters, the amount that the first waiter needs, and the
        amount that all waiters together need."""
        needs: dict[QuotaWindow, tuple[int, int]] = {}
        for waiter in self.waiters:
            for hold in waiter.holds:
                first, total = needs.get(hold.quota, (hold.amount, 0))
                needs[hold.quota] = first, total + hold.amount
        return needs

    def _request(self, quota: QuotaWindow, needs: tuple[int, int], now: float) -> LeaseRequest:
        first, total = needs
        gives_back = quota.gives_back(now)
        if gives_back:
            self._give_up(quota)
        need, want = max(0, first - quota.ready), max(0, total - quota.ready)
        if not gives_back and quota.wants_more(now):
            want = max(want, 1)
        quota.needed = first
        recall = quota.recall if need else 0
        told = quota.taken, quota.returning, quota.recall_to_answer
        quota.taken = quota.returning = quota.recall_to_answer = 0
        return LeaseRequest(*quota.key, *told, need, want, recall)

    def _give_up(self, quota: QuotaWindow) -> None:
        """Makes the next renewal return the unused lease of the window."""
        if quota.spare > 0:
            quota.returning += quota.spare
            quota.granted -= quota.spare
            self._due[quota] = None
