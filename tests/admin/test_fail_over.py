"""Fail-overs of Postgres: a server that accepts no writes counts as a lost connection, until the
connections lead to one that does."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from urllib.parse import quote

import asyncpg
import pytest

from loraplex.box.postgres import EmbeddedPostgres
from loraplex.roles.bootstrap import migrate_database
from loraplex.roles.planes import ADMIN_ACQUIRE_S
from loraplex.roles.probes import UNAVAILABLE, Readiness
from store.database import READ_ONLY, Database
from store.errors import DatabaseUnavailable
from tests.admin.serve import administration
from tests.gateway.live import Live
from tests.proxy import PostgresProxy
from tests.standby import primary_and_standby
from tests.waiting import eventually

SOON_S = 5.0
"""Ten times as much is the deadline here, because machines are busy."""


@pytest.fixture(scope="module")
def servers() -> Iterator[tuple[EmbeddedPostgres, EmbeddedPostgres]]:
    with primary_and_standby() as servers:
        asyncio.run(migrate_database(servers[0].dsn(), with_post=True))
        yield servers


@pytest.fixture
async def proxy(
    servers: tuple[EmbeddedPostgres, EmbeddedPostgres], tmp_path: Path
) -> AsyncIterator[PostgresProxy]:
    """Leads to the primary at first, as the name of a service does."""
    async with PostgresProxy(servers[0].dsn(), tmp_path / "proxy") as proxy:
        yield proxy


def lead_to(proxy: PostgresProxy, server: EmbeddedPostgres) -> None:
    """New connections lead to the server; open ones go on."""
    proxy.target = f"unix:{server.socket_dir / '.s.PGSQL.5432'}"


async def everywhere(primary: EmbeddedPostgres, standby: EmbeddedPostgres) -> None:
    """Waits until the standby has what the primary has."""
    one, two = await asyncpg.connect(primary.dsn()), await asyncpg.connect(standby.dsn())
    written = await one.fetchval("SELECT pg_current_wal_lsn()")

    async def has_come() -> bool:
        return bool(await two.fetchval("SELECT pg_last_wal_replay_lsn() >= $1::pg_lsn", written))

    await eventually(has_come)
    await one.close()
    await two.close()


async def test_an_admin_plane_leaves_a_standby(
    proxy: PostgresProxy,
    servers: tuple[EmbeddedPostgres, EmbeddedPostgres],
    tmp_path: Path,
) -> None:
    primary, standby = servers
    database = await Database.connect(proxy.dsn, acquire_timeout=ADMIN_ACQUIRE_S)
    readiness = Readiness(database)
    async with administration(database, tmp_path / "store") as client:
        await everywhere(primary, standby)
        assert (await client.post("/tenants", json={"name": "before"})).status_code == 201
        assert await readiness.check() is None
        lead_to(proxy, standby)
        proxy.reset()
        for number in range(8):
            answer = await client.post("/tenants", json={"name": f"during-{number}"})
            assert answer.status_code == 503, answer.text
            assert answer.json()["error"]["code"] == "database_unavailable"
        await asyncio.sleep(1.1)
        assert await readiness.check() == READ_ONLY
        lead_to(proxy, primary)
        began = time.monotonic()
        while (await client.post("/tenants", json={"name": "after"})).status_code == 503:
            await asyncio.sleep(0.05)
        assert time.monotonic() - began < 10 * SOON_S
        assert {row["name"] for row in (await client.get("/tenants")).json()["data"]} >= {
            "before",
            "after",
        }
    await database.close()


async def test_connections_that_a_demoted_server_has_kept_are_replaced(
    proxy: PostgresProxy, servers: tuple[EmbeddedPostgres, EmbeddedPostgres]
) -> None:
    """A managed service sets a full or demoted server to read-only under open connections."""
    primary, _ = servers
    database = await Database.connect(proxy.dsn, sees="*", min_size=3, max_size=3)
    owner = await asyncpg.connect(primary.dsn())
    heard: list[str] = []
    await database.listen("loraplex_test", heard.append, check_interval_s=0.05)
    await owner.execute("ALTER SYSTEM SET default_transaction_read_only = on")
    await owner.execute("SELECT pg_reload_conf()")
    with pytest.raises(DatabaseUnavailable):
        async with asyncio.timeout(60):
            while True:
                async with database.acquire() as connection:
                    await connection.execute("UPDATE catalog_generation SET generation = 7")
                await asyncio.sleep(0.02)
    await eventually(lambda: len(heard) > 1)
    for _ in range(3):
        with pytest.raises(DatabaseUnavailable, match=READ_ONLY):
            async with database.acquire() as connection:
                await connection.fetchval("SELECT 1")
    assert await Readiness(database).check() == READ_ONLY
    async with proxy.closed():
        assert await Readiness(database).check() == UNAVAILABLE
    await owner.execute("SET default_transaction_read_only = off")
    await owner.execute("ALTER SYSTEM RESET default_transaction_read_only")
    await owner.execute("SELECT pg_reload_conf()")

    async def can_write() -> bool:
        return await Readiness(database).check() is None

    await eventually(can_write)
    owner_heard = len(heard)
    await owner.execute("NOTIFY loraplex_test, 'x'")
    await eventually(lambda: len(heard) > owner_heard)
    await owner.close()
    await database.close()


async def test_a_url_of_several_servers_leads_to_the_one_that_accepts_writes(
    servers: tuple[EmbeddedPostgres, EmbeddedPostgres],
) -> None:
    primary, standby = servers
    head = primary.dsn().partition("?host=")[0]
    hosts = quote(f"{standby.socket_dir},{primary.socket_dir}", safe=",")
    database = await Database.connect(f"{head}?host={hosts}", sees="*")
    await database.check_writable()
    await database.close()
    with pytest.raises(DatabaseUnavailable, match=READ_ONLY):
        await Database.connect(standby.dsn())


async def test_a_gateway_serves_limited_tenants_again(
    proxy: PostgresProxy,
    servers: tuple[EmbeddedPostgres, EmbeddedPostgres],
    tmp_path: Path,
) -> None:
    primary, standby = servers
    owner = await Database.connect(primary.dsn(), sees="*")
    live = Live(owner, tmp_path)
    await live.prepare()
    await live.make_ready("1")
    await live.limit(tokens_per_day=100_000)
    await everywhere(primary, standby)
    own = await Database.connect(proxy.dsn, sees="*")
    reaching = Live(own, tmp_path)
    reaching.key, reaching.worker, reaching.tenant_id = live.key, live.worker, live.tenant_id
    async with live.worker, reaching.gateway(limits_wait_s=1.0) as plane:
        assert (await plane.complete()).status_code == 200
        lead_to(proxy, standby)
        proxy.reset()
        answers = [(await plane.complete()).status_code for _ in range(20)]
        assert set(answers) <= {200, 503}
        await asyncio.sleep(1)
        lead_to(proxy, primary)
        await eventually(lambda: plane.serves("bot"), timeout_s=10 * SOON_S)
        answers = [(await plane.complete()).status_code for _ in range(20)]
        assert set(answers) == {200}
        used = "SELECT count(*) AS n FROM usage"

        async def is_loaded() -> bool:
            return (await live.fetch(used))[0]["n"] >= 22

        await eventually(is_loaded)
    await own.close()
    await owner.close()
