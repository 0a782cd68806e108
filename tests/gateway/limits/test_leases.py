"""Requests and their gateway's leases: who waits for the database, and what goes on without it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress

import pytest

from gateway import telemetry
from gateway.exceptions import QuotaExceeded, QuotaUnavailable
from gateway.limits.lease_book import AHEAD_S, LeaseRequest, LeaseResponse
from gateway.limits.leases import REFUSED_S, SWEEP_INTERVAL_S, Leases
from gateway.limits.quota import Hold
from gateway.quota_types import Kind, Limit
from store.errors import DatabaseUnavailable
from tests.gateway.lease_renewals import LeaseModel, Wire
from tests.gateway.live import eventually

NOON = 1_790_000_040.0
"""The first second of a minute."""
REQUESTS = Limit("ten_a", Kind.REQUESTS_PER_MINUTE, 100)
AT_ONCE = Limit("ten_a", Kind.CONCURRENT_REQUESTS, 10)
TOKENS = Limit("ten_a", Kind.TOKENS_PER_DAY, 1000)
BUDGETS = [
    (Limit("ten_a", Kind.SPEND_PER_DAY, 100), 86_400.0),
    (Limit("ten_a", Kind.SPEND_PER_MONTH, 100), 31 * 86_400.0),
]
"""With how long at most until the next window."""


class Clock:
    def __init__(self) -> None:
        self.now = NOON

    def __call__(self) -> float:
        return self.now


class FaultyWire(Wire):
    cut_off = ""
    """The only gateway that the database does not answer."""
    delay_s = 0.0
    is_deaf = False
    """The database does what it is asked, and its answer is lost."""

    async def renew(
        self, holder: str, number: int, asks: list[LeaseRequest]
    ) -> list[LeaseResponse] | None:
        if holder == self.cut_off:
            raise DatabaseUnavailable("it does not answer this one")
        await asyncio.sleep(self.delay_s)
        answers = await super().renew(holder, number, asks)
        if self.is_deaf:
            raise DatabaseUnavailable("its answer is lost")
        return answers


class Bench:
    """Gateways over one wire, in one clock."""

    def __init__(self) -> None:
        self.clock = Clock()
        self.model = LeaseModel()
        self.wire = FaultyWire(self.model)
        for limit in (REQUESTS, AT_ONCE):
            self.set(limit)

    def set(self, limit: Limit) -> None:
        self.model.limits[limit.subject, limit.kind.value] = limit.amount

    @asynccontextmanager
    async def gateway(
        self,
        name: str = "g1",
        lifetime_s: float = 300,
        wait_s: float = 1.0,
        *,
        leaves: bool = False,
    ) -> AsyncIterator[Leases]:
        """leaves: at the end, as with SIGTERM; otherwise it is killed."""
        leases = Leases(self.wire, name, lifetime_s, self.clock, wait_s)
        task = asyncio.create_task(leases.run())
        yield leases
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task
        if leaves:
            await leases.leave()

    async def take(self, leases: Leases, limit: Limit = REQUESTS, amount: int = 1) -> list[Hold]:
        return await leases.take([(limit, amount)], self.clock())

    async def take_all(self, leases: Leases, limit: Limit = REQUESTS) -> int:
        """How many more requests are served."""
        num_served = 0
        with suppress(QuotaExceeded, QuotaUnavailable):
            while True:
                await self.take(leases, limit)
                num_served += 1
        return num_served

    async def away(self, leases: Leases) -> None:
        """The gateway has noticed when this returns."""
        self.wire.is_away = True
        before = self.wire.num_renewals
        await eventually(lambda: self.wire.num_renewals > before + 1)


@pytest.fixture
def bench() -> Bench:
    return Bench()


async def test_most_requests_wait_for_nobody(bench: Bench) -> None:
    async with bench.gateway() as leases:
        await bench.take(leases)
        for _ in range(60):
            taking = asyncio.ensure_future(bench.take(leases))
            await asyncio.sleep(0)
            assert taking.done()
            await asyncio.sleep(0.005)
    assert bench.wire.num_renewals < 15


async def test_what_is_held_goes_on_without_the_database(bench: Bench) -> None:
    """What it does not cover waits for nothing."""
    async with bench.gateway(wait_s=60) as leases:
        await bench.take(leases)
        await bench.away(leases)
        async with asyncio.timeout(10):
            with pytest.raises(QuotaUnavailable):
                for _ in range(REQUESTS.amount):
                    await bench.take(leases)


async def test_who_waits_when_the_database_goes_has_of_the_share_too(bench: Bench) -> None:
    async with bench.gateway(wait_s=60) as leases:
        for _ in range(30):
            await bench.take(leases)
        bench.wire.is_away = True
        bench.clock.now += 60
        async with asyncio.timeout(10):
            await bench.take(leases)


async def test_a_new_minute_without_the_database_has_the_share_of_the_last(bench: Bench) -> None:
    """All gateways together have no more than the limit, and each has what it had."""
    async with bench.gateway("g1") as one, bench.gateway("g2") as two:
        for _ in range(30):
            await bench.take(one)
        await bench.take(two)
        await bench.away(one)
        bench.clock.now += 60
        served: dict[Leases, int] = {}
        for leases in (one, two):
            served[leases] = await bench.take_all(leases)
        assert served[one] >= 30 and served[two] >= 1
        assert sum(served.values()) <= REQUESTS.amount
        # Back again, what they took is known: nobody gets it twice.
        bench.wire.is_away = False
        before = bench.wire.num_renewals
        await eventually(lambda: bench.wire.num_renewals > before + 2)
        served[one] += await bench.take_all(one)
    assert sum(served.values()) == REQUESTS.amount


async def test_the_share_of_a_limit_that_was_lowered_is_a_share(bench: Bench) -> None:
    """All gateways together have no more than the limit, though each had more of the higher one."""
    lower = Limit("ten_a", Kind.REQUESTS_PER_MINUTE, 10)
    async with bench.gateway("g1") as one, bench.gateway("g2") as two:
        for leases in (one, two):
            for _ in range(40):
                await bench.take(leases)
        bench.set(lower)
        for leases in (one, two):
            assert await bench.take_all(leases, lower) == 0
        await bench.away(one)
        bench.clock.now += 60
        num_served = [await bench.take_all(leases, lower) for leases in (one, two)]
    assert 0 < sum(num_served) <= lower.amount


async def test_the_share_of_a_limit_that_was_raised_is_a_share_of_the_higher(bench: Bench) -> None:
    lower = Limit("ten_a", Kind.REQUESTS_PER_MINUTE, 10)
    bench.set(lower)
    async with bench.gateway("g1") as one, bench.gateway("g2") as two:
        for leases in (one, two):
            await bench.take(leases, lower)
        bench.set(REQUESTS)
        for leases in (one, two):
            for _ in range(40):
                await bench.take(leases)
        await bench.away(one)
        bench.clock.now += 60
        num_served = [await bench.take_all(leases) for leases in (one, two)]
    assert 80 <= sum(num_served) <= REQUESTS.amount


async def test_a_share_beside_a_grant_that_was_not_heard_of_is_part_of_it(bench: Bench) -> None:
    async with bench.gateway() as leases:
        for _ in range(80):
            await bench.take(leases)
        bench.wire.is_deaf = True
        bench.clock.now += 60
        num_served = await bench.take_all(leases)
        bench.wire.is_deaf = False
        before = bench.wire.num_renewals
        await eventually(lambda: bench.wire.num_renewals > before)
        num_served += await bench.take_all(leases)
    assert num_served == REQUESTS.amount


@pytest.mark.parametrize(("limit", "until_next_s"), BUDGETS)
async def test_of_a_new_budget_one_that_is_cut_off_alone_takes_nothing(
    bench: Bench, limit: Limit, until_next_s: float
) -> None:
    """The others may be given all of it."""
    bench.set(limit)
    async with bench.gateway("g1") as one, bench.gateway("g2") as two:
        for _ in range(80):
            await bench.take(one, limit)
        bench.wire.cut_off = "g1"
        bench.clock.now += until_next_s
        assert await bench.take_all(one, limit) == 0
        assert await bench.take_all(two, limit) == limit.amount


async def test_the_slice_of_the_next_minute_is_there_when_it_begins(bench: Bench) -> None:
    async with bench.gateway() as leases:
        bench.clock.now += 60 - AHEAD_S + 1
        await bench.take(leases)
        before = bench.wire.num_renewals
        await eventually(lambda: bench.wire.num_renewals > before + 1)
        bench.clock.now += AHEAD_S
        taking = asyncio.ensure_future(bench.take(leases))
        await asyncio.sleep(0)
        assert taking.done()


async def test_after_its_life_time_a_slice_is_worth_nothing(bench: Bench) -> None:
    async with bench.gateway(lifetime_s=1.0) as leases:
        await bench.take(leases)
        await bench.away(leases)
        await asyncio.sleep(1.1)
        with pytest.raises(QuotaUnavailable):
            await bench.take(leases)
        bench.model.drop("g1")
        bench.wire.is_away = False
        await eventually(lambda: leases.holder == "g1#1")
        await bench.take(leases)


async def test_who_is_heard_of_again_holds_nothing_ready(bench: Bench) -> None:
    """Others may have been given what it held of rates; what is under way goes on."""
    async with bench.gateway(lifetime_s=1.0) as leases:
        (held,) = await bench.take(leases, AT_ONCE)
        await bench.away(leases)
        await asyncio.sleep(1.1)
        bench.wire.is_away = False
        await eventually(lambda: bench.model.held(held.quota.key) == 1)
        await bench.take(leases, AT_ONCE, 9)
        assert leases.holder == "g1"


async def test_others_give_back_what_they_do_not_need(bench: Bench) -> None:
    async with bench.gateway("g1") as one, bench.gateway("g2") as two:
        held = await bench.take(one, AT_ONCE)
        for _ in range(9):
            await bench.take(two, AT_ONCE)
        with pytest.raises(QuotaExceeded) as refused:
            await bench.take(two, AT_ONCE)
        assert refused.value.should_retry is None
        one.settle(held[0], 0)
        await asyncio.sleep(REFUSED_S)
        await bench.take(two, AT_ONCE)


@pytest.mark.parametrize("limit", [AT_ONCE, REQUESTS, TOKENS])
async def test_after_a_refusal_others_are_refused_at_once(bench: Bench, limit: Limit) -> None:
    """They wait for nothing and ask nobody, unless they need less or what they need is here."""
    bench.set(limit)
    async with bench.gateway("g1") as one, bench.gateway("g2") as two:
        await bench.take(one, limit, limit.amount - 1)
        (held,) = await bench.take(two, limit)
        assert await is_refused_at_once(bench, two, limit, 2) is False
        waits = telemetry.limit_waits.totals()
        for amount in (2, 3, limit.amount) * 10:
            assert await is_refused_at_once(bench, two, limit, amount)
        assert telemetry.limit_waits.totals() == waits
        two.settle(held, 0)
        await bench.take(two, limit)


async def test_a_recall_that_nobody_follows_is_waited_for_once(bench: Bench) -> None:
    """Of a gateway that was killed. While one request asks again, all others are refused."""
    async with bench.gateway("g1") as one:
        await bench.take(one, AT_ONCE, AT_ONCE.amount)
    async with bench.gateway("g2", wait_s=0.3) as two:
        for _ in range(2):
            assert await is_refused_at_once(bench, two, AT_ONCE, 1) is False
            assert await is_refused_at_once(bench, two, AT_ONCE, 1)
            await asyncio.sleep(REFUSED_S)
        asking = asyncio.ensure_future(bench.take(two, AT_ONCE))
        await asyncio.sleep(0)
        assert await is_refused_at_once(bench, two, AT_ONCE, 1) and not asking.done()
        with pytest.raises(QuotaExceeded):
            await asking


async def is_refused_at_once(bench: Bench, leases: Leases, limit: Limit, amount: int) -> bool:
    """Whether the request, which is refused, did not wait."""
    taking = asyncio.ensure_future(bench.take(leases, limit, amount))
    await asyncio.sleep(0)
    is_at_once = taking.done()
    with pytest.raises(QuotaExceeded):
        await taking
    return is_at_once


async def test_what_comes_back_goes_at_once_to_who_waits(bench: Bench) -> None:
    async with bench.gateway() as leases:
        (held,) = await bench.take(leases, AT_ONCE, 10)
        bench.wire.delay_s = 0.9
        waiting = asyncio.create_task(bench.take(leases, AT_ONCE))
        await asyncio.sleep(0.1)
        leases.settle(held, 0)
        async with asyncio.timeout(0.3):
            await waiting


async def test_who_has_nothing_to_give_back_says_so(bench: Bench) -> None:
    """So that who asked is refused then, and not when it has waited for as long as it may."""
    async with bench.gateway("g1") as one, bench.gateway("g2", wait_s=60) as two:
        await bench.take(one, AT_ONCE, 10)
        async with asyncio.timeout(10):
            with pytest.raises(QuotaExceeded):
                await bench.take(two, AT_ONCE)


async def test_who_gives_up_waiting_takes_nothing(bench: Bench) -> None:
    async with bench.gateway() as leases:
        for _ in range(20):
            waiting = asyncio.create_task(bench.take(leases, AT_ONCE, 10))
            await asyncio.sleep(0)
            waiting.cancel()
            with suppress(asyncio.CancelledError):
                (hold,) = await waiting
                leases.settle(hold, 0)
        await asyncio.sleep(SWEEP_INTERVAL_S)
        await bench.take(leases, AT_ONCE, 10)


async def test_all_of_it_or_nothing(bench: Bench) -> None:
    async with bench.gateway() as leases:
        await bench.take(leases, AT_ONCE, 10)
        with pytest.raises(QuotaExceeded):
            await leases.take([(REQUESTS, 1), (AT_ONCE, 1)], bench.clock())
        for _ in range(REQUESTS.amount):
            await bench.take(leases)


async def test_a_limit_that_is_lowered_holds_at_once(bench: Bench) -> None:
    """What was granted under the higher one goes back."""
    lower = Limit("ten_a", Kind.REQUESTS_PER_MINUTE, 10)
    async with bench.gateway() as leases:
        for _ in range(8):
            await bench.take(leases)
        bench.set(lower)
        for _ in range(2):
            await bench.take(leases, lower)
        with pytest.raises(QuotaExceeded):
            await bench.take(leases, lower)


async def test_of_a_limit_below_what_is_taken_nothing_is_left(bench: Bench) -> None:
    """And not less than that, in what a caller is told."""
    lower = Limit("ten_a", Kind.REQUESTS_PER_MINUTE, 5)
    async with bench.gateway() as leases:
        for _ in range(8):
            await bench.take(leases)
        bench.set(lower)
        with pytest.raises(QuotaExceeded, match="is 5; 0 of it is left"):
            await bench.take(leases, lower)


@pytest.mark.parametrize("kind", [Kind.REQUESTS_PER_MINUTE, Kind.TOKENS_PER_MINUTE])
async def test_restarts_within_a_minute_give_out_a_limit_once(bench: Bench, kind: Kind) -> None:
    """Each gateway leaves and gives back what it did not use; nobody is refused for its sake."""
    limit = Limit("ten_a", kind, 12)
    bench.set(limit)
    for number in range(4):
        async with bench.gateway(f"g{number}", leaves=True) as leases:
            for _ in range(3):
                (hold,) = await bench.take(leases, limit)
                leases.settle(hold, 1)
    async with bench.gateway() as leases:
        with pytest.raises(QuotaExceeded):
            await bench.take(leases, limit)


async def test_the_killed_keep_what_they_held_of_a_minute(bench: Bench) -> None:
    num_served = 0
    for number in range(3):
        async with bench.gateway(f"g{number}") as leases:
            await bench.take(leases)
            num_served += 1
        bench.model.drop(f"g{number}")
    async with bench.gateway() as leases:
        num_served += await bench.take_all(leases)
    assert num_served <= REQUESTS.amount


async def test_who_leaves_amid_an_renewal_ends_it_first(bench: Bench) -> None:
    """Its answer may be a grant that nobody would give back."""
    async with bench.gateway(leaves=True) as leases:
        await bench.take(leases)
        bench.wire.delay_s = 0.2
        waiting = asyncio.create_task(bench.take(leases, REQUESTS, 80))
        before = bench.wire.num_renewals
        await asyncio.sleep(0.1)
        waiting.cancel()
        assert bench.wire.num_renewals == before
    async with bench.gateway("g2") as other:
        bench.wire.delay_s = 0.0
        assert await bench.take_all(other) >= REQUESTS.amount - 2
