"""Tests that the row with the holdings of a tenant agrees with its versions after every change, and
that a tenant of many adapters is deleted in batches, while its keys and names stop at once."""

from __future__ import annotations

import random
import shutil
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest
from litestar import Litestar

from adapters.store.folder import LocalStore
from admin.adapters import retirement, versions
from admin.http.plane import AdminPlane
from admin.keys import keys
from admin.tenants import tenants
from admin.upkeep import reaper as reaper_module
from admin.upkeep.reaper import Reaper
from loraplex.roles.bootstrap import disk_share
from loraplex.settings import load_settings
from store.database import Database
from store.errors import Conflict, NotFound
from store.queries import load_catalog, sql
from store.records import TENANT_SCOPES
from tests.admin.conftest import CONFIG, PEPPER, Plane
from tests.admin.lifecycle import add, claim, make_ready, make_tenant, manifest, prove
from tests.loraplex.commands.test_cli import run_for_both
from tests.scale import scaled

COUNTED = """
WITH held AS (
    SELECT name, digest, (manifest ->> 'file_bytes')::bigint AS bytes FROM adapter_versions
    WHERE tenant_id = $1 AND state NOT IN ('rejected', 'retired')
)
SELECT count(DISTINCT name) AS adapters,
       (SELECT coalesce(sum(bytes), 0)::bigint FROM (SELECT DISTINCT digest, bytes FROM held) c)
FROM held"""
STORED = "SELECT adapters, bytes AS b FROM tenant_holdings WHERE tenant_id = $1"


@pytest.mark.parametrize("seed", range(scaled(4, 40)))
async def test_it_agrees_with_the_versions(database: Database, tmp_path: Path, seed: int) -> None:
    chance = random.Random(seed)
    reaper = Reaper(database, LocalStore(tmp_path))
    async with database.transaction() as connection:
        owners = [await make_tenant(connection, "acme")]
        owners.append((await tenants.create_tenant(connection, "globex")).id)
        if chance.random() < 0.5:
            await connection.execute(sql["holdings_store"], owners[0])
    for _ in range(40):
        owner, name = chance.choice(owners), chance.choice(["bot", "cat", "dog"])
        async with database.transaction() as connection:
            if chance.random() < 0.1:
                await connection.execute(sql["holdings_store"], owner)
            found = [
                row["version"]
                for row in await connection.fetch(
                    "SELECT version FROM adapter_versions WHERE (tenant_id, name) = ($1, $2)"
                    " AND state IN ('proving', 'ready')",
                    *(owner, name),
                )
            ]
            match chance.choice(["add", "add", "prove", "reject", "retire", "reap"]):
                case "add":
                    await add(connection, owner, chance.choice("abc"), name=name)
                case "prove":
                    for claimed in (await claim(connection))[:1]:
                        await prove(connection, claimed)
                case "reject" if found:
                    rejected = "SELECT version_rejected($1, $2, $3, '{}')"
                    await connection.execute(rejected, owner, name, chance.choice(found))
                case "retire" if found:
                    several = chance.sample(found, chance.randint(1, len(found)))
                    await connection.execute(sql["aliases_clear"], owner, name)
                    await retirement.retire_versions(connection, owner, name, several)
                case _:
                    await versions.prune_rejected(connection)
        if chance.random() < 0.2:
            await reaper.reap()
        async with database.acquire() as connection:
            for owner in owners:
                stored = await connection.fetchrow(STORED, owner)
                if stored is not None:
                    counted = await connection.fetchrow(COUNTED, owner)
                    assert counted is not None
                    assert tuple(stored.values()) == tuple(counted.values())


async def test_an_upload_reads_no_other_version(database: Database, owner: Database) -> None:
    """Also of a tenant that has many: what it holds is read, not counted."""
    async with database.transaction() as connection:
        tenant_id = await make_tenant(connection)
        await make_ready(connection, tenant_id, "a", "b", "c")
        row = {"cached_weight": 100, "weight": 1, "class": "standard", "adapters": 10}
        row |= {"subject": tenant_id, "tenant_id": tenant_id, "updated_at": "2026-01-01T00:00:00Z"}
        await connection.execute(
            "INSERT INTO quotas SELECT * FROM jsonb_populate_record(NULL::quotas, $1)", row
        )
        await versions.check_holdings(connection, tenant_id, "bot", manifest("d"))
    async with database.transaction() as connection:
        assert await connection.fetchval("SELECT bytes FROM tenant_holdings") == 3 * 400
    # Holdings are read from the row even where it contradicts the versions.
    async with owner.acquire() as connection:
        await connection.execute("UPDATE tenant_holdings SET adapters = 77")
    async with database.transaction() as connection:
        held = await connection.fetchrow(sql["adapters_held"], tenant_id, "bot", "d" * 64)
    assert held is not None and held["adapters"] == 77


