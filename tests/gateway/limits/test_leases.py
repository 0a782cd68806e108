"""Requests and their gateway's leases: who waits for the database, and what goes on without it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress

import pytest

from gateway import telemetry
from gateway.exceptions import QuotaExceeded, QuotaUnavailable
from gateway.limits.lease_book import AHEAD_S
from gateway.limits.leases import REFUSED_S, SWEEP_INTERVAL_S, Leases
from gateway.limits.quota import Hold
from gateway.quota_types import Kind, Limit
from tests.gateway.faulty_renewal import TENANT, FaultyRenewal
from tests.gateway.live import LIMITS_WAIT_S
from tests.waiting import eventually

REQUESTS = Limit(TENANT, Kind.REQUESTS_PER_MINUTE, 100)
AT_ONCE = Limit(TENANT, Kind.CONCURRENT_REQUESTS, 10)
TOKENS = Limit(TENANT, Kind.TOKENS_PER_DAY, 1000)
BUDGETS = [
    (Limit(TENANT, Kind.SPEND_PER_DAY, 100), 86_400.0),
    (Limit(TENANT, Kind.SPEND_PER_MONTH, 100), 31 * 86_400.0),
]
"""With how long at most until the next window."""


class Clock:
    def __init__(self) -> None:
        # The database deletes leases of minutes that began more than two minutes ago.
        self.now = time.time() // 60 * 60

    def __call__(self) -> float:
        return self.now


class Plane:
    """Gateways over one database, in one clock."""

    def __init__(self, renewal: FaultyRenewal) -> None:
        self.clock = Clock()
        self.renewal = renewal

    @asynccontextmanager
    async def gateway(
        self,
        name: str = "g1",
        lifetime_s: float = 300,
        wait_s: float = LIMITS_WAIT_S,
        *,
        leaves: bool = False,
    ) -> AsyncIterator[Leases]:
        """leaves: at the end, as with SIGTERM; otherwise it is killed."""
        leases = Leases(self.renewal, name, lifetime_s, self.clock, wait_s)
        task = asyncio.create_task(leases.run())
        try:
            yield leases
        finally:
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
        self.renewal.is_away = True
        before = self.renewal.num_renewals
        await eventually(lambda: self.renewal.num_renewals > before + 1)


@pytest.fixture
async def plane(renewal: FaultyRenewal) -> Plane:
    for limit in (REQUESTS, AT_ONCE):
        await renewal.set(limit)
    return Plane(renewal)


async def test_most_requests_wait_for_nobody(plane: Plane) -> None:
    async with plane.gateway() as leases:
        await plane.take(leases)
        for _ in range(60):
            taking = asyncio.ensure_future(plane.take(leases))
            await asyncio.sleep(0)
            assert taking.done()
            await asyncio.sleep(0.005)
    assert plane.renewal.num_renewals < 15


async def test_what_is_held_goes_on_without_the_database(plane: Plane) -> None:
    """What it does not cover waits for nothing."""
    async with plane.gateway(wait_s=60) as leases:
        await plane.take(leases)
        await plane.away(leases)
        async with asyncio.timeout(10):
            with pytest.raises(QuotaUnavailable):
                for _ in range(REQUESTS.amount):
                    await plane.take(leases)


async def test_who_waits_when_the_database_goes_has_of_the_share_too(plane: Plane) -> None:
    async with plane.gateway(wait_s=60) as leases:
        for _ in range(30):
            await plane.take(leases)
        plane.renewal.is_away = True
        plane.clock.now += 60
        async with asyncio.timeout(10):
            await plane.take(leases)


async def test_a_new_minute_without_the_database_has_the_share_of_the_last(plane: Plane) -> None:
    """All gateways together have no more than the limit, and each has what it had."""
    async with plane.gateway("g1") as one, plane.gateway("g2") as two:
        for _ in range(30):
            await plane.take(one)
        await plane.take(two)
        await plane.away(one)
        plane.clock.now += 60
        served: dict[Leases, int] = {}
        for leases in (one, two):
            served[leases] = await plane.take_all(leases)
        assert served[one] >= 30 and served[two] >= 1
        assert sum(served.values()) <= REQUESTS.amount
        # Back again, what they took is known: nobody gets it twice.
        plane.renewal.is_away = False
        before = plane.renewal.num_renewals
        await eventually(lambda: plane.renewal.num_renewals > before + 2)
        served[one] += await plane.take_all(one)
    assert sum(served.values()) == REQUESTS.amount


async def test_the_share_of_a_limit_that_was_lowered_is_a_share(plane: Plane) -> None:
    """All gateways together have no more than the limit, though each had more of the higher one."""
    lower = Limit(TENANT, Kind.REQUESTS_PER_MINUTE, 10)
    async with plane.gateway("g1") as one, plane.gateway("g2") as two:
        for leases in (one, two):
            for _ in range(40):
                await plane.take(leases)
        await plane.renewal.set(lower)
        for leases in (one, two):
            assert await plane.take_all(leases, lower) == 0
        await plane.away(one)
        plane.clock.now += 60
        num_served = [await plane.take_all(leases, lower) for leases in (one, two)]
    assert 0 < sum(num_served) <= lower.amount


async def test_the_share_of_a_limit_that_was_raised_is_a_share_of_the_higher(plane: Plane) -> None:
    lower = Limit(TENANT, Kind.REQUESTS_PER_MINUTE, 10)
    await plane.renewal.set(lower)
    async with plane.gateway("g1") as one, plane.gateway("g2") as two:
        for leases in (one, two):
            await plane.take(leases, lower)
        await plane.renewal.set(REQUESTS)
        for leases in (one, two):
            for _ in range(40):
                await plane.take(leases)
        await plane.away(one)
        plane.clock.now += 60
        num_served = [await plane.take_all(leases) for leases in (one, two)]
    assert 80 <= sum(num_served) <= REQUESTS.amount


async def test_a_share_beside_a_grant_that_was_not_heard_of_is_part_of_it(plane: Plane) -> None:
    async with plane.gateway() as leases:
        for _ in range(80):
            await plane.take(leases)
        plane.renewal.is_deaf = True
        plane.clock.now += 60
        num_served = await plane.take_all(leases)
        plane.renewal.is_deaf = False
        before = plane.renewal.num_renewals
        # The first of two has been applied when the second has ended.
        await eventually(lambda: plane.renewal.num_renewals > before + 1)
        num_served += await plane.take_all(leases)
    assert num_served == REQUESTS.amount


@pytest.mark.parametrize(("limit", "until_next_s"), BUDGETS)
async def test_of_a_new_budget_one_that_is_cut_off_alone_takes_nothing(
    plane: Plane, limit: Limit, until_next_s: float
) -> None:
    """The others may be given all of it."""
    await plane.renewal.set(limit)
    async with plane.gateway("g1", wait_s=1.0) as one, plane.gateway("g2") as two:
        for _ in range(80):
            await plane.take(one, limit)
        plane.renewal.cut_off = "g1"
        plane.clock.now += until_next_s
        assert await plane.take_all(one, limit) == 0
        assert await plane.take_all(two, limit) == limit.amount


async def test_the_slice_of_the_next_minute_is_there_when_it_begins(plane: Plane) -> None:
    async with plane.gateway() as leases:
        plane.clock.now += 60 - AHEAD_S + 1
        await plane.take(leases)
        before = plane.renewal.num_renewals
        await eventually(lambda: plane.renewal.num_renewals > before + 1)
        plane.clock.now += AHEAD_S
        taking = asyncio.ensure_future(plane.take(leases))
        await asyncio.sleep(0)
        assert taking.done()


async def test_after_its_life_time_a_slice_is_worth_nothing(plane: Plane) -> None:
    async with plane.gateway(lifetime_s=1.0) as leases:
        await plane.take(leases)
        await plane.away(leases)
        await asyncio.sleep(1.1)
        with pytest.raises(QuotaUnavailable):
            await plane.take(leases)
        await plane.renewal.release(["g1"])
        plane.renewal.is_away = False
        await eventually(lambda: leases.holder == "g1#1")
        await plane.take(leases)


async def test_who_is_heard_of_again_holds_nothing_ready(plane: Plane) -> None:
    """Others may have been given what it held of rates; what is under way goes on."""
    async with plane.gateway(lifetime_s=1.0) as leases:
        (held,) = await plane.take(leases, AT_ONCE)
        await plane.away(leases)
        await asyncio.sleep(1.1)
        plane.renewal.is_away = False

        async def is_returned() -> bool:
            return await plane.renewal.held(held.quota.key) == 1

        await eventually(is_returned)
        await plane.take(leases, AT_ONCE, 9)
        assert leases.holder == "g1"


@pytest.mark.parametrize("limit", [AT_ONCE, REQUESTS, TOKENS])
async def test_after_a_refusal_others_are_refused_at_once(plane: Plane, limit: Limit) -> None:
    """They wait for nothing and ask nobody, unless they need less or what they need is here."""
    await plane.renewal.set(limit)
    async with plane.gateway("g1") as one, plane.gateway("g2") as two:
        await plane.take(one, limit, limit.amount - 1)
        (held,) = await plane.take(two, limit)
        assert await is_refused_at_once(plane, two, limit, 2) is False
        waits = telemetry.limit_waits.totals()
        for amount in (2, 3, limit.amount) * 10:
            assert await is_refused_at_once(plane, two, limit, amount)
        assert telemetry.limit_waits.totals() == waits
        two.settle(held, 0)
        await plane.take(two, limit)


async def test_a_recall_that_nobody_follows_is_waited_for_once(plane: Plane) -> None:
    """Of a gateway that was killed. While one request asks again, all others are refused."""
    async with plane.gateway("g1") as one:
        await plane.take(one, AT_ONCE, AT_ONCE.amount)
    async with plane.gateway("g2", wait_s=0.3) as two:
        for _ in range(2):
            assert await is_refused_at_once(plane, two, AT_ONCE, 1) is False
            assert await is_refused_at_once(plane, two, AT_ONCE, 1)
            await asyncio.sleep(REFUSED_S)
        asking = asyncio.ensure_future(plane.take(two, AT_ONCE))
        await asyncio.sleep(0)
        assert await is_refused_at_once(plane, two, AT_ONCE, 1) and not asking.done()
        with pytest.raises(QuotaExceeded):
            await asking


async def is_refused_at_once(plane: Plane, leases: Leases, limit: Limit, amount: int) -> bool:
    """Whether the request, which is refused, did not wait."""
    taking = asyncio.ensure_future(plane.take(leases, limit, amount))
    await asyncio.sleep(0)
    is_at_once = taking.done()
    with pytest.raises(QuotaExceeded):
        await taking
    return is_at_once


async def test_what_comes_back_goes_at_once_to_who_waits(plane: Plane) -> None:
    async with plane.gateway() as leases:
        (held,) = await plane.take(leases, AT_ONCE, 10)
        plane.renewal.delay_s = 0.9
        waiting = asyncio.create_task(plane.take(leases, AT_ONCE))
        await asyncio.sleep(0.1)
        leases.settle(held, 0)
        async with asyncio.timeout(0.3):
            await waiting


async def test_who_has_nothing_to_give_back_says_so(plane: Plane) -> None:
    """So that who asked is refused then, and not when it has waited for as long as it may."""
    async with plane.gateway("g1") as one, plane.gateway("g2", wait_s=60) as two:
        await plane.take(one, AT_ONCE, 10)
        async with asyncio.timeout(10):
            with pytest.raises(QuotaExceeded):
                await plane.take(two, AT_ONCE)


async def test_who_gives_up_waiting_takes_nothing(plane: Plane) -> None:
    async with plane.gateway() as leases:
        for _ in range(20):
            waiting = asyncio.create_task(plane.take(leases, AT_ONCE, 10))
            await asyncio.sleep(0)
            waiting.cancel()
            with suppress(asyncio.CancelledError):
                (hold,) = await waiting
                leases.settle(hold, 0)
        await asyncio.sleep(SWEEP_INTERVAL_S)
        await plane.take(leases, AT_ONCE, 10)


async def test_a_limit_that_is_lowered_holds_at_once(plane: Plane) -> None:
    """What was granted under the higher one goes back."""
    lower = Limit(TENANT, Kind.REQUESTS_PER_MINUTE, 10)
    async with plane.gateway() as leases:
        for _ in range(8):
            await plane.take(leases)
        await plane.renewal.set(lower)
        for _ in range(2):
            await plane.take(leases, lower)
        with pytest.raises(QuotaExceeded):
            await plane.take(leases, lower)


async def test_of_a_limit_below_what_is_taken_nothing_is_left(plane: Plane) -> None:
    """And not less than that, in what a caller is told."""
    lower = Limit(TENANT, Kind.REQUESTS_PER_MINUTE, 5)
    async with plane.gateway() as leases:
        for _ in range(8):
            await plane.take(leases)
        await plane.renewal.set(lower)
        with pytest.raises(QuotaExceeded, match="is 5; 0 of it is left"):
            await plane.take(leases, lower)


async def test_who_leaves_amid_an_renewal_ends_it_first(plane: Plane) -> None:
    """Its answer may be a grant that nobody would give back."""
    async with plane.gateway(leaves=True) as leases:
        await plane.take(leases)
        plane.renewal.delay_s = 0.2
        waiting = asyncio.create_task(plane.take(leases, REQUESTS, 80))
        before = plane.renewal.num_renewals
        await asyncio.sleep(0.1)
        waiting.cancel()
        assert plane.renewal.num_renewals == before
    async with plane.gateway("g2") as other:
        plane.renewal.delay_s = 0.0
        assert await plane.take_all(other) >= REQUESTS.amount - 2
