import asyncio
import re
import signal
import sys
from asyncio.subprocess import PIPE
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from admin.migrate import Migration, check_schema, load_migrations, migrate
from admin.tenants import tenants
from loraplex.roles.bootstrap import migrate_database
from store.database import EVERYTHING, Connection, Database
from store.errors import ApiError, DatabaseUnavailable, MigrationError
from tests.postgres import SETTINGS, fresh_database, own_server, schema_of, server
from tests.preloaded import ROOT

TABLES = (
    "SELECT string_agg(table_name, ',' ORDER BY table_name) FROM information_schema.tables"
    " WHERE table_schema = 'public'"
)


ONE_OF_FIVE = """
import asyncio, sys
from store.database import Database
from admin.migrate import Migration, load_migrations, migrate

async def main(dsn):
    files = load_migrations()
    number = len(files) + 1
    slow = "CREATE TABLE slow (i int); SELECT pg_advisory_xact_lock(7); INSERT INTO slow VALUES (1)"
    files.append(Migration(number, f"{number:04}_pre_slow.sql", slow))
    database = await Database.connect(dsn, role=None, max_size=1, command_timeout=None)
    print("applied", *await migrate(database, files, lambda name: print(name, flush=True)))
    await database.close()

asyncio.run(main(sys.argv[1]))
"""


async def connect(dsn: str) -> Database:
    return await Database.connect(dsn, role=None, max_size=2)


async def test_from_empty_then_nothing_to_do(empty_dsn: str):
    database = await connect(empty_dsn)
    files = load_migrations()
    seen: list[str] = []
    names = [file.name for file in files]
    assert await migrate(database, report=seen.append, with_post=True) == names == seen
    assert await migrate(database, with_post=True) == []
    async with database.acquire() as connection:
        tables = (await connection.fetchval(TABLES)).split(",")
    await database.close()
    assert {"tenants", "api_keys", "base_models", "adapter_versions", "aliases"} <= set(tables)


async def test_concurrent_runners_apply_each_file_once(empty_dsn: str):
    databases = [await connect(empty_dsn) for _ in range(5)]
    applied = await asyncio.gather(*(migrate(database, with_post=True) for database in databases))
    await asyncio.gather(*(database.close() for database in databases))
    names = [name for one in applied for name in one]
    assert names == [file.name for file in load_migrations()]


@pytest.mark.full
async def test_five_processes_one_of_which_is_killed_midway(empty_dsn: str):
    """What it had begun is undone; one of the others does it, and the schema is as from one."""
    processes = [
        await asyncio.create_subprocess_exec(
            *(sys.executable, "-c", ONE_OF_FIVE, empty_dsn), cwd=ROOT, stdout=PIPE
        )
        for _ in range(5)
    ]
    heard: asyncio.Queue[tuple[int, str]] = asyncio.Queue()

    async def listen(i: int) -> None:
        stdout = processes[i].stdout
        assert stdout is not None
        while line := (await stdout.readline()).decode().strip():
            heard.put_nowait((i, line))

    database = await connect(empty_dsn)
    async with (
        asyncio.timeout(120),
        database.acquire() as connection,
        asyncio.TaskGroup() as tasks,
    ):
        # The slow file waits for this lock, so that its process is killed in the middle of it.
        await connection.execute("SELECT pg_advisory_lock(7)")
        for i in range(5):
            tasks.create_task(listen(i))
        told, first = [""], 0
        while not told[-1].endswith("_pre_slow.sql"):
            first, line = await heard.get()
            told.append(line)
        processes[first].kill()
        await processes[first].wait()
        await connection.execute("SELECT pg_advisory_unlock(7)")
        codes = [await process.wait() for process in processes]
    names = [file.name for file in load_migrations()]
    assert told[1:-1] == names  # all by the first
    assert sorted(codes) == [-signal.SIGKILL, 0, 0, 0, 0]
    rest = [heard.get_nowait()[1] for _ in range(heard.qsize())]
    slow = told[-1]
    assert sorted(rest) == sorted([slow, f"applied {slow}", *["applied"] * 3])
    async with database.acquire() as connection:
        assert await connection.fetchval("SELECT count(*) FROM slow") == 1
        await connection.execute("DROP TABLE slow")
    await database.close()
    with fresh_database() as alone:
        assert schema_of(empty_dsn) == schema_of(alone)


