"""Keys over real HTTP: what they are limited to, how they are replaced, what each route asks."""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime, timedelta

import pytest

from admin.keys.keys import create_key
from admin.keys.lookup import KeyLookup
from admin.tenants.tenants import create_tenant, delete_tenant
from store.database import Database
from store.key_uses import KeyUses
from store.queries import sql
from store.records import TENANT_SCOPES, Tenant
from tests.admin.calls import ABSENT, ROUTES
from tests.admin.conftest import PEPPER, Plane
from tests.admin.http.test_routes import problem

RIGHTS = {
    "name": "ci",
    "scopes": ["inference"],
    "models": ["bot@staging", "bot@prod", "tiny"],
    "cidrs": ["127.0.0.0/8", "::1"],
}


async def test_each_route_refuses_no_key_and_keys_of_other_scopes(plane: Plane):
    """Whatever else is wrong with the request is said to nobody who may not make it."""
    url = plane.url.removesuffix("/admin/v1")
    tenant = await plane.tenant("acme")
    infers = plane.bearing(str((await plane.key("acme", scopes=["inference"]))["key"]))
    nobody = plane.bearing("none")
    for route in ROUTES:
        call = route.method, url + route.path.format_map(dict.fromkeys(ABSENT, "1"))
        others = route.scopes - {"admin"}
        assert route.scopes != others <= {"adapters:write"} or others == {"usage:read"}, route.name
        problem(await nobody.request(*call), 401)
        assert problem(await infers.request(*call), 403)["type"] == "permission_error"
        if route.scopes == {"admin"}:
            problem(await tenant.request(*call), 403)


async def test_a_key_bears_what_it_is_limited_to(plane: Plane):
    await plane.client.post("tenants", json={"name": "acme"})
    start = datetime.now(UTC) + timedelta(hours=1)
    limits = {
        "not_before": start.isoformat(),
        "expires_at": (start + timedelta(days=1)).isoformat(),
    }
    made = await plane.key("acme", **RIGHTS, **limits)
    record = made["record"]
    assert isinstance(record, dict)
    assert record["models"] == ["bot", "bot@staging", "tiny"]
    assert record["cidrs"] == ["127.0.0.0/8", "::1/128"]
    assert (await plane.client.get(f"keys/{record['id']}")).json() == record
    problem(await plane.bearing(str(made["key"])).get("models"), 401)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("models", []),
        ("models", ["a/b"]),
        ("models", ["bot@"]),
        ("models", ["*"]),
        ("cidrs", []),
        ("cidrs", ["10.0.0.1/8"]),
        ("cidrs", ["home"]),
        ("expires_at", "2020-01-01T00:00:00Z"),
        ("not_before", "9999-01-01"),
    ],
)
async def test_limits_that_make_no_sense_are_refused(plane: Plane, field: str, value: object):
    await plane.client.post("tenants", json={"name": "acme"})
    refused = problem(await plane.client.post("tenants/acme/keys", json={field: value}), 400)
    assert field in f"{refused['param']} {refused['message']}"
    assert (await plane.client.get("tenants/acme/keys")).json()["data"] == []


async def test_a_key_is_used_from_its_networks_only(plane: Plane):
    """What a header says of the client's address counts for nothing: no proxy is trusted."""
    await plane.client.post("tenants", json={"name": "acme"})
    here = plane.bearing(str((await plane.key("acme", cidrs=["127.0.0.0/8"]))["key"]))
    assert (await here.get("models")).status_code == 200
    away = plane.bearing(str((await plane.key("acme", cidrs=["10.0.0.0/8"]))["key"]))
    for headers in ({}, {"x-forwarded-for": "10.1.2.3"}, {"forwarded": "for=10.1.2.3"}):
        answer = await away.get("models", headers=headers)
        assert problem(answer, 403)["code"] == "ip_not_allowed"