async def test_a_tenant_is_deleted_in_batches(
    database: Database, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reaper_module, "VERSIONS_AT_ONCE", 3)
    store = LocalStore(tmp_path)
    reaper = Reaper(database, store)
    async with database.transaction() as connection:
        tenant_id = await make_tenant(connection)
        other = (await tenants.create_tenant(connection, "globex")).id
        await make_ready(connection, tenant_id, "a", "b", "c")
        await make_ready(connection, other, "a")
        for number in range(5):
            await add(connection, tenant_id, "d", name=f"bot-{number}")
        key, _ = await keys.create_key(connection, PEPPER, tenant_id, TENANT_SCOPES)
    async with database.transaction() as connection:
        tenant = await tenants.find_tenant(connection, tenant_id)
        await tenants.delete_tenant(connection, tenant)
    async with database.acquire() as connection:
        snapshot = await load_catalog(connection)
    async with database.transaction() as connection:
        assert [each.name for each in snapshot.tenants] == ["globex"]
        assert key.id not in {each.id for each in snapshot.keys}
        assert {each.tenant_id for each in snapshot.versions} == {other}
        assert {each.tenant_id for each in snapshot.aliases} == {other}
        for reference in (tenant_id, "acme"):
            with pytest.raises(NotFound):
                await tenants.find_tenant(connection, reference)
        assert (await tenants.find_past_or_present(connection, tenant_id)).name == "acme"
        again = await tenants.create_tenant(connection, "acme")
    left: list[int] = []
    for _ in range(4):
        await reaper.reap()
        async with database.acquire() as connection:
            count = "SELECT count(*) FROM adapter_versions WHERE tenant_id = $1"
            left.append(await connection.fetchval(count, tenant_id))
    assert left == [5, 2, 0, 0]
    async with database.acquire() as connection:
        ids = {row["id"] for row in await connection.fetch("SELECT id FROM tenants")}
        assert ids == {other, again.id}
        deletions = "SELECT action, object, details ->> 'name' AS name FROM audit_log"
        rows = [tuple(row.values()) for row in await connection.fetch(deletions)]
        assert [row for row in rows if "delete" in row[0]] == [("tenant.delete", tenant_id, "acme")]
        assert not await connection.fetch("SELECT FROM loose_contents")
        held = await connection.fetch("SELECT DISTINCT digest FROM adapter_versions")
        assert [row["digest"][0] for row in held] == ["a"]


@pytest.mark.parametrize("limits", [None, {"adapters": 9}, {"adapter_bytes": 800}])
async def test_a_tenant_without_a_limit_of_bytes_has_a_share_of_the_disk(
    database: Database, limits: dict[str, int] | None
) -> None:
    async with database.transaction() as connection:
        tenant_id = await make_tenant(connection)
        await make_ready(connection, tenant_id, "a")
        if limits is not None:
            row = {"cached_weight": 100, "weight": 1, "class": "standard", "subject": tenant_id}
            row |= {"tenant_id": tenant_id, "updated_at": "2026-01-01T00:00:00Z"}
            insert = "INSERT INTO quotas SELECT * FROM jsonb_populate_record(NULL::quotas, $1)"
            await connection.execute(insert, row | limits)
        check = partial(versions.check_holdings, connection, tenant_id, "bot", manifest("b"))
        await check()
        await check(800)
        await check(None)
        if limits == {"adapter_bytes": 800}:
            await check(799)
        else:
            with pytest.raises(Conflict) as caught:
                await check(799)
            told = {"limit": "adapter_bytes", "allowed": 799, "used": 400, "asked": 400}
            assert caught.value.details == told


def test_the_share_is_of_the_store_s_disk(tmp_path: Path) -> None:
    total = shutil.disk_usage(tmp_path).total
    settings = load_settings({"data_dir": tmp_path / "later" / "still"}, {})
    assert disk_share(settings) == total // 4
    assert disk_share(load_settings({"store": "s3://bucket/x"}, {})) is None


async def test_the_share_of_a_tenant_without_a_limit_is_shown(plane: Plane, app: Litestar) -> None:
    admin: AdminPlane = app.state.admin
    admin.config = msgspec.structs.replace(CONFIG, default_adapter_bytes=800)
    acme = await plane.tenant("acme", scopes=["usage:read"])

    async def shown(client: httpx.AsyncClient, path: str) -> tuple[Any, Any]:
        quota = (await client.get(path)).json()
        return quota["adapter_bytes"], quota["use"].get("adapter_bytes", {}).get("limit")

    assert await shown(acme, "quota") == (None, 800)
    assert await shown(plane.client, "tenants/acme/quota") == (None, 800)
    table, note = await run_for_both(plane, "quota", "show", "--tenant", "acme")
    assert "no limits are set" in note and "800" in table
    for limit in (0, 9000):
        await plane.client.put("tenants/acme/quota", json={"adapter_bytes": limit})
        assert await shown(acme, "quota") == (limit, limit)
    await plane.client.delete("tenants/acme/quota")
    assert await shown(acme, "quota") == (None, 800)
    admin.config = CONFIG
    assert await shown(acme, "quota") == (None, None)
