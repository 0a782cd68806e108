"""Slices of limits among gateways, in any order of events, in a real Postgres: never more than the
limit, nobody refused who had room, nothing left over."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections import Counter
from collections.abc import Coroutine, Sequence
from datetime import UTC, datetime
from typing import Any, TypeVar

import asyncpg
import msgspec
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from gateway.limits.lease_book import LeaseBook, LeaseRecall, LeaseRequest, LeaseResponse, Waiter
from gateway.limits.leases import CHANNEL
from gateway.limits.quota import IDLE_S, Hold, Key
from gateway.quota_types import Kind, Limit, Span, leased_bits, window
from tests.admin.usage.test_usage import load, row
from tests.gateway.faulty_renewal import TENANT, opened_renewal
from tests.scale import scaled

T = TypeVar("T")

GONE = ""
"""Holder of what gateways that are gone held of minutes."""
GATEWAYS = 3
LIMITS = {
    Kind.TOKENS_PER_DAY: 40,
    Kind.CONCURRENT_REQUESTS: 6,
    Kind.SPEND_PER_MONTH: 100,
    Kind.TOKENS_PER_MINUTE: 20,
}
amounts = st.fixed_dictionaries(
    {
        Kind.TOKENS_PER_DAY: st.integers(1, 20),
        Kind.CONCURRENT_REQUESTS: st.just(1),
        Kind.SPEND_PER_MONTH: st.integers(0, 50),
        Kind.TOKENS_PER_MINUTE: st.integers(1, 10),
    }
)


SUMS = """
SELECT CASE WHEN starts_with(kind, 'tokens') THEN metered_tokens ELSE cost END AS amount,
       kind, start::timestamp AS start, '' AS holder, true AS is_loaded
