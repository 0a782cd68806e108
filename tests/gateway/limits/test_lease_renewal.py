"""What the database answers to renewals, and what loading, upkeep and clocks do to leases."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from datetime import UTC, datetime
from typing import Any

import asyncpg
import msgspec
import pytest

from admin.tenants.tenants import delete_tenant, find_tenant
from gateway.limits.admission import AT_ONCE, Reservation, Usage
from gateway.limits.lease_book import LeaseRecall, LeaseRequest
from gateway.limits.leases import Leases, PostgresLeaseRenewal
from gateway.limits.quota import IDLE_S
from gateway.quota_types import Kind, Limit, Span, Tariff, window
from store.database import EVERYTHING, Database
from store.queries import sql
from tests.admin.usage.test_usage import load, row
from tests.gateway.live import Live
from tests.postgres import server
from tests.waiting import WAIT_S, eventually


def today() -> str:
    return window(Span.DAY, datetime.now(UTC).timestamp()).name


@pytest.mark.parametrize(
    ("zone", "noon"),
    [
        # The clock goes forward at midnight: the day has no 00:00.
        ("America/Santiago", datetime(2026, 9, 6, 12, tzinfo=UTC)),
        ("Africa/Cairo", datetime(2026, 4, 24, 12, tzinfo=UTC)),
    ],
)
async def test_days_are_of_utc_whatever_the_servers_time_zone(
    live: Live, zone: str, noon: datetime
) -> None:
    """What is loaded leaves its lease."""
    (here,) = await live.fetch("SELECT current_database() AS name")
    await live.limit(tokens_per_day=1000)
    dsn = f"{server().dsn(here['name'])}&timezone={zone}"
    database = await Database.connect(dsn, sees=EVERYTHING)
    try:
        day = window(Span.DAY, noon.timestamp()).name
        ask = LeaseRequest(live.tenant_id, Kind.TOKENS_PER_DAY.value, day, need=100, want=100)
        (answer,) = await PostgresLeaseRenewal(database, 300).renew("g1", 1, [ask]) or []
        fields = {"tenant_id": live.tenant_id, "gateway": "g1", "leased": 1}
        await load(database, [row(97, noon, **fields)])  # 100 tokens
    finally:
        await database.close()
    (left,) = await live.fetch("SELECT granted FROM quota_leases")
    assert left["granted"] == answer.granted - 100


@pytest.mark.parametrize("kind", [Kind.REQUESTS_PER_MINUTE, Kind.TOKENS_PER_MINUTE])
async def test_a_minutes_use_outlives_its_holders(live: Live, kind: Kind) -> None:
    """One is released, one has been silent for longer than its lease, one was forgotten."""
    await live.limit(**{kind.value: 10})
    key = (live.tenant_id, kind.value, window(Span.MINUTE, time.time()).name)
    renewal = PostgresLeaseRenewal(live.database, 300)
    for gateway in ("g1", "g2", "g3"):
        assert await renewal.renew(gateway, 1, [LeaseRequest(*key, need=2, want=2)])
    held = await live.fetch("SELECT sum(granted)::int AS held FROM quota_leases")
    await renewal.release(["g1"])
    for gateway, silent_for in (("g2", "5 minutes"), ("g3", "2 hours")):
        await live.fetch(
            "UPDATE quota_holders SET seen_at = past, until = past"
            " FROM (SELECT now() - $2::text::interval AS past) p WHERE gateway_id = $1 RETURNING 1",
            *(gateway, silent_for),
        )
    await renewal.upkeep()
    assert await live.fetch("SELECT sum(granted)::int AS held FROM quota_leases") == held
    left = 10 - held[0]["held"]
    (answer,) = await renewal.renew("g4", 1, [LeaseRequest(*key, need=left + 1)]) or []
    # Nobody who is gone is waited for.
    assert (answer.granted, answer.remaining, answer.unanswered) == (0, left, 0)


async def test_minutes_that_are_over_are_forgotten(live: Live) -> None:
    await live.limit(requests_per_minute=10)
    renewal = PostgresLeaseRenewal(live.database, 300)
    past = window(Span.MINUTE, time.time() - 180).name
    ask = LeaseRequest(live.tenant_id, Kind.REQUESTS_PER_MINUTE.value, past, need=2)
    assert await renewal.renew("g1", 1, [ask])
    await renewal.release(["g1"])
    await renewal.upkeep()
    assert await nothing_held(live)


async def test_a_call_is_heard_by_all_who_listen(live: Live) -> None:
    await live.limit(concurrent_requests=4)
    renewal, heard = PostgresLeaseRenewal(live.database, 300), list[LeaseRecall]()
    await renewal.listen(heard.append)
    key = (live.tenant_id, "concurrent_requests", "-infinity")
    await renewal.renew("g1", 1, [LeaseRequest(*key, need=4)])
    (answer,) = await renewal.renew("g2", 1, [LeaseRequest(*key, need=1)]) or []
    assert (answer.granted, answer.unanswered) == (0, 1)
    await eventually(lambda: heard)
    assert heard == [LeaseRecall(*key, answer.call)]


async def test_of_rates_the_silent_hold_nothing(live: Live) -> None:
    """Of budgets they do: they may have used what is not loaded yet."""
    await live.limit(concurrent_requests=4, tokens_per_day=4)
    silent, other = (
        PostgresLeaseRenewal(live.database, 0.01),
        PostgresLeaseRenewal(live.database, 300),
    )
    keys = [(live.tenant_id, "concurrent_requests", "-infinity"), budget(live)]
    assert await silent.renew("g1", 1, [LeaseRequest(*key, need=4) for key in keys])
    await asyncio.sleep(0.1)
    answers = await other.renew("g2", 1, [LeaseRequest(*key, need=1) for key in keys]) or []
    assert [answer.granted > 0 for answer in answers] == [True, False]
    await other.upkeep()
    (row,) = await live.fetch("SELECT kind FROM quota_leases WHERE gateway_id = 'g1'")
    assert row["kind"] == "tokens_per_day"
    # It speaks again, and what it held of the budget is as it was.
    returned = [LeaseRequest(*keys[1], returned=4)]
    assert await silent.renew("g1", 2, returned)
    (answer,) = await other.renew("g2", 2, [LeaseRequest(*keys[1], need=1)]) or []
    assert answer.granted > 0


async def test_what_a_rate_lost_meanwhile_is_not_returned(live: Live) -> None:
    """A gateway was cut off, and others were given what it held. When it gives that back, nobody
    gets it once more."""
    await live.limit(concurrent_requests=4)
    silent, other = (
        PostgresLeaseRenewal(live.database, 0.01),
        PostgresLeaseRenewal(live.database, 300),
    )
    key = (live.tenant_id, "concurrent_requests", "-infinity")
    assert await silent.renew("g1", 1, [LeaseRequest(*key, need=4)])
    await asyncio.sleep(0.1)
    await other.upkeep()
    (answer,) = await other.renew("g2", 1, [LeaseRequest(*key, need=4)]) or []
    assert answer.granted == 4
    for number, returned in ((2, 3), (3, 1)):
        (answer,) = await silent.renew("g1", number, [LeaseRequest(*key, returned=returned)]) or []
        assert (answer.granted, answer.remaining) == (0, 0)
    (answer,) = await other.renew("g2", 2, [LeaseRequest(*key, need=1)]) or []
    assert (answer.granted, answer.unanswered) == (0, 0)


async def test_upkeep_and_an_renewal_do_not_wait_for_each_other(live: Live) -> None:
    """Each locks some leases that nothing is held of, in another order."""
    await live.limit(tokens_per_day=4, concurrent_requests=4)
    first = LeaseRequest(live.tenant_id, "concurrent_requests", "-infinity", need=1)
    second = LeaseRequest(*budget(live), need=1)
    renewal = PostgresLeaseRenewal(live.database, 300)
    for number, ask in enumerate((second, first)):
        assert await renewal.renew("g1", 2 * number + 1, [ask])
        given_back = msgspec.structs.replace(ask, need=0, returned=4)
        assert await renewal.renew("g1", 2 * number + 2, [given_back])
    async with live.database.transaction() as connection:
        asked = [[msgspec.structs.asdict(ask)] for ask in (first, second)]
        await connection.fetchval(sql["quota_exchange"], "g1", 5, 300.0, asked[0])
        upkeep = asyncio.create_task(renewal.upkeep())
        await asyncio.wait([upkeep], timeout=0.5)
        await connection.fetchval(sql["quota_exchange"], "g1", 6, 300.0, asked[1])
    await upkeep
    (held,) = await live.fetch("SELECT count(*) FROM quota_leases WHERE granted > 0")
    assert held["count"] == 2


async def test_a_tenant_goes_while_its_limits_are_asked_for(live: Live) -> None:
    """A renewal locks limits in the order of their subjects."""
    subjects = ["k00000000001", "k00000000002"]
    for subject in reversed(subjects):
        await live.fetch(
            "INSERT INTO api_keys (id, tenant_id, hash, scopes)"
            " VALUES ($1, $2, sha256(''), '{inference}')",
            *(subject, live.tenant_id),
        )
        await live.fetch(
            "INSERT INTO quotas (subject, tenant_id, key_id, tokens_per_day)"
            " VALUES ($1, $2, $1, 4)",
            *(subject, live.tenant_id),
        )

    async def delete() -> None:
        async with live.database.transaction() as connection:
            await delete_tenant(connection, await find_tenant(connection, live.tenant_id))

    async with live.database.transaction() as connection:
        asks = [LeaseRequest(subject, Kind.TOKENS_PER_DAY, today(), need=1) for subject in subjects]
        asked = [[msgspec.structs.asdict(ask)] for ask in asks]
        await connection.fetchval(sql["quota_exchange"], "g1", 1, 300.0, asked[0])
        deletion = asyncio.create_task(delete())
        await asyncio.wait([deletion], timeout=0.5)
        await connection.fetchval(sql["quota_exchange"], "g1", 2, 300.0, asked[1])
    await deletion
    assert not await live.fetch("SELECT 1 FROM quotas")


async def test_upkeep_does_not_read_all_totals(live: Live, dsn: str) -> None:
    owner = await asyncpg.connect(dsn)
    await owner.execute(
        "INSERT INTO usage_totals SELECT 'k' || n % 10000, 'day', current_date - n / 10000, 1, 1"
        " FROM generate_series(0, 50000) n"
    )
    await owner.execute("INSERT INTO usage_totals VALUES ('k', 'day', current_date - 500, 1, 1)")
    await owner.execute("ANALYZE usage_totals")
    await owner.close()
    explain = f"EXPLAIN (ANALYZE, BUFFERS, FORMAT JSON) {sql['quota_upkeep']}"
    ((plan,),) = await live.fetch(explain)
    (found,) = msgspec.json.decode(plan)
    num_pages = found["Plan"]["Shared Hit Blocks"] + found["Plan"]["Shared Read Blocks"]
    assert num_pages < 500
    assert not await live.fetch("SELECT 1 FROM usage_totals WHERE start < current_date - 400")


MANY = 4000


@pytest.mark.full
async def test_many_limits_at_once(live: Live) -> None:
    """As when a minute ends in which each of thousands of keys was used."""
    subjects = [f"k{number:011}" for number in range(MANY)]
    await live.fetch(
        "INSERT INTO api_keys (id, tenant_id, hash, scopes)"
        " SELECT unnest($1::text[]), $2, sha256(''), '{inference}'",
        *(subjects, live.tenant_id),
    )
    await live.fetch(
        "INSERT INTO quotas (subject, tenant_id, key_id, concurrent_requests)"
        " SELECT k, $2, k, 4 FROM unnest($1::text[]) k",
        *(subjects, live.tenant_id),
    )
    async with running(live, time.time) as leases:

        async def take(subject: str) -> None:
            limit = Limit(subject, Kind.CONCURRENT_REQUESTS, 4)
            (hold,) = await leases.take([(limit, 1)], time.time())
            leases.settle(hold, 0)

        await asyncio.gather(*map(take, subjects))
        (held,) = await live.fetch("SELECT count(*) FROM quota_leases WHERE granted > 0")
        assert held["count"] == MANY


@asynccontextmanager
async def running(live: Live, clock: Callable[[], float]) -> AsyncIterator[Leases]:
    """Slices of one gateway; afterwards it uses them for long enough that all are given back."""
    ahead_s = 0.0
    renewal = PostgresLeaseRenewal(live.database, 300)
    leases = Leases(renewal, "g1", 300, lambda: clock() + ahead_s, wait_s=WAIT_S)
    task = asyncio.create_task(leases.run())
    yield leases
    ahead_s = IDLE_S + 1
    await eventually(lambda: nothing_held(live))
    task.cancel()
    with suppress(asyncio.CancelledError):
        await task


async def nothing_held(live: Live) -> bool:
    return not await live.fetch("SELECT 1 FROM quota_leases WHERE granted <> 0")


def used(live: Live, holder: str, number: int, tokens: int) -> dict[str, Any]:
    """A row of a request that its tenant's tokens of the day were reserved for."""
    fields = {"tenant_id": live.tenant_id, "gateway": holder, "leased": 1}
    return row(number, datetime.now(UTC), metered_tokens=tokens, **fields)


