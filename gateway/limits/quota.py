"""How much of each limit this gateway may give out by itself, and what it must ask for.

Nothing here waits or speaks to anybody: `LeaseBook` says what the next exchange asks and is told
what was answered; gateway/limits/leases.py carries it to the database, tests to a model of it.

All gateways together hold, as slices, at most what is left of a limit. A request reserves from its
gateway's slice before it runs, and settles with what it used. Its use leaves the slice in the
database when its usage is loaded there; here it stays used, so both sides agree on what is held
ready: granted - used - reserved.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from gateway.quota_types import BUDGETS, Limit, Span, Window, window

AHEAD_S = 3.0
"""So long before a window ends, who used it lately asks for a slice of the next."""
IDLE_S = 10.0
"""What a slice holds ready goes back when nobody has used it for so long."""
ENDLESS = 1 << 62

Key = tuple[str, str, str]
"""Subject, kind and window of a limit, by the names that the database has for them."""


class Account:
    """One limit in one window, as far as this gateway holds it."""

    def __init__(self, limit: Limit, window: Window) -> None:
        self.kind = limit.kind
        self.key: Key = (limit.subject, limit.kind.value, window.name)
        self.window = window
        self.limit = self.highest = limit.amount
        """As it is, and as it was at most in this window."""
        self.granted = 0
        self.used = 0
        """Settled."""
        self.reserved = 0
        """Promised to requests under way."""
        self.remaining = 0
        """What no gateway held at the last exchange."""
        self.used_at = max(0.0, window.start)
        self.slice = 0
        """The last grant: when little of it is ready, more is asked for ahead of need."""
        self.num_waiting = 0
        self.needed = 0
        """By the first in line, when that was asked for."""
        self.is_refused = False
        """So much is in nobody's hands."""
        self.call = 0
        """Ours to the others to give back, not followed by all yet."""
        self.to_answer = 0
        """The newest call of others, to be followed."""
        self.may_share = 0.0
        """Part of a rate that it may take in an outage: what it held of the window before."""
        self.taken = 0
        """In an outage, or while there is no such limit; the database does not know yet."""
        self.returning = 0
        """Given up, with the next exchange."""
        self.is_void = False
        """There is no such limit any more, says the database; soon the catalog will."""

    @property
    def ready(self) -> int:
        return ENDLESS if self.is_void else self.spare

    @property
    def spare(self) -> int:
        """Of what it holds."""
        return self.granted - self.used - self.reserved

    @property
    def left(self) -> int:
        """What this gateway could give out, as far as it knows; never negative."""
        return max(0, self.ready) + max(0, self.remaining)

    @property
    def is_low(self) -> bool:
        return self.ready * 4 < self.slice and self.remaining > 0

    def is_past(self, now: float) -> bool:
        """Whether nothing can be taken of it any more. Of a budget it can: who was admitted in its
        window may go on."""
        return self.window.end <= now and self.kind not in BUDGETS

    def wants_more(self, now: float) -> bool:
        """Ahead of need."""
        return self.is_low or (self.slice == 0 and self.window.start > now)

    def gives_back(self, now: float) -> bool:
        """What it has to spare: nobody here will need it, or others do."""
        return self.to_answer > 0 or self.is_past(now) or self.is_done(now)

    def is_done(self, now: float) -> bool:
        """Whether it can go back and be forgotten."""
        is_open = self.reserved or self.num_waiting
        return not is_open and (self.window.end <= now or now - self.used_at > IDLE_S)


class Hold(msgspec.Struct, frozen=True):
    """A part of an account that a request takes."""

    account: Account
    amount: int

    @property
    def fits(self) -> bool:
        return self.account.ready >= self.amount

    @property
    def is_refused(self) -> bool:
        return self.account.is_refused and not self.fits and self.amount >= self.account.needed


class Ask(msgspec.Struct, frozen=True):
    """Of one limit, as `quota_exchange` of the database takes it."""

    subject: str
    kind: str
    start: str
    taken: int = 0
    returned: int = 0
    answered: int = 0
    need: int = 0
    want: int = 0
    call: int = 0

    @property
    def is_empty(self) -> bool:
        return not (self.taken or self.returned or self.answered or self.need or self.want)


class Answer(msgspec.Struct, frozen=True):
    granted: int
    remaining: int | None
    """None: there is no such limit any more."""
    unanswered: int
    """Gateways that have not followed the call yet."""
    call: int


class Call(msgspec.Struct, frozen=True):
    """Another gateway needs what is held ready."""

    subject: str
    kind: str
    start: str
    call: int