FROM usage_totals, unnest($2::text[]) kind
WHERE subject = $1 AND span = split_part(kind, '_per_', 2)
UNION ALL
SELECT granted, kind, start AT TIME ZONE 'UTC', gateway_id, false
FROM quota_leases WHERE subject = $1
"""


class Postgres:
    """What gateways ask of the database, one after the other, and what it has then."""

    numbers = itertools.count()
    """Of requests, whichever example made them."""

    def __init__(self, dsn: str) -> None:
        self._runner = asyncio.Runner()
        self._opened = opened_renewal(dsn)
        self._renewal = self._run(self._opened.__aenter__())
        self._connection: Any = self._run(self._listen(dsn))
        self.heard: list[LeaseRecall] = []
        for kind, limit in LIMITS.items():
            self._run(self._renewal.set(Limit(TENANT, kind, limit)))
        self._read()

    async def _listen(self, dsn: str) -> Any:
        connection: Any = await asyncpg.connect(dsn)
        await connection.add_listener(CHANNEL, self._hear)
        return connection

    def _run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        return self._runner.run(coroutine)

    def _hear(self, _connection: Any, _pid: int, _channel: str, payload: str) -> None:
        self.heard.append(msgspec.json.decode(payload, type=LeaseRecall))

    def _read(self) -> None:
        """Takes what is loaded and leased. What was notified before has been heard then."""
        kinds = [kind.value for kind in LIMITS]
        rows = self._run(self._connection.fetch(SUMS, TENANT, kinds))
        self.loaded = Counter[Key]()
        self.leases = dict[tuple[Key, str], int]()
        for found in rows:
            is_always = found["kind"] == Kind.CONCURRENT_REQUESTS
            start = "-infinity" if is_always else found["start"].replace(tzinfo=UTC).isoformat()
            key = (TENANT, found["kind"], start)
            if found["is_loaded"]:
                self.loaded[key] = int(found["amount"])
            else:
                self.leases[key, found["holder"]] = int(found["amount"])

    def held(self, key: Key) -> int:
        return sum(amount for (of, _), amount in self.leases.items() if of == key)

    def answer(
        self, holder: str, number: int, asks: list[LeaseRequest]
    ) -> list[LeaseResponse] | None:
        # However slow the machine is, all gateways are alive.
        alive = "UPDATE quota_holders SET seen_at = now() WHERE gateway_id <> ''"
        self._run(self._connection.execute(alive))
        answers = self._run(self._renewal.renew(holder, number, asks))
        self._read()
        return answers

    def load(self, used: Sequence[tuple[Hold, int]], holder: str) -> None:
        """Loads each use as a request of its own, and once more, as after a lost answer."""
        rows: list[dict[str, Any]] = []
        for hold, amount in used:
            kind, start = hold.quota.kind, hold.quota.window.start
            fields = {"cost": 0, "metered_tokens": 0}
            fields["cost" if kind.counts_money else "metered_tokens"] = amount
            fields |= {"leased": leased_bits(TENANT, [Limit(TENANT, kind, 0)])}
            whose = {"tenant_id": TENANT, "gateway": holder}
            at = datetime.fromtimestamp(start, UTC)
            rows.append(row(next(self.numbers), at, **whose, **fields))
        for _ in range(2):
            self._run(load(self._renewal.database, rows))
        self._read()

    def drop(self, holder: str) -> None:
        self._run(self._renewal.release([holder]))
        self._read()

    def close(self) -> None:
        self._run(self._connection.close())
        self._run(self._opened.__aexit__(None, None, None))
        self._runner.close()


class Gateway:
    def __init__(self, name: str) -> None:
        self.name = name
        self.book = LeaseBook()
        self.number = 0
        self.asks: list[Any] | None = None
        """Sent and not answered."""
        self.running: list[list[Hold]] = []
        self.unloaded: list[tuple[Hold, int]] = []
        self.waiting: list[Waiter] = []
        self.used_in_minutes: Counter[Key] = Counter()


class LeaseMachine(RuleBasedStateMachine):
    """Gateways exchange when a rule says so, and hear calls when another does; answers get lost and
    are asked for again; usage is loaded late; gateways leave or die."""

    dsn = ""

    def __init__(self) -> None:
        super().__init__()
        self.database = Postgres(self.dsn)
        # The database keeps no minute that is long past.
        self.now = time.time() // 60 * 60
        self.used_in_minutes: Counter[Key] = Counter()
        """By all gateways that ever were, with what those were running that died."""
        self.count = 0
        self.gateways = [self._new() for _ in range(GATEWAYS)]
        self.heard = dict.fromkeys(self.gateways, 0)

    def _new(self) -> Gateway:
        self.count += 1
        return Gateway(f"g{self.count}")

    def _finish(self, gateway: Gateway) -> None:
        """Looks at who need not wait any more."""
        for waiter in gateway.book.serve(self.now):
            gateway.waiting.remove(waiter)
            if waiter.is_served:
                gateway.running.append(list(waiter.holds))
            elif waiter.refused is not None:
                self._check_refusal(waiter.refused)

    def _check_refusal(self, hold: Hold) -> None:
        """What is used or promised anywhere, and this: more than the limit."""
        key = hold.quota.key
        promised = sum(
            each.amount
            for gateway in self.gateways
            for holds in gateway.running
            for each in holds
            if each.quota.key == key
        )
        used = self.database.loaded[key] + sum(
            amount
            for gateway in self.gateways
            for each, amount in gateway.unloaded
            if each.quota.key == key
        )
        used += self.database.leases.get((key, GONE), 0)
        used += sum(gateway.used_in_minutes[key] for gateway in self.gateways)
        assert used + promised + hold.amount > hold.quota.limit

    @rule(which=st.integers(0, GATEWAYS - 1), amounts=amounts)
    def ask(self, which: int, amounts: dict[Kind, int]) -> None:
        gateway = self.gateways[which]
        holds = [
            Hold(gateway.book.quota(Limit(TENANT, kind, LIMITS[kind]), self.now, self.now), n)
            for kind, n in amounts.items()
        ]
        if gateway.book.take(holds):
            gateway.running.append(holds)
        else:
            gateway.waiting.append(gateway.book.wait(holds))

    @rule(which=st.integers(0, GATEWAYS - 1), is_lost=st.booleans(), sweeps=st.booleans())
    def renew(self, which: int, is_lost: bool, sweeps: bool) -> None:
        gateway = self.gateways[which]
        if gateway.asks is None:
            if sweeps:
                gateway.book.sweep(self.now)
            gateway.asks = gateway.book.gather(self.now)
            gateway.number += 1
        answers = self.database.answer(gateway.name, gateway.number, gateway.asks)
        if is_lost:
            return
        assert answers is not None
        gateway.book.apply(answers)
        gateway.asks = None
        self._finish(gateway)

    @rule(which=st.integers(0, GATEWAYS - 1))
    def hear(self, which: int) -> None:
        gateway = self.gateways[which]
        for call in self.database.heard[self.heard[gateway] :]:
            gateway.book.hear(call)
        self.heard[gateway] = len(self.database.heard)

    @precondition(lambda self: any(gateway.running for gateway in self.gateways))
    @rule(data=st.data())
    def settle(self, data: st.DataObject) -> None:
        gateway = data.draw(st.sampled_from([g for g in self.gateways if g.running]))
        holds = gateway.running.pop(data.draw(st.integers(0, len(gateway.running) - 1)))
        for hold in holds:
            is_counted = hold.quota.kind is not Kind.CONCURRENT_REQUESTS
            used = data.draw(st.integers(0, hold.amount)) if is_counted else 0
            gateway.book.settle(hold, used)
            if hold.quota.kind is Kind.TOKENS_PER_MINUTE:
                gateway.used_in_minutes[hold.quota.key] += used
                self.used_in_minutes[hold.quota.key] += used
            elif used:
                gateway.unloaded.append((hold, used))
        self._finish(gateway)

    @rule(which=st.integers(0, GATEWAYS - 1))
    def load(self, which: int) -> None:
        self._load(self.gateways[which])

    def _load(self, gateway: Gateway) -> None:
        if gateway.unloaded:
            self.database.load(gateway.unloaded, gateway.name)
        gateway.unloaded.clear()

    @rule(which=st.integers(0, GATEWAYS - 1))
    def die(self, which: int) -> None:
        """Another takes over its write-ahead log, loads it, and only then its leases are free."""
        gateway = self.gateways[which]
        for holds in gateway.running:
            for hold in holds:
                if hold.quota.kind is Kind.TOKENS_PER_MINUTE:
                    self.used_in_minutes[hold.quota.key] += hold.amount
        self._replace(which)

    @precondition(lambda self: any(not (g.running or g.waiting) for g in self.gateways))
    @rule(data=st.data())
    def leave(self, data: st.DataObject) -> None:
        """Of the minute only what it used stays counted."""
        idle = [i for i, g in enumerate(self.gateways) if not (g.running or g.waiting)]
        which = data.draw(st.sampled_from(idle))
        gateway = self.gateways[which]
        key = (TENANT, Kind.TOKENS_PER_MINUTE.value, window(Span.MINUTE, self.now).name)
        left_by_others = self.database.leases.get((key, GONE), 0)
        if gateway.asks is not None:
            self.renew(which, False, False)
        gateway.asks = gateway.book.give_back(self.now)
        gateway.number += 1
        assert self.database.answer(gateway.name, gateway.number, gateway.asks) is not None
        self._replace(which)
        left = self.database.leases.get((key, GONE), 0) - left_by_others
        assert left == gateway.used_in_minutes[key]

    def _replace(self, which: int) -> None:
        gateway = self.gateways[which]
        self._load(gateway)
        self.database.drop(gateway.name)
        made = self.gateways[which] = self._new()
        self.heard[made] = 0

    @rule(seconds=st.sampled_from([0.1, 1.0, IDLE_S + 1]))
    def wait(self, seconds: float) -> None:
        self.now += seconds

    @invariant()
    def never_more_than_the_limit(self) -> None:
        for kind, limit in LIMITS.items():
            key = (TENANT, kind.value, window(kind.span, self.now).name)
            assert self.database.loaded[key] + self.database.held(key) <= limit
            promised = self.database.loaded[key]
            for gateway in self.gateways:
                promised += sum(n for hold, n in gateway.unloaded if hold.quota.key == key)
                for holds in gateway.running:
                    promised += sum(hold.amount for hold in holds if hold.quota.key == key)
            promised += self.used_in_minutes[key]
            assert promised <= limit

    def teardown(self) -> None:
        """When all has ended, nothing is held but what was used of the minute."""
        for gateway in self.gateways:
            for waiter in list(gateway.book.waiters):
                gateway.book.leave(waiter)
            for holds in gateway.running:
                for hold in holds:
                    gateway.book.settle(hold, 0)
            gateway.running.clear()
            gateway.waiting.clear()
            self._load(gateway)
        for _ in range(3):
            self.now += IDLE_S + 1
            for which in range(GATEWAYS):
                self.renew(which, False, True)
        for kind in LIMITS:
            key = (TENANT, kind.value, window(kind.span, self.now).name)
            left = 0
            if kind.span is Span.MINUTE:
                left = self.database.leases.get((key, GONE), 0)
                left += sum(gateway.used_in_minutes[key] for gateway in self.gateways)
            assert self.database.held(key) == left
        self.database.close()


def test_leases_in_any_order_of_events(lease_dsn: str) -> None:
    class OfThisDatabase(LeaseMachine):
        dsn = lease_dsn

    most = settings(max_examples=scaled(40, 1000), stateful_step_count=60, deadline=None)
    run_state_machine_as_test(OfThisDatabase, settings=most)
