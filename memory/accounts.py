"""Whose the bytes are, and who gives way to whom when they are short.

    level of an account = what it holds / its weight

The account of the highest level gives way first, and to nobody who would then hold more for its
weight than it does: so each is left with what max-min fairness gives it, its share of all at least,
and may hold all that nobody else asks for.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import NamedTuple

from memory.errors import require
from memory.reuse import HALF_LIFE_S

ACTIVE_S = 5 * HALF_LIFE_S
"""Who has asked for nothing for so long has no share any more."""


class Tenant(NamedTuple):
    """Whose account it is, as of its last request."""

    name: str
    weight: int


NOBODY = Tenant("", 0)
"""What no tenant asked for is charged to it. It has no share."""


class Accounts:
    """The weights of those that asked for something of late."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._asked: dict[str, tuple[int, float]] = {}
        """Weight, and when it was last asked for something, the longest ago first."""

    def note(self, tenant: Tenant) -> None:
        """It asks for something."""
        if tenant.name == NOBODY.name:
            return
        now = self._clock()
        self._asked.pop(tenant.name, None)
        self._asked[tenant.name] = tenant.weight, now
        while (first := next(iter(self._asked))) and now - self._asked[first][1] > ACTIVE_S:
            del self._asked[first]

    def weight(self, name: str) -> int:
        """0: it has no share."""
        weight, asked_s = self._asked.get(name, (0, -math.inf))
        return weight if self._clock() - asked_s <= ACTIVE_S else 0


class Ledger:
    """How much of one thing each account holds."""

    def __init__(self, accounts: Accounts, held: Iterable[tuple[str, int]] = ()) -> None:
        self.accounts = accounts
        self.held: dict[str, int] = {}
        for name, amount in held:
            self.charge(name, amount)

    def copy(self) -> Ledger:
        """As it is now."""
        copied = Ledger(self.accounts)
        copied.held = self.held.copy()
        return copied

    def charge(self, name: str, amount: int) -> None:
        """A negative amount was given back."""
        held = self.held.get(name, 0) + amount
        require(held >= 0, f"{name!r} holds {held}")
        if held:
            self.held[name] = held
        else:
            self.held.pop(name, None)

    def level(self, name: str, extra: int = 0) -> float:
        """What it holds for its weight; with so much more."""
        weight = self.accounts.weight(name)
        return (self.held.get(name, 0) + extra) / weight if weight else math.inf


class Ask:
    """An account that wants more, and what others would give up for it.

    `amount` counts as held already: who is about to hold most for its weight gives way itself.
    """

    def __init__(
        self, ledger: Ledger, name: str, amount: int, *, is_first: bool = False, spare: int = 0
    ) -> None:
        """is_first: the account uses nothing else of the kind. One thing it may have at anybody's
        cost, in the same order: nobody is to wait for ever for more than its share. spare: what it
        could give up itself."""
        self._ledger = ledger
        self.name = name
        self._amount = amount
        self._is_first = is_first
        self._spare = spare

    def turn(self, *names: str) -> float:
        """Of something that these hold, the last of them: the less, the sooner it goes."""
        return max((-self._level(name) for name in names), default=-math.inf)

    def may_take(self, *names: str) -> bool:
        """Whether all of these give way now."""
        return self._is_first or all(
            name == self.name or self._level(name) > self._level(self.name) for name in names
        )

    def most(self, name: str) -> float:
        """What the account may lose at most, in the end."""
        if self._is_first or name == self.name:
            return math.inf
        ledger, weight = self._ledger, self._ledger.accounts.weight(name)
        if ledger.level(name) <= ledger.level(self.name, self._amount - self._spare):
            return 0.0
        if not weight:
            return math.inf
        own = ledger.held.get(self.name, 0) + self._amount - self._spare
        return ledger.held[name] - weight * own / ledger.accounts.weight(self.name)

    def _level(self, name: str) -> float:
        return self._ledger.level(name, self._amount if name == self.name else 0)
