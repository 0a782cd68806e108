"""Migrations outside of a transaction: indexes that block no writer and backfills in batches, which
go on after a kill in the middle."""

from __future__ import annotations

import asyncio
import signal
import sys
from asyncio.subprocess import PIPE
from typing import Any

import pytest

from admin.migrate import Migration, migrate
from store.database import Database
from store.errors import ApiError
from tests.preloaded import ROOT

TABLE = Migration(
    1,
    "0001_pre_table.sql",
    "CREATE TABLE many AS SELECT i, 0 AS twice FROM generate_series(1, 1000) i",
)
ALONE = """-- no transaction
-- An index that an earlier run has begun is invalid.
DROP INDEX CONCURRENTLY IF EXISTS many_i
--
CREATE INDEX CONCURRENTLY many_i ON many (i)
--
-- repeat
UPDATE many SET twice = 2 * i WHERE i IN (
    SELECT i FROM many WHERE twice = 0 ORDER BY i LIMIT 100)
--
SELECT pg_advisory_lock(7), pg_advisory_unlock(7)
--
CREATE TABLE IF NOT EXISTS done ()
"""
FILES = [TABLE, Migration(2, "0002_pre_alone.sql", ALONE)]
KILLED = """
import asyncio, sys
from store.database import Database
from admin.migrate import migrate
from tests.admin.test_migrate_alone import FILES

async def main(dsn):
    database = await Database.connect(dsn, role=None, max_size=1, command_timeout=None)
    await migrate(database, FILES, lambda name: print(name, flush=True))

asyncio.run(main(sys.argv[1]))
"""


@pytest.fixture
async def owner(empty_dsn: str) -> Any:
    owner = await Database.connect(empty_dsn, role=None, max_size=2, command_timeout=60)
    yield owner
    await owner.close()


async def check(owner: Database) -> None:
    async with owner.acquire() as connection:
        assert await connection.fetchval("SELECT bool_and(twice = 2 * i) FROM many")
        assert await connection.fetchval("SELECT to_regclass('done') IS NOT NULL")
        valid = "SELECT indisvalid FROM pg_index WHERE indexrelid = 'many_i'::regclass"
        assert await connection.fetchval(valid)
        applied = await connection.fetch("SELECT name FROM schema_migrations ORDER BY number")
        assert [row["name"] for row in applied] == [file.name for file in FILES]


async def test_statements_are_applied_one_by_one(owner: Database) -> None:
    assert await migrate(owner, FILES) == [file.name for file in FILES]
    await check(owner)
    assert await migrate(owner, FILES) == []


async def test_a_run_that_is_killed_in_the_middle_goes_on(owner: Database, empty_dsn: str) -> None:
    async with owner.acquire() as connection:
        await connection.execute("SELECT pg_advisory_lock(7)")
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-c", KILLED, empty_dsn), cwd=ROOT, stdout=PIPE
        )
        waits = "SELECT count(*) FROM pg_locks WHERE locktype = 'advisory' AND NOT granted"
        async with asyncio.timeout(60):
            while not await connection.fetchval(waits):
                await asyncio.sleep(0.02)
        # What was done before is kept, and the file is not noted as applied.
        assert await connection.fetchval("SELECT bool_and(twice = 2 * i) FROM many")
        process.kill()
        assert await process.wait() == -signal.SIGKILL
        await connection.execute("SELECT pg_advisory_unlock(7)")
        await connection.execute("UPDATE many SET twice = 0 WHERE i > 500")
        assert await connection.fetchval("SELECT count(*) FROM schema_migrations") == 1
    assert await migrate(owner, FILES) == [FILES[1].name]
    await check(owner)


async def test_a_statement_that_fails_leaves_those_before_it(owner: Database) -> None:
    broken = ALONE.replace("CREATE TABLE IF NOT EXISTS done ()", "SELECT 1 / 0")
    with pytest.raises(ApiError, match="division by zero"):
        await migrate(owner, [TABLE, Migration(2, "0002_pre_alone.sql", broken)])
    async with owner.acquire() as connection:
        assert await connection.fetchval("SELECT sum(twice) FROM many") == 1000 * 1001
        assert await connection.fetchval("SELECT count(*) FROM schema_migrations") == 1
    # It is mended before it was ever applied as a whole.
    await migrate(owner, FILES)
    await check(owner)
