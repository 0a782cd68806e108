"""A version number is used once: the numbers of deleted adapters and of ephemeral versions do not
come again, so that a key for `bot@1` never reaches another content."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import asyncpg
import pytest

from adapters.store.folder import LocalStore
from admin.adapters import ephemeral, retirement
from admin.adapters.ephemeral import Retention
from admin.adapters.versions import NewVersion
from admin.keys.keys import create_key
from admin.migrate import load_migrations, migrate
from admin.tenants import tenants
from admin.upkeep.reaper import Reaper
from store.database import EVERYTHING, Database
from store.errors import NotFound
from store.queries import lock_catalog, sql
from tests.admin.lifecycle import add, make_ready, make_tenant, manifest, prove_all
from tests.postgres import fresh_database


@pytest.fixture
async def tenant_id(database: Database) -> str:
    async with database.transaction() as connection:
        return await make_tenant(connection)


async def delete(database: Database, tenant_id: str, reaper: Reaper) -> None:
    async with database.transaction() as connection:
        await retirement.retire_adapter(connection, tenant_id, "bot")
    await reaper.reap()
    async with database.acquire() as connection:
        assert await connection.fetchval("SELECT count(*) FROM adapters") == 0


async def load(database: Database, tenant_id: str, digit: str) -> int:
    new = NewVersion(
        tenant_id=tenant_id, name="bot", base_name="tiny", manifest=manifest(digit), uploaded_by="k"
    )
    async with database.transaction() as connection:
        return await ephemeral.add_ephemeral(connection, new, Retention(2, 3600), in_place=True)


@pytest.mark.parametrize("kinds", ["pp", "pe", "ep", "ee"])
async def test_an_adapter_of_the_same_name_goes_on(
    database: Database, tenant_id: str, tmp_path: Path, kinds: str
) -> None:
    reaper = Reaper(database, LocalStore(tmp_path))
    numbers: list[int] = []
    for digit, kind in zip("abcdef", kinds * 3, strict=True):
        if kind == "e":
            numbers.append(await load(database, tenant_id, digit))
        else:
            async with database.transaction() as connection:
                numbers.append(await add(connection, tenant_id, digit))
            await prove_all(database)
        await delete(database, tenant_id, reaper)
    assert numbers == [1, 2, 3, 4, 5, 6]


async def test_a_deleted_tenant_gets_no_versions_and_keys(
    database: Database, tenant_id: str
) -> None:
    """An upload or a request for a key may be in progress when the tenant is deleted."""
    async with database.transaction() as connection:
        await add(connection, tenant_id, "a")
        await lock_catalog(connection)
        await tenants.delete_tenant(connection, await tenants.find_tenant(connection, tenant_id))
        await create_key(connection, b"pepper", tenant_id, frozenset({"inference"}))
    with pytest.raises(NotFound, match="no tenant"):
        await load(database, tenant_id, "b")
    with pytest.raises(NotFound, match="no tenant"):
        async with database.transaction() as connection:
            await add(connection, tenant_id, "c")
    async with database.transaction() as connection:
        assert await connection.fetch(sql["catalog_keys"], None) == []


async def test_a_deleted_tenant_leaves_no_numbers(
    database: Database, tenant_id: str, tmp_path: Path
) -> None:
    reaper = Reaper(database, LocalStore(tmp_path))
    async with database.transaction() as connection:
        await make_ready(connection, tenant_id, "a", "b")
    await delete(database, tenant_id, reaper)
    async with database.transaction() as connection:
        assert await connection.fetchval("SELECT last_version FROM adapter_numbers") == 2
        await tenants.delete_tenant(connection, await tenants.find_tenant(connection, tenant_id))
    await reaper.reap()
    async with database.acquire() as connection:
        assert not await connection.fetch("SELECT FROM adapter_numbers")


@pytest.fixture
async def before() -> AsyncIterator[tuple[str, Database]]:
    """A database of 0.1.0, with no later migration."""
    with fresh_database(migrated=False) as dsn:
        owner = await Database.connect(dsn, role=None, max_size=2, sees=EVERYTHING)
        await migrate(owner, load_migrations()[:1])
        yield dsn, owner
        await owner.close()


async def test_numbers_of_adapters_that_are_gone_are_found(
    before: tuple[str, Database],
) -> None:
    dsn, owner = before
    async with owner.transaction() as connection:
        await connection.execute("INSERT INTO tenants (id, name) VALUES ('ten_aaaaaaaaaaaa', 'a')")
        await connection.execute(
            "INSERT INTO usage_hourly (hour, tenant_id, model, adapter, adapter_version, key_id,"
            " requests, prompt_tokens, cached_tokens, completion_tokens)"
            " SELECT now(), t, 'tiny', 'used', v, 'k', 1, 1, 0, 1"
            " FROM (VALUES ('ten_aaaaaaaaaaaa', 3), ('ten_aaaaaaaaaaaa', 7), ('ten_gone', 9))"
            " r (t, v)"
        )
        await connection.execute(
            "INSERT INTO audit_log (tenant_id, action, object, details) VALUES"
            " ('ten_aaaaaaaaaaaa', 'version.create', 'logged@5', '{}'),"
            " ('ten_aaaaaaaaaaaa', 'version.create', 'used@2', '{}')"
        )
        await connection.execute(
            "INSERT INTO api_keys (id, tenant_id, hash, scopes, models) VALUES ('aaaaaaaaaaaa',"
            " 'ten_aaaaaaaaaaaa', decode(repeat('00', 32), 'hex'), '{inference}',"
            " '{limited@4,a/prefixed@6,bot@prod,plain,again@99999999999}')"
        )
        await connection.execute(
            "INSERT INTO adapters (tenant_id, name, last_version) VALUES"
            " ('ten_aaaaaaaaaaaa', 'used', 1)"
        )
    await migrate(owner)
    async with owner.transaction() as connection:
        rows = await connection.fetch("SELECT name, last_version FROM adapter_numbers")
        assert {row["name"]: row["last_version"] for row in rows} == {
            "used": 7,
            "logged": 5,
            "limited": 4,
            "prefixed": 6,
        }
        assert await connection.fetchval("SELECT last_version FROM adapters") == 7
        made = await connection.fetchval(
            "INSERT INTO adapters (tenant_id, name) VALUES ('ten_aaaaaaaaaaaa', 'limited')"
            " RETURNING last_version"
        )
    assert made == 4
    app = await asyncpg.connect(dsn, server_settings={"role": "loraplex_app"})
    with pytest.raises(asyncpg.InsufficientPrivilegeError):
        await app.execute("DELETE FROM adapter_numbers")
    await app.close()
