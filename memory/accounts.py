"""Tenants' accounts: the bytes that each account holds, and the order of eviction when memory is
short.

    level of an account = bytes that it holds / its weight

Bytes are evicted from the account of the highest level first, and only while its level stays above
the requesting account's level. This is max-min fairness: each account can always hold its share,
and may hold more while other accounts do not use their shares.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import NamedTuple

from memory.errors import require
from memory.reuse import HALF_LIFE_S

ACTIVE_S = 5 * HALF_LIFE_S
"""Seconds without a request after which an account has no share of the memory."""


class Tenant(NamedTuple):
    """Tenant that is charged for bytes, with its weight as of its last request."""

    name: str
    weight: int


NO_TENANT = Tenant("", 0)
"""Account that is charged for bytes that no tenant requested. It has no share of the memory."""

Turn = tuple[float, int]
"""Place of a request for an adapter among the requests of its account. The lowest is first."""
FIRST_TURN: Turn = (0.0, 0)
LAST_TURN: Turn = (math.inf, 0)
"""Turn of an adapter that no sequence can use yet."""


class Accounts:
    """Weights of the accounts that requested memory within the last `ACTIVE_S` seconds."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._asked: dict[str, tuple[int, float]] = {}
        """Weight and time of the last request of each account, oldest request first."""

    def note(self, tenant: Tenant) -> None:
        """Records a request of the tenant and forgets accounts that are no longer active."""
        if tenant.name == NO_TENANT.name:
            return
        now = self._clock()
        self._asked.pop(tenant.name, None)
        self._asked[tenant.name] = tenant.weight, now
        while (first := next(iter(self._asked))) and now - self._asked[first][1] > ACTIVE_S:
            del self._asked[first]

    def weight(self, name: str) -> int:
        """Returns the account's weight, or 0 if it made no request within the last `ACTIVE_S`
        seconds."""
        weight, asked_s = self._asked.get(name, (0, -math.inf))
        return weight if self._clock() - asked_s <= ACTIVE_S else 0


class Holdings:
    """Amount of one resource, such as bytes or block tables, that each account holds."""

    def __init__(self, accounts: Accounts, held: Iterable[tuple[str, int]] = ()) -> None:
        self.accounts = accounts
        self.held: dict[str, int] = {}
        for name, amount in held:
            self.charge(name, amount)

    def charge(self, name: str, amount: int) -> None:
        """Charges the amount to the account. A negative amount is a refund."""
        held = self.held.get(name, 0) + amount
        require(held >= 0, f"{name!r} holds {held}")
        if held:
            self.held[name] = held
        else:
            self.held.pop(name, None)

    def level(self, name: str, extra: int = 0) -> float:
        """Returns the amount that the account holds, plus `extra`, divided by the account's weight.
        Returns infinity if the weight is 0."""
        weight = self.accounts.weight(name)
        return (self.held.get(name, 0) + extra) / weight if weight else math.inf


class Ask:
    """Request of an account for more of a resource. Decides which items may be evicted for the
    request.

    The requested amount counts as already held. Therefore an account whose level would exceed the
    level of all others evicts its own items.
    """

    def __init__(self, holdings: Holdings, name: str, amount: int, *, is_first: bool) -> None:
        """is_first: whether the account uses no other item of the requested kind, such as pages or
        adapters. If so, items of any account may be evicted for the request, in the usual order of
        eviction, so that the account never starves."""
        self._holdings = holdings
        self.name = name
        self._amount = amount
        self._is_first = is_first

    def priority(self, names: Iterable[str]) -> float:
        """Returns the eviction priority of an item that is charged to the accounts. Items with the
        lowest priority are evicted first."""
        return max((-self._level(name) for name in names), default=-math.inf)

    def may_take(self, names: Iterable[str]) -> bool:
        """Whether this request may evict an item that is charged to the accounts."""
        return self._is_first or all(
            name == self.name or self._level(name) > self._level(self.name) for name in names
        )

    def most(self, name: str, spare: int) -> float:
        """Returns the largest amount that may be evicted from the account for this request. spare:
        amount that the requesting account can evict from its own items."""
        if self._is_first or name == self.name:
            return math.inf
        holdings, amount = self._holdings, self._amount - spare
        if holdings.level(name) <= holdings.level(self.name, amount):
            return 0.0
        own = (holdings.held.get(self.name, 0) + amount) / holdings.accounts.weight(self.name)
        return holdings.held[name] - holdings.accounts.weight(name) * own

    def _level(self, name: str) -> float:
        return self._holdings.level(name, self._amount if name == self.name else 0)
