import asyncio
from pathlib import Path

import pytest

from admin.database import Database
from admin.errors import MigrationError
from admin.migrate import Migration, load_migrations, migrate

TABLES = (
    "SELECT string_agg(table_name, ',' ORDER BY table_name) FROM information_schema.tables"
    " WHERE table_schema = 'public'"
)


async def connect(dsn: str) -> Database:
    return await Database.connect(dsn, max_size=2)


async def test_from_empty_then_nothing_to_do(empty_dsn: str):
    database = await connect(empty_dsn)
    files = load_migrations()
    seen: list[str] = []
    assert await migrate(database, report=seen.append) == [file.name for file in files] == seen
    assert await migrate(database) == []
    async with database.acquire() as connection:
        tables = (await connection.fetchval(TABLES)).split(",")
    await database.close()
    assert {"tenants", "api_keys", "base_models", "adapter_versions", "aliases"} <= set(tables)


async def test_concurrent_runners_apply_each_file_once(empty_dsn: str):
    databases = [await connect(empty_dsn) for _ in range(5)]
    applied = await asyncio.gather(*(migrate(database) for database in databases))
    await asyncio.gather(*(database.close() for database in databases))
    names = [name for one in applied for name in one]
    assert names == [file.name for file in load_migrations()]


async def test_a_changed_file_is_refused(empty_dsn: str):
    database = await connect(empty_dsn)
    before = Migration(1, "0001_pre_a.sql", "CREATE TABLE a (i int)")
    await migrate(database, [before])
    with pytest.raises(MigrationError, match=r"0001_pre_a\.sql was changed"):
        await migrate(database, [Migration(1, before.name, "CREATE TABLE a (i bigint)")])
    with pytest.raises(MigrationError, match="newer"):
        await migrate(database, [])
    await database.close()


async def test_a_failing_file_leaves_nothing_and_the_ones_before_it_stay(empty_dsn: str):
    database = await connect(empty_dsn)
    good = Migration(1, "0001_pre_a.sql", "CREATE TABLE a (i int)")
    bad = Migration(2, "0002_pre_b.sql", "CREATE TABLE b (i int); SELECT 1/0")
    with pytest.raises(Exception, match="division by zero"):
        await migrate(database, [good, bad])
    assert await migrate(database, [good]) == []
    async with database.acquire() as connection:
        assert await connection.fetchval(TABLES) == "a,schema_migrations"
    await database.close()


@pytest.mark.parametrize("names", [["0001_what.sql"], ["0002_pre_a.sql"], ["0001_pre_A.sql"]])
def test_file_names_are_checked(tmp_path: Path, names: list[str]):
    for name in names:
        (tmp_path / name).write_text("SELECT 1")
    with pytest.raises(MigrationError):
        load_migrations(tmp_path)


def test_two_files_of_one_number_are_refused(tmp_path: Path):
    for name in ("0001_pre_a.sql", "0001_post_b.sql"):
        (tmp_path / name).write_text("SELECT 1")
    with pytest.raises(MigrationError, match="expected number 0002"):
        load_migrations(tmp_path)