async def test_one_that_may_create_nothing_finds_that_nothing_is_to_do(empty_dsn: str):
    database = await connect(empty_dsn)
    files = load_migrations()
    await migrate(database, files, with_post=True)
    async with database.acquire() as connection:
        await connection.execute("CREATE ROLE guest LOGIN PASSWORD 'guest'")
        try:
            await connection.execute("GRANT loraplex_app TO guest")
            guest = await connect(re.sub("//[^@]*@", "//guest:guest@", empty_dsn))
            assert await migrate(guest, files) == []
            more = Migration(len(files) + 1, "more", "CREATE TABLE more (i int)")
            with pytest.raises(ApiError, match="permission denied for schema public"):
                await migrate(guest, [*files, more])
            await guest.close()
        finally:
            await connection.execute("DROP ROLE guest")
    await database.close()


OPERATORS = """
CREATE ROLE lpx_owner LOGIN PASSWORD 'owner';
CREATE ROLE lpx_app LOGIN PASSWORD 'app';
CREATE DATABASE ours OWNER lpx_owner;
CREATE DATABASE theirs OWNER lpx_owner"""


@asynccontextmanager
async def working(dsn: str, **options: Any) -> AsyncIterator[Connection]:
    database = await Database.connect(dsn, max_size=2, **options)
    try:
        async with database.acquire() as connection:
            yield connection
    finally:
        await database.close()


async def test_an_operators_own_roles():
    """An owner who is no superuser migrates two databases at once; the planes work through a
    login that can do no more than they."""
    with own_server(SETTINGS) as postgres:

        def dsn(name: str, user: str) -> str:
            return re.sub("//[^@]*@", f"//lpx_{user}:{user}@", postgres.dsn(name))

        names = [file.name for file in load_migrations()]
        async with working(postgres.dsn(), role=None) as superuser:
            for statement in OPERATORS.split(";"):
                await superuser.execute(statement)
            with pytest.raises(ApiError, match="lpx_owner may not create it"):
                await migrate_database(dsn("ours", "owner"))
            await superuser.execute("ALTER ROLE lpx_owner CREATEROLE")
            done = await asyncio.gather(
                *(
                    migrate_database(dsn(name, "owner"), with_post=True)
                    for name in ("ours", "theirs")
                )
            )
            assert done[0] == names[-len(done[0]) :] and done[1] == names
            await superuser.execute("ALTER ROLE lpx_owner NOCREATEROLE")
            with pytest.raises(DatabaseUnavailable, match="permission denied to set role"):
                await Database.connect(dsn("ours", "app"))
            await superuser.execute("GRANT loraplex_app TO lpx_app")
        for user in ("owner", "app"):
            async with working(dsn("ours", user), sees=EVERYTHING) as connection:
                await tenants.create_tenant(connection, f"by-{user}")
        async with working(dsn("ours", "app"), role=None) as connection:
            assert await tenants.list_tenants(connection, "", 9) == []
        assert await migrate_database(dsn("ours", "app"), with_post=True) == []


@pytest.mark.parametrize("encoding", ["SQL_ASCII", "LATIN1"])
async def test_a_database_of_another_encoding_is_refused(empty_dsn: str, encoding: str):
    name = f"encoded_{encoding.lower()}"
    async with working(empty_dsn, role=None) as connection:
        await connection.execute(
            f"CREATE DATABASE {name} TEMPLATE template0 ENCODING '{encoding}'"
            " LOCALE_PROVIDER libc LOCALE 'C'"
        )
        try:
            with pytest.raises(MigrationError, match=f"must be UTF8, not {encoding}"):
                await migrate_database(server().dsn(name))
        finally:
            await connection.execute(f"DROP DATABASE {name} WITH (FORCE)")