async def test_a_limit_that_is_lifted_and_set_again_leaves_nothing_held(live: Live) -> None:
    """A stream that was admitted under the limit goes on while there is none."""
    now = datetime.now(UTC).timestamp()

    async def take(leases: Leases, amount: int) -> None:
        limit = Limit(live.tenant_id, Kind.TOKENS_PER_DAY, 1000)
        (hold,) = await leases.take([(limit, amount)], now)
        leases.settle(hold, amount)

    await live.limit(tokens_per_day=1000)
    async with running(live, lambda: now) as leases:
        await take(leases, 100)
        await live.fetch("DELETE FROM quotas RETURNING 1")
        leases.believe_catalog()
        await take(leases, 900)
        await load(live.database, [used(live, "g1", 0, 1000)])
        await live.limit(tokens_per_day=5000)
        leases.believe_catalog()
        await take(leases, 10)
        await load(live.database, [used(live, "g1", 1, 10)])


async def test_of_what_was_reserved_before_and_after_a_loss_nothing_stays_held(live: Live) -> None:
    """As when Postgres fails over to a standby that lacks the last renewals: what an answer takes
    is of the leases that it began with."""
    await live.limit(tokens_per_day=100_000)
    async with running(live, time.time) as leases:
        reservation = Reservation(
            leases,
            [Limit(live.tenant_id, Kind.TOKENS_PER_DAY, 100_000)],
            Tariff(),
            tenant_id=live.tenant_id,
            prompt_tokens=10,
            max_tokens=[2 * AT_ONCE],
            num_choices=1,
        )
        await reservation.begin()
        await live.fetch("DELETE FROM quota_holders RETURNING 1")
        await eventually(lambda: leases.holder != "g1")
        assert reservation.give(600) == 600  # and asks for more
        await eventually(lambda: live.fetch("SELECT 1 FROM quota_leases"))
        assert reservation.give(1400) == AT_ONCE - 600
        reservation.settle(Usage(10, AT_ONCE))
        await load(live.database, [used(live, reservation.holder, 0, 10 + AT_ONCE)])


