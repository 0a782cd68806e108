"""Accounts of tenants, the bytes that each holds, and the order of eviction when bytes are short.

    level of an account = what it holds / its weight

The account of the highest level gives way first, and to none that would then hold more for its
weight than it does. So max-min fairness holds: each account keeps its share at least, and may hold
all that no other asks for.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import NamedTuple

from memory.errors import require
from memory.reuse import HALF_LIFE_S

ACTIVE_S = 5 * HALF_LIFE_S
"""Seconds without a request after which an account has no share."""


class Tenant(NamedTuple):
    """An account: a tenant with its weight as of its last request."""

    name: str
    weight: int


NO_TENANT = Tenant("", 0)
"""The account of bytes that no tenant asked for. It has no share."""


class Accounts:
    """Weights of the accounts that asked for something within `ACTIVE_S`."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._asked: dict[str, tuple[int, float]] = {}
        """Weight and time of the last request, the oldest first."""

    def note(self, tenant: Tenant) -> None:
        """Notes a request of the tenant."""
        if tenant.name == NO_TENANT.name:
            return
        now = self._clock()
        self._asked.pop(tenant.name, None)
        self._asked[tenant.name] = tenant.weight, now
        while (first := next(iter(self._asked))) and now - self._asked[first][1] > ACTIVE_S:
            del self._asked[first]

    def weight(self, name: str) -> int:
        """Weight of the account; 0: it has no share."""
        weight, asked_s = self._asked.get(name, (0, -math.inf))
        return weight if self._clock() - asked_s <= ACTIVE_S else 0


class BytesHeld:
    """What each account holds of one resource, in its units: bytes, or block tables."""

    def __init__(self, accounts: Accounts, held: Iterable[tuple[str, int]] = ()) -> None:
        self.accounts = accounts
        self.held: dict[str, int] = {}
        for name, amount in held:
            self.charge(name, amount)

    def charge(self, name: str, amount: int) -> None:
        """Charges the amount to the account; a negative amount is given back."""
        held = self.held.get(name, 0) + amount
        require(held >= 0, f"{name!r} holds {held}")
        if held:
            self.held[name] = held
        else:
            self.held.pop(name, None)

    def level(self, name: str, extra: int = 0) -> float:
        """What the account holds, and `extra` more, for its weight."""
        weight = self.accounts.weight(name)
        return (self.held.get(name, 0) + extra) / weight if weight else math.inf


class Ask:
    """An account that asks for more, and what others would give up for it.

    `amount` counts as held already: an account that would hold most for its weight gives way
    itself."""

    def __init__(
        self,
        bytes_held: BytesHeld,
        name: str,
        amount: int,
        *,
        is_first: bool = False,
        spare: int = 0,
    ) -> None:
        """is_first: the account uses nothing else of the kind. Its first may be had at any
        account's cost, in the same order, so that none waits for ever. spare: what it could give up
        itself."""
        self._bytes_held = bytes_held
        self.name = name
        self._amount = amount
        self._is_first = is_first
        self._spare = spare

    def priority(self, *names: str) -> float:
        """Eviction priority of something that these accounts hold: the least is evicted first."""
        return max((-self._level(name) for name in names), default=-math.inf)

    def may_take(self, *names: str) -> bool:
        """Whether all of these accounts give way now."""
        return self._is_first or all(
            name == self.name or self._level(name) > self._level(self.name) for name in names
        )

    def most(self, name: str) -> float:
        """The most that the account may lose."""
        if self._is_first or name == self.name:
            return math.inf
        bytes_held, weight = self._bytes_held, self._bytes_held.accounts.weight(name)
        if bytes_held.level(name) <= bytes_held.level(self.name, self._amount - self._spare):
            return 0.0
        if not weight:
            return math.inf
        own = bytes_held.held.get(self.name, 0) + self._amount - self._spare
        return bytes_held.held[name] - weight * own / bytes_held.accounts.weight(self.name)

    def _level(self, name: str) -> float:
        return self._bytes_held.level(name, self._amount if name == self.name else 0)
