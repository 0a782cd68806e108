"""A request and its limits: promised some at a time, settled with what was used."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import suppress

import pytest

from gateway.exceptions import QuotaExceeded
from gateway.limits.admission import AT_ONCE, Reservation, Usage
from gateway.limits.leases import Leases
from gateway.limits.quota import Hold
from gateway.quota_types import Kind, Limit, Tariff
from store.records import Price
from tests.gateway.faulty_renewal import TENANT, FaultyRenewal
from tests.gateway.live import LIMITS_WAIT_S
from tests.waiting import eventually

PROMPT_TOKENS = 100
TARIFF = Tariff(Price(model="tiny", input=3, cached_input=1, output=7), cached_weight=50)
AMPLE = 1_000_000


class Plane:
    """One gateway over a database."""

    def __init__(self, renewal: FaultyRenewal) -> None:
        self.renewal = renewal
        self.leases = Leases(renewal, "g1", 300, wait_s=LIMITS_WAIT_S)

    async def limits(self, **amounts: int) -> list[Limit]:
        limits = [Limit(TENANT, Kind(kind), amount) for kind, amount in amounts.items()]
        for limit in limits:
            await self.renewal.set(limit)
        return limits

    async def admit(self, limits: list[Limit], *max_tokens: int, choices: int = 1) -> Reservation:
        reservation = Reservation(
            self.leases,
            limits,
            TARIFF,
            tenant_id=TENANT,
            prompt_tokens=PROMPT_TOKENS,
            max_tokens=list(max_tokens),
            num_choices=choices,
        )
        await reservation.begin()
        return reservation

    async def left(self, limit: Limit, at: float) -> int:
        """Of the limit in the window that holds `at`, found by taking it."""
        holds: list[Hold] = []
        step = limit.amount
        while step:
            try:
                holds += await self.leases.take([(limit, step)], at)
            except QuotaExceeded:
                step //= 2
        for hold in holds:
            self.leases.settle(hold, 0)
        return sum(hold.amount for hold in holds)


@pytest.fixture
async def plane(renewal: FaultyRenewal) -> AsyncIterator[Plane]:
    plane = Plane(renewal)
    task = asyncio.create_task(plane.leases.run())
    yield plane
    task.cancel()
    with suppress(asyncio.CancelledError):
        await task


@pytest.mark.parametrize(
    ("max_tokens", "choices"), [([5000], 1), ([100], 1), ([700, 2000], 3), ([AT_ONCE], 1)]
)
async def test_more_is_promised_as_it_is_used_up_to_what_was_asked(
    plane: Plane, max_tokens: list[int], choices: int
) -> None:
    (limit,) = await plane.limits(tokens_per_day=AMPLE)
    most = sum(max_tokens) * choices
    step = min(most, AT_ONCE * len(max_tokens) * choices)
    reservation = await plane.admit([limit], *max_tokens, choices=choices)
    at, given = reservation.admitted_at, 0
    while given < most:
        promised = min(most, (given // step + 1) * step)
        assert await plane.left(limit, at) == AMPLE - PROMPT_TOKENS - promised
        half = min(step // 2, most - given)
        assert reservation.give(half) == half
        # Nothing more is asked before that, and all of it in time.
        assert await plane.left(limit, at) == AMPLE - PROMPT_TOKENS - promised
        rest = min(step, most - given) - half
        if rest:
            assert reservation.give(1) == 1
            later = min(most, promised + step)

            async def is_promised(left: int = AMPLE - PROMPT_TOKENS - later) -> bool:
                return await plane.left(limit, at) == left

            await eventually(is_promised)
            assert reservation.give(rest - 1) == rest - 1
        given += half + rest
    assert reservation.give(1) == 0


@pytest.mark.parametrize("num_tokens", [0, 1, AT_ONCE, AT_ONCE + 1, 2500])
@pytest.mark.parametrize("cached_tokens", [0, 51])
async def test_what_was_used_and_no_more_is_gone(
    plane: Plane, num_tokens: int, cached_tokens: int
) -> None:
    """Of tokens and of money, in however many steps it was promised."""
    tokens, money = await plane.limits(tokens_per_day=AMPLE, spend_per_day=AMPLE)
    reservation = await plane.admit([tokens, money], 3000)
    at = reservation.admitted_at
    for _ in range(num_tokens):
        while not reservation.give(1):
            await asyncio.sleep(0.01)
    usage = Usage(PROMPT_TOKENS, num_tokens, cached_tokens)
    reservation.settle(usage)
    metered = PROMPT_TOKENS - cached_tokens + -(-cached_tokens // 2) + num_tokens
    cost = (PROMPT_TOKENS - cached_tokens) * 3 + cached_tokens + num_tokens * 7
    assert await plane.left(tokens, at) == AMPLE - metered
    assert await plane.left(money, at) == AMPLE - cost


async def test_where_more_is_refused_it_is_asked_for_again_when_half_of_the_rest_is_used(
    plane: Plane,
) -> None:
    (limit,) = await plane.limits(tokens_per_day=2 * AT_ONCE + PROMPT_TOKENS)
    reservation = await plane.admit([limit], 3000)
    at = reservation.admitted_at
    (other,) = await plane.leases.take([(limit, 1)], at)
    assert reservation.give(AT_ONCE // 2 + 1) == AT_ONCE // 2 + 1
    left = AT_ONCE - AT_ONCE // 2 - 1
    assert await plane.left(limit, at) == AT_ONCE - 1
    plane.leases.settle(other, 0)
    assert reservation.give(left - left // 2) == left - left // 2
    assert await plane.left(limit, at) == AT_ONCE
    assert reservation.give(1) == 1

    async def all_is_promised() -> bool:
        return await plane.left(limit, at) == 0

    await eventually(all_is_promised)


async def test_slices_that_were_lost_before_it_began_are_not_those_of_a_request(
    plane: Plane,
) -> None:
    """Or else its usage would be taken out of leases that nobody holds."""
    first, second = await plane.limits(tokens_per_day=AMPLE, tokens_per_month=AMPLE)
    await plane.admit([first], 3000)
    await plane.renewal.release(["g1"])
    reservation = await plane.admit([second], 3000)
    assert reservation.holder == plane.leases.holder == "g1#1"


async def test_who_has_of_slices_that_were_lost_gets_none_of_the_new(plane: Plane) -> None:
    """The answer ends with what was promised before."""
    first, second = await plane.limits(tokens_per_day=AMPLE, tokens_per_month=AMPLE)
    reservation = await plane.admit([first], 3000)
    await plane.renewal.release(["g1"])
    await plane.admit([second], 3000)
    given = 0
    while more := reservation.give(1):
        given += more
        await asyncio.sleep(0)
    assert given == AT_ONCE
    assert await plane.left(first, reservation.admitted_at) == AMPLE
    assert reservation.holder == "g1"