def budget(live: Live) -> tuple[str, str, str]:
    return (live.tenant_id, Kind.TOKENS_PER_DAY.value, today())


async def test_who_was_away_for_too_long_has_lost_all(live: Live) -> None:
    await live.limit(tokens_per_day=4)
    renewal = PostgresLeaseRenewal(live.database, 300)
    assert await renewal.renew("g1", 1, [LeaseRequest(*budget(live), need=4)]) is not None
    await live.fetch("UPDATE quota_holders SET until = now() - interval '61 minutes' RETURNING 1")
    await renewal.upkeep()
    assert not await live.fetch("SELECT 1 FROM quota_leases")
    assert await renewal.renew("g1", 2, []) is None
    assert await renewal.renew("g1#1", 1, [LeaseRequest(*budget(live), need=4)]) is not None
    await renewal.release(["g1"])
    assert not await live.fetch("SELECT 1 FROM quota_leases")


async def test_who_owes_much_more_than_a_limit_stops_nobody(live: Live) -> None:
    """More than a bigint holds: a price was mistaken, and then a limit set."""
    now, dollar = datetime.now(UTC), 10**12
    spent = [row(n, now, tenant_id=live.tenant_id, cost=10**6 * dollar) for n in range(16)]
    await load(live.database, spent)
    await live.limit(spend_per_month=100 * dollar, concurrent_requests=4)
    month = window(Span.MONTH, now.timestamp()).name
    asks = [
        LeaseRequest(live.tenant_id, "concurrent_requests", "-infinity", need=4),
        LeaseRequest(live.tenant_id, "spend_per_month", month, need=dollar),
    ]
    slots, money = await PostgresLeaseRenewal(live.database, 300).renew("g1", 1, asks) or []
    assert (slots.granted, money.granted) == (4, 0)
    assert money.remaining == (100 - 16 * 10**6) * dollar


async def test_a_limit_that_is_gone(live: Live) -> None:
    """A limit that is not there any more is said to be none, and leaves nothing behind."""
    renewal = PostgresLeaseRenewal(live.database, 300)
    ask = LeaseRequest("ten_x", "tokens_per_day", today(), need=4)
    (answer,) = await renewal.renew("g1", 1, [ask]) or []
    assert (answer.granted, answer.remaining) == (0, None)
    assert not await live.fetch("SELECT 1 FROM quota_leases")