async def test_rotation_overlaps_and_keeps_the_rights(plane: Plane):
    await plane.client.post("tenants", json={"name": "acme"})
    rights = RIGHTS | {"scopes": ["adapters:write"]}
    old = await plane.key("acme", **rights)
    old_id = old["record"]["id"]  # type: ignore[index]
    answer = await plane.client.post(f"keys/{old_id}/rotate", json={"overlap_s": 2})
    assert answer.status_code == 201, answer.text
    made = answer.json()
    kept = ("name", "scopes", "models", "cidrs", "tenant_id", "expires_at")
    assert {f: made["record"][f] for f in kept} == {f: old["record"][f] for f in kept}  # type: ignore[index]
    assert made["record"]["replaces"] == old_id
    before, after = plane.bearing(str(old["key"])), plane.bearing(made["key"])
    assert (await after.get("models")).status_code == 200
    ends = datetime.fromisoformat((await plane.client.get(f"keys/{old_id}")).json()["expires_at"])
    assert ends < datetime.now(UTC) + timedelta(seconds=3)
    await asyncio.sleep((ends - datetime.now(UTC)).total_seconds() + 0.05)
    problem(await before.get("models"), 401)
    assert (await after.get("models")).status_code == 200
    assert problem(await plane.client.post(f"keys/{old_id}/rotate", json={}), 409)
    problem(await plane.client.post("keys/nokeyofthis1/rotate", json={}), 404)


async def test_rotation_without_overlap_does_not_prolong(plane: Plane):
    await plane.client.post("tenants", json={"name": "acme"})
    end = (datetime.now(UTC) + timedelta(minutes=1)).isoformat()
    old = await plane.key("acme", expires_at=end)
    old_id = old["record"]["id"]  # type: ignore[index]
    long = {"overlap_s": 86400}
    kept = (await plane.client.post(f"keys/{old_id}/rotate", json=long)).json()["record"]
    assert datetime.fromisoformat(kept["expires_at"]) == datetime.fromisoformat(end)
    shown = (await plane.client.get(f"keys/{old_id}")).json()
    assert datetime.fromisoformat(shown["expires_at"]) == datetime.fromisoformat(end)
    await plane.client.post(f"keys/{old_id}/rotate", json={"overlap_s": 0})
    problem(await plane.bearing(str(old["key"])).get("models"), 401)


async def test_the_last_use_is_written_once_a_minute(plane: Plane):
    made = await plane.key((await plane.client.post("tenants", json={"name": "a"})).json()["id"])
    key_id = made["record"]["id"]  # type: ignore[index]

    async def written() -> str | None:
        uses = KeyUses()
        uses.note(key_id)
        uses.note("nokeyofthis1")
        await uses.write(plane.database)
        return (await plane.client.get(f"keys/{key_id}")).json()["last_used_at"]

    first = await written()
    assert first is not None and await written() == first
    async with plane.database.acquire() as connection:
        await connection.execute("UPDATE key_uses SET last_used_at = now() - interval '61 s'")
    assert str(await written()) > first


async def test_a_key_is_told_when_gateways_know_it(plane: Plane, database: Database) -> None:
    """One gateway is behind; the answer waits until it has caught up."""

    async def report(generation: int) -> None:
        async with database.acquire() as connection:
            await connection.execute(sql["gateway_report"], "g", generation, {})

    await report(0)
    creating = asyncio.create_task(plane.client.post("keys", json={}))
    await asyncio.sleep(0.3)
    assert not creating.done()
    await report(1 << 40)
    assert (await creating).status_code == 201


async def test_the_use_of_keys_is_written_while_one_of_them_goes(database: Database) -> None:
    """With its tenant; the others' is not lost."""
    made: list[tuple[Tenant, str]] = []
    async with database.transaction() as connection:
        for name in ("acme", "globex"):
            tenant = await create_tenant(connection, name)
            key, _ = await create_key(connection, PEPPER, tenant.id, TENANT_SCOPES)
            made.append((tenant, key.id))
    uses = KeyUses()
    for _, key_id in made:
        uses.note(key_id)
    async with database.transaction() as connection:
        await delete_tenant(connection, made[0][0])
        writing = asyncio.create_task(uses.write(database))
        await asyncio.wait([writing], timeout=0.5)
    await writing
    async with database.acquire() as connection:
        written = await connection.fetch("SELECT key_id FROM key_uses")
    assert [row["key_id"] for row in written] == [made[1][1]]


async def test_a_flood_of_made_up_keys_keeps_no_valid_one_waiting(database: Database) -> None:
    async with database.transaction() as connection:
        tenant = await create_tenant(connection, "acme")
        key, _ = await create_key(connection, PEPPER, tenant.id, TENANT_SCOPES)
    lookup = KeyLookup(database)
    flood = [asyncio.create_task(lookup.find(f"{number:012}")) for number in range(20_000)]
    found = await lookup.find(key.id)
    assert found is not None and found.tenant_id == tenant.id
    assert not any(await asyncio.gather(*flood))
