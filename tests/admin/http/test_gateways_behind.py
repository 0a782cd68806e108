"""Every change is answered with the number of gateways that may not use it yet."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable

import httpx
import pytest

from adapters.store.folder import LocalStore
from admin.http import plane as plane_module
from admin.http.request import BEHIND
from admin.upkeep.reaper import Reaper
from store.database import Database
from store.queries import catalog_generation
from tests.admin.conftest import Plane
from tests.admin.lifecycle import make_ready, make_tenant, report

Change = Callable[[Plane, str], Awaitable[httpx.Response]]


async def revoke(plane: Plane, tenant: str) -> httpx.Response:
    made = await plane.client.post("keys", json={})
    return await plane.client.delete(f"keys/{made.json()['record']['id']}")


CHANGES: dict[str, Change] = {
    "key": revoke,
    "alias": lambda plane, tenant: plane.client.put(
        "adapters/bot/aliases/prod", params={"tenant": tenant}, json={"version": 2}
    ),
    "version": lambda plane, tenant: plane.client.delete(
        "adapters/bot/versions/2", params={"tenant": tenant}
    ),
    "adapter": lambda plane, tenant: plane.client.delete("adapters/bot", params={"tenant": tenant}),
    "quota": lambda plane, tenant: plane.client.put(
        f"tenants/{tenant}/quota", json={"requests_per_minute": 7}
    ),
    "price": lambda plane, _: plane.client.put(
        "prices/tiny", json={"input": "1", "cached_input": "1", "output": "2"}
    ),
    "tenant": lambda plane, tenant: plane.client.delete(f"tenants/{tenant}"),
}


@pytest.fixture
async def tenant(plane: Plane, database: Database, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setattr(plane_module, "KNOWN_WAIT_S", 0.2)
    monkeypatch.setattr(plane_module, "RETIREMENT_WAIT_S", 0.2)
    async with database.transaction() as connection:
        tenant_id = await make_tenant(connection)
        await make_ready(connection, tenant_id, "a", "b")
    return tenant_id


@pytest.mark.parametrize("name", CHANGES)
async def test_a_change_tells_how_many_gateways_may_not_use_it(
    plane: Plane, database: Database, tenant: str, name: str
) -> None:
    async with database.acquire() as connection:
        old = await catalog_generation(connection)
        await report(connection, "new", 1 << 40, {})
        await report(connection, "connected", old, {})
        await report(connection, "cut-off", old, {}, seconds_ago=200)
        await report(connection, "refuses", old, {}, seconds_ago=301)
    answer = await CHANGES[name](plane, tenant)
    assert answer.is_success, answer.text
    assert answer.headers[BEHIND] == "2"
    async with database.acquire() as connection:
        await report(connection, "connected", 1 << 40, {})
        await connection.execute("DELETE FROM gateways WHERE id = 'cut-off'")
    answer = await plane.client.post("tenants", json={"name": "another"})
    assert answer.headers[BEHIND] == "0"
    assert BEHIND not in (await plane.client.get("tenants")).headers


async def test_the_reaper_keeps_gateways_that_may_serve(
    plane: Plane, database: Database, tenant: str, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """But waits for none that was silent for long to delete a version."""
    reaper = Reaper(database, LocalStore(tmp_path_factory.mktemp("store")))
    async with database.acquire() as connection:
        await report(connection, "cut-off", 1, {f"{tenant}/bot/2": 1}, seconds_ago=200)
        await report(connection, "refuses", 1, {}, seconds_ago=301)
    await CHANGES["version"](plane, tenant)
    await reaper.reap()
    async with database.acquire() as connection:
        assert [r["id"] for r in await connection.fetch("SELECT id FROM gateways")] == ["cut-off"]
        assert await connection.fetchval("SELECT max(version) FROM adapter_versions") == 1


async def test_nobody_waits_for_a_gateway_that_is_cut_off(
    plane: Plane, database: Database, tenant: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(plane_module, "KNOWN_WAIT_S", 60.0)
    async with database.acquire() as connection:
        await report(connection, "cut-off", 1, {}, seconds_ago=200)
    began = time.monotonic()
    assert (await CHANGES["quota"](plane, tenant)).headers[BEHIND] == "1"
    assert time.monotonic() - began < 30