class Waiter:
    """A request that its gateway's slices do not cover."""

    def __init__(self, holds: Sequence[Hold]) -> None:
        self.holds = holds
        self.is_done = False
        self.is_served = False
        self.refused: Hold | None = None
        """None of both when it is done: its window has ended, it must try again."""

    @property
    def accounts(self) -> list[Account]:
        return [hold.account for hold in self.holds]


class LeaseBook:
    def __init__(self) -> None:
        self.waiters: list[Waiter] = []
        """In the order they came; who needs the same limit is served in this order."""
        self._current: dict[tuple[str, str], Account] = {}
        self._held: dict[Key, Account] = {}
        """Those, those of the next window, and those of past ones with requests under way."""
        self._due: dict[Account, None] = {}
        """To be looked at in the next exchange."""
        self._calls: list[Call] = []
        """For what is not held here."""
        self._asked: list[Account | None] = []
        """What the exchange under way is about."""
        self._windows: dict[Span, Window] = {}

    @property
    def is_due(self) -> bool:
        """Whether an exchange should not wait for the next sweep."""
        return bool(self._due or self._calls)

    def account(self, limit: Limit, at: float, now: float) -> Account:
        """The limit's account in the window that holds `at`, which is `now` or when the request was
        admitted that is still under way."""
        place = limit.subject, limit.kind.value
        account = self._current.get(place)
        if account is None or not account.window.holds(at):
            before, account = account, self._open(limit, self._window(limit.kind.span, at), account)
            if before is None or before.window.end <= account.window.start:
                self._current[place] = account
        if limit.amount < account.limit:
            self._give_up(account)
        account.limit = limit.amount
        account.highest = max(account.highest, limit.amount)
        account.used_at = now
        return account

    def take(self, holds: Sequence[Hold]) -> bool:
        """Reserves all of it or nothing. False: it must wait, for an exchange or behind others."""
        if not all(hold.fits and not hold.account.num_waiting for hold in holds):
            return False
        self._commit(holds)
        return True

    def settle(self, hold: Hold, used: int) -> None:
        """Once for each hold that was taken."""
        hold.account.reserved -= hold.amount
        hold.account.used += used

    def wait(self, holds: Sequence[Hold]) -> Waiter:
        waiter = Waiter(holds)
        self.waiters.append(waiter)
        for account in waiter.accounts:
            account.is_refused = account.is_refused and account.num_waiting > 0
            account.num_waiting += 1
            self._due[account] = None
        return waiter

    def leave(self, waiter: Waiter) -> None:
        """It waits no more."""
        self.waiters.remove(waiter)
        waiter.is_done = True
        for account in waiter.accounts:
            account.num_waiting -= 1
            if not account.num_waiting:
                account.call = 0

    def serve(self, now: float) -> list[Waiter]:
        """Those who need not wait any more."""
        done: list[Waiter] = []
        blocked: set[Account] = set()
        for waiter in list(self.waiters):
            first = [hold for hold in waiter.holds if hold.account not in blocked]
            waiter.is_served = len(first) == len(waiter.holds) and all(hold.fits for hold in first)
            if waiter.is_served:
                self._commit(waiter.holds)
            else:
                waiter.refused = next((hold for hold in first if hold.is_refused), None)
                if waiter.refused is None and not any(a.is_past(now) for a in waiter.accounts):
                    blocked.update(waiter.accounts)
                    continue
            self.leave(waiter)
            done.append(waiter)
        for account in blocked:
            self._due[account] = None
        return done

    def hear(self, call: Call) -> None:
        account = self._held.get((call.subject, call.kind, call.start))
        if account is None:
            self._calls.append(call)
        else:
            account.to_answer = max(account.to_answer, call.call)
            self._due[account] = None

    def share(self) -> None:
        """In an outage: takes of what is waited for what this gateway held of the window before."""
        for account in {account for waiter in self.waiters for account in waiter.accounts}:
            part = int(account.limit * account.may_share)
            account.granted += part
            account.taken += part
            account.may_share = 0.0

    def sweep(self, now: float) -> None:
        """Finds what is due because time has passed; every second or so."""
        for place, account in self._current.items():
            if account.window.end <= now + AHEAD_S and now - account.used_at < IDLE_S:
                limit = Limit(place[0], account.kind, account.limit)
                self._open(limit, window(limit.kind.span, account.window.end), account)
        for account in self._held.values():
            if account.taken or account.wants_more(now) or account.gives_back(now):
                self._due[account] = None

    def gather(self, now: float) -> list[Ask]:
        """What the next exchange asks; `apply` must follow before the next `gather`."""
        needs = self._needs()
        asks: list[Ask] = []
        self._asked = []
        for account in list(self._due):
            ask = self._ask(account, needs.get(account, (0, 0)), now)
            if not ask.is_empty:
                asks.append(ask)
                self._asked.append(account)
            if account.is_done(now):
                self._forget(account)
        self._due.clear()
        asks.extend(Ask(c.subject, c.kind, c.start, answered=c.call) for c in self._calls)
        self._asked.extend(None for _ in self._calls)
        self._calls.clear()
        return asks

    def apply(self, answers: Sequence[Answer]) -> None:
        for account, answer in zip(self._asked, answers, strict=True):
            if account is None:
                continue
            # What it took meanwhile without asking is of what it was granted, unknown to it.
            taken_of_it = min(account.taken, answer.granted)
            account.taken -= taken_of_it
            account.granted += answer.granted - taken_of_it
            account.slice = answer.granted or account.slice
            account.remaining = answer.remaining or 0
            account.is_void = answer.remaining is None
            account.may_share = 0.0
            account.call = answer.call if answer.unanswered else 0
            account.is_refused = account.needed > account.ready and not answer.unanswered
        self._asked = []

    def see_nothing(self) -> None:
        """Nobody knows what others leave."""
        for account in self._held.values():
            account.remaining = 0

    def give_up(self) -> None:
        """All that is held ready goes back with the next exchange."""
        for account in self._held.values():
            self._give_up(account)

    def give_back(self, now: float) -> list[Ask]:
        """The last exchange of a gateway that leaves; `apply` need not follow. Of a minute what it
        did not use goes back, for what it holds then stays counted until the minute is over."""
        asks: list[Ask] = []
        for account in self._held.values():
            if account.kind.span is Span.MINUTE and not account.is_past(now):
                self._give_up(account)
                asks.append(Ask(*account.key, account.taken, account.returning))
        return [ask for ask in asks if not ask.is_empty]

    def lose(self) -> None:
        """All slices are gone. What is under way goes on, and is not held any more."""
        for waiter in list(self.waiters):
            self.leave(waiter)
        self._current.clear()
        self._held.clear()
        self._due.clear()
        self._calls.clear()
        self._asked = []

    def believe_catalog(self) -> None:
        """A newer catalog says which limits there are."""
        for account in self._held.values():
            account.is_void = False

    def _open(self, limit: Limit, window: Window, before: Account | None) -> Account:
        account = Account(limit, window)
        known = self._held.setdefault(account.key, account)
        # Of a new budget nothing: those who are not cut off may be given all of it.
        is_new_rate = known is account and limit.kind not in BUDGETS
        if is_new_rate and before is not None and before.window.end == window.start:
            share = max(0, before.granted) / max(1, before.highest)
            account.may_share = min(1.0, share)
        return known

    def _forget(self, account: Account) -> None:
        self._held.pop(account.key, None)
        if self._current.get(account.key[:2]) is account:
            del self._current[account.key[:2]]

    def _window(self, span: Span, at: float) -> Window:
        known = self._windows.get(span)
        if known is None or not known.holds(at):
            known = self._windows[span] = window(span, at)
        return known

    def _commit(self, holds: Sequence[Hold]) -> None:
        for hold in holds:
            account = hold.account
            account.reserved += hold.amount
            if account.is_void and account.spare < 0:
                # The limit may be set again, and what this uses leaves the slice when it is loaded.
                account.taken -= account.spare
                account.granted -= account.spare
            if account.is_low:
                self._due[account] = None

    def _needs(self) -> dict[Account, tuple[int, int]]:
        """Of each account that is waited for: what the first in line needs, and all together."""
        needs: dict[Account, tuple[int, int]] = {}
        for waiter in self.waiters:
            for hold in waiter.holds:
                first, total = needs.get(hold.account, (hold.amount, 0))
                needs[hold.account] = first, total + hold.amount
        return needs

    def _ask(self, account: Account, needs: tuple[int, int], now: float) -> Ask:
        first, total = needs
        gives_back = account.gives_back(now)
        if gives_back:
            self._give_up(account)
        need, want = max(0, first - account.ready), max(0, total - account.ready)
        if not gives_back and account.wants_more(now):
            want = max(want, 1)
        account.needed = first
        call = account.call if need else 0
        told = account.taken, account.returning, account.to_answer
        account.taken = account.returning = account.to_answer = 0
        return Ask(*account.key, *told, need, want, call)

    def _give_up(self, account: Account) -> None:
        """What it has to spare goes back with the next exchange."""
        if account.spare > 0:
            account.returning += account.spare
            account.granted -= account.spare
            self._due[account] = None