async def test_a_changed_file_is_refused(empty_dsn: str):
    database = await connect(empty_dsn)
    before = Migration(1, "0001_pre_a.sql", "CREATE TABLE a (i int)")
    await migrate(database, [before])
    with pytest.raises(MigrationError, match=r"0001_pre_a\.sql was changed"):
        await migrate(database, [Migration(1, before.name, "CREATE TABLE a (i bigint)")])
    with pytest.raises(MigrationError, match="newer"):
        await migrate(database, [])
    await database.close()


async def test_a_database_of_before_the_baseline_is_refused(empty_dsn: str):
    """By `migrate` and by planes, and nothing in it changes."""
    database = await connect(empty_dsn)
    old = [Migration(n, f"{n:04}_pre_old.sql", f"CREATE TABLE old{n} (i int)") for n in (1, 2)]
    await migrate(database, old)
    before = schema_of(empty_dsn)
    for refusing in (migrate, check_schema):
        with pytest.raises(MigrationError, match=r"before 0\.1\.0 .* use an empty database"):
            await refusing(database)
    assert schema_of(empty_dsn) == before
    await database.close()


async def test_planes_need_every_file_and_take_more(dsn: str, empty_dsn: str):
    empty, database = await connect(empty_dsn), await connect(dsn)
    with pytest.raises(MigrationError, match=r"lacks 0001_pre_baseline\.sql: run"):
        await check_schema(empty)
    files = load_migrations()
    newer = Migration(len(files) + 1, "0999_pre_newer.sql", "CREATE TABLE newer (i int)")
    await migrate(database, [*files, newer])
    await check_schema(database)
    newest = Migration(newer.number + 1, "1000_pre_newest.sql", "")
    with pytest.raises(MigrationError, match=r"lacks 1000_pre_newest\.sql: run"):
        await check_schema(database, [*files, newer, newest])
    await empty.close()
    await database.close()


def test_post_files_of_a_version_come_after_its_pre_files():
    """Checks the files since 0.1.0. Otherwise the roll-out would not wait for the post files."""
    kinds = [file.is_post for file in load_migrations()[1:]]
    assert kinds == sorted(kinds)


async def test_a_post_file_waits_for_the_roll_out(empty_dsn: str):
    """Planes of both versions start before and after it, and the next version does not."""
    database = await connect(empty_dsn)
    before = [Migration(1, "0001_pre_a.sql", "CREATE TABLE a (old int)")]
    files = [
        *before,
        Migration(2, "0002_pre_b.sql", "ALTER TABLE a ADD COLUMN new int"),
        Migration(3, "0003_post_c.sql", "ALTER TABLE a DROP COLUMN old"),
    ]
    after = [
        *files,
        Migration(4, "0004_post_d.sql", "CREATE TABLE d (i int)"),
        Migration(5, "0005_pre_e.sql", "CREATE TABLE e (i int)"),
        Migration(6, "0006_post_f.sql", "CREATE TABLE f (i int)"),
    ]
    assert await migrate(database, before) == ["0001_pre_a.sql"]
    for with_post, applied in ((False, "0002_pre_b.sql"), (True, "0003_post_c.sql")):
        assert await migrate(database, files, with_post=with_post) == [applied]
        assert await migrate(database, files) == []
        for version in (before, files):
            await check_schema(database, version)
        with pytest.raises(MigrationError, match=r"lacks 000[34]_post_[cd]"):
            await check_schema(database, after)
    # What the roll-out before left out comes first.
    assert await migrate(database, after) == ["0004_post_d.sql", "0005_pre_e.sql"]
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
