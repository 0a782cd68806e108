"""The sums of which invoices are made: only a function changes them, they are checked against the
rows, and two installations in one database keep theirs apart."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator
from datetime import UTC, datetime, timedelta
from types import SimpleNamespace

import pytest

from admin.migrate import load_migrations, migrate
from admin.usage import check
from store.database import APP_ROLE, EVERYTHING, Database
from store.errors import DatabaseRefused, Invalid
from store.queries import sql
from telemetry.tallies import PAGE
from tests.admin.usage.test_usage import fetch, load, row
from tests.postgres import fresh_database

NOW = datetime.now(UTC)
BY_HAND = [
    "INSERT INTO usage SELECT * FROM usage",
    "INSERT INTO usage_hourly SELECT * FROM usage_hourly",
    "UPDATE usage_hourly SET cost = 0",
    "DELETE FROM usage_hourly",
    "INSERT INTO usage_totals SELECT * FROM usage_totals",
    "UPDATE usage_totals SET cost = 0",
    "DELETE FROM usage_totals",
]


@pytest.fixture(autouse=True)
def hurry(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(check, "PAUSE_S", 0)


@pytest.mark.parametrize("statement", BY_HAND)
async def test_the_planes_change_no_sum_by_hand(database: Database, statement: str) -> None:
    with pytest.raises(DatabaseRefused, match="permission denied"):
        await fetch(database, f"{statement} RETURNING 1")


@pytest.mark.parametrize("part", ["metered_tokens", "cost", "input_cost", "output_cost"])
async def test_negative_usage_is_no_usage(database: Database, part: str) -> None:
    with pytest.raises(Invalid, match="negative"):
        await load(database, [row(1, NOW) | {part: -1}])
    assert await fetch(database, "SELECT 1 FROM usage_hourly") == []


async def test_the_version_before_loads_until_the_roll_out_is_over() -> None:
    with fresh_database(migrated=False) as dsn:
        owner = await Database.connect(dsn, role=None, max_size=1, sees=EVERYTHING)
        await migrate(owner)
        of_version_before = await Database.connect(dsn, max_size=1, sees=EVERYTHING)
        await fetch(of_version_before, "UPDATE usage_hourly SET cost = 0 RETURNING 1")
        await load(of_version_before, [row(1, NOW)])
        await migrate(owner, with_post=True)
        with pytest.raises(DatabaseRefused, match="permission denied"):
            await fetch(of_version_before, "UPDATE usage_hourly SET cost = 0 RETURNING 1")
        await load(of_version_before, [row(2, NOW)])
        assert await fetch(owner, "SELECT sum(requests)::int FROM usage_hourly") == [(2,)]
        await of_version_before.close()
        await owner.close()


async def test_sums_that_are_right_pass(database: Database) -> None:
    rows = [row(n, NOW - timedelta(hours=5 * n)) for n in range(12)]
    await load(database, rows)
    assert await check.check_usage(database) == 0
    since, until = NOW - timedelta(hours=72), NOW + timedelta(hours=1)
    async with database.transaction() as connection:
        args = ("tiny", None, since, until, 0, 0, 0)
        assert await connection.fetchrow(sql["usage_reprice"], *args)
    assert await fetch(database, "SELECT sum(cost) FROM usage_hourly") == [(0,)]
    assert await check.check_usage(database) == 0


@pytest.mark.parametrize(
    ("statement", "num_differing"),
    [
        ("UPDATE usage_hourly SET cost = cost - 1", 3),
        ("UPDATE usage_hourly SET requests = requests + 1 WHERE hour < now() - interval '10 h'", 2),
        ("DELETE FROM usage_hourly WHERE hour < now() - interval '10 h'", 2),
        ("UPDATE usage_hourly SET key_id = 'another'", 6),
        ("DELETE FROM usage WHERE admitted_at < now() - interval '30 h'", 1),
    ],
)
async def test_sums_that_were_changed_are_noticed(
    database: Database,
    owner: Database,
    caplog: pytest.LogCaptureFixture,
    statement: str,
    num_differing: int,
) -> None:
    await load(database, [row(n, NOW - timedelta(hours=20 * n)) for n in range(3)])
    async with owner.acquire() as connection:
        await connection.execute(statement)
    with caplog.at_level(logging.ERROR):
        assert await check.check_usage(database) == num_differing
    assert "hourly sums differ" in caplog.text
    assert PAGE.get_sample_value("loraplex_usage_sums_differing") == num_differing


async def test_days_that_are_dropped_during_a_check_do_not_count(
    database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    await load(database, [row(n, NOW - timedelta(days=4 * n)) for n in range(3)])

    async def drop(_: float) -> None:
        async with database.transaction() as connection:
            await connection.execute(sql["usage_upkeep"], 2)

    monkeypatch.setattr(check, "asyncio", SimpleNamespace(sleep=drop))
    assert await check.check_usage(database) == 0
    assert await fetch(database, "SELECT count(*)::int FROM usage_hourly") == [(3,)]


@pytest.fixture
async def schemas() -> AsyncIterator[dict[str, Database]]:
    """Two installations in one database."""
    with fresh_database(migrated=False) as dsn:
        first = await Database.connect(dsn, role=None, max_size=1)
        async with first.acquire() as connection:
            for name in ("one", "two"):
                await connection.execute(f"CREATE SCHEMA {name}")
                await connection.execute(f"GRANT USAGE ON SCHEMA {name} TO {APP_ROLE}")
        await first.close()
        opened: dict[str, Database] = {}
        for name in ("one", "two"):
            url = f"{dsn}&search_path={name}"
            owner = await Database.connect(url, role=None, max_size=1)
            assert len(await migrate(owner, with_post=True)) == len(load_migrations())
            await owner.close()
            opened[name] = await Database.connect(url, sees=EVERYTHING)
        yield opened
        for database in opened.values():
            await database.close()


async def test_two_installations_in_one_database(schemas: dict[str, Database]) -> None:
    days = [NOW, NOW - timedelta(days=1), NOW - timedelta(days=9)]
    for turn, name in enumerate(["one", "two", "one", "two"]):
        await load(schemas[name], [row(10 * turn + n, day) for n, day in enumerate(days)])
    for database in schemas.values():
        async with database.transaction() as connection:
            await connection.execute(sql["usage_upkeep"], 30)
        assert await fetch(database, "SELECT count(*), sum(cost) > 0 FROM usage") == [(6, True)]
        assert await check.check_usage(database) == 0


async def test_a_missing_partition_is_no_fault_of_the_record(database: Database) -> None:
    """The record is stored later, and not set aside."""
    async with database.transaction() as connection:
        with pytest.raises(Exception, match="no partition of relation"):
            async with connection.transaction():
                await connection.execute(sql["usage_load"], [row(1, NOW - timedelta(days=3))])
    with pytest.raises(DatabaseRefused):
        async with database.transaction() as connection:
            await connection.execute(sql["usage_load"], [row(1, NOW - timedelta(days=3))])
    await load(database, [row(1, NOW - timedelta(days=3))])
