"""The database's side of quotas as a model in memory."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence

from gateway.limits.lease_book import LeaseRecall, LeaseRequest, LeaseResponse
from gateway.limits.quota import Key
from gateway.quota_types import Kind, Span
from store.errors import DatabaseUnavailable

GONE = ""
"""Holder of what gateways that are gone held of minutes."""


class LeaseModel:
    """`quota_exchange` of the migrations, one call after the other; calls to give back are kept in
    `heard` for the test to deliver."""

    def __init__(self) -> None:
        self.limits: dict[tuple[str, str], int] = {}
        """By subject and kind."""
        self.loaded: defaultdict[Key, int] = defaultdict(int)
        self.leases: dict[tuple[Key, str], int] = {}
        """By limit and holder."""
        self.heard: list[LeaseRecall] = []
        self._answered: defaultdict[tuple[Key, str], int] = defaultdict(int)
        self._holders: dict[str, tuple[int, list[LeaseResponse]]] = {}
        self._calls = 0

    def held(self, key: Key) -> int:
        return sum(amount for (of, _), amount in self.leases.items() if of == key)

    def load(self, key: Key, holder: str, amount: int) -> None:
        """Usage that was reserved from a lease."""
        self.loaded[key] += amount
        if (key, holder) in self.leases:
            self.leases[key, holder] -= amount

    def drop(self, holder: str) -> None:
        self._holders.pop(holder, None)
        for place in [place for place in self.leases if place[1] == holder]:
            key, amount = place[0], self.leases.pop(place)
            if Kind(key[1]).span is Span.MINUTE:
                self.leases[key, GONE] = self.leases.get((key, GONE), 0) + amount
            self._answered.pop(place, None)

    def answer(
        self, holder: str, number: int, asks: Sequence[LeaseRequest]
    ) -> list[LeaseResponse] | None:
        last, told = self._holders.get(holder, (0, []))
        if number == last:
            return told
        if number != last + 1:
            return None
        self._holders.setdefault(holder, (0, []))
        answers = [self._answer(holder, ask) for ask in asks]
        self._holders[holder] = number, answers
        return answers

    def _answer(self, holder: str, ask: LeaseRequest) -> LeaseResponse:
        key = (ask.subject, ask.kind, ask.start)
        place = key, holder
        limit = self.limits.get(key[:2])
        free = (limit or 0) - self.loaded[key] - self.held(key) - ask.taken + ask.returned
        gift = 0
        if limit is not None and ask.need <= free and ask.need + ask.want > 0:
            fair = max(0, free) // (2 * max(1, len(self._holders)))
            gift = max(0, min(free, max(ask.want, ask.need, fair)))
        change = gift + ask.taken - ask.returned
        if change:
            self.leases[place] = self.leases.get(place, 0) + change
        if place in self.leases:
            self._answered[place] = 0 if gift else max(self._answered[place], ask.answered)
        call, missing = ask.call, 0
        if limit is not None and gift < ask.need <= limit:
            if not call:
                self._calls += 1
                call = self._calls
            missing = sum(
                of == key
                and other not in (holder, GONE)
                and amount > 0
                and self._answered[of, other] < call
                for (of, other), amount in self.leases.items()
            )
            if missing:
                self.heard.append(LeaseRecall(*key, call))
        return LeaseResponse(gift, None if limit is None else free - gift, missing, call)


class Wire:
    """The exchange of gateways in one process with a model, which may be away."""

    def __init__(self, model: LeaseModel) -> None:
        self.model = model
        self.is_away = False
        self.num_renewals = 0
        self._listeners: list[Callable[[LeaseRecall], None]] = []

    async def renew(
        self, holder: str, number: int, asks: list[LeaseRequest]
    ) -> list[LeaseResponse] | None:
        self.num_renewals += 1
        if self.is_away:
            raise DatabaseUnavailable("it is away")
        answers = self.model.answer(holder, number, asks)
        heard, self.model.heard = self.model.heard, []
        for call in heard:
            for listener in self._listeners:
                listener(call)
        return answers

    async def listen(self, hear: Callable[[LeaseRecall], None]) -> None:
        self._listeners.append(hear)

    async def upkeep(self) -> None:
        pass

    async def release(self, holders: Sequence[str]) -> None:
        for holder in holders:
            self.model.drop(holder)
