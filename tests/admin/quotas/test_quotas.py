"""Quotas over real HTTP: set, seen with their use, and kept by uploads."""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from pathlib import Path
from typing import Any

import httpx
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from store.database import Connection
from store.queries import catalog_generation, load_catalog, sql
from tests.adapters.files import write_adapter
from tests.admin.audit.test_audit import entries
from tests.admin.conftest import Plane
from tests.admin.http.test_routes import problem
from tests.admin.lifecycle import MANIFEST, make_ready, prove_all, report
from tests.admin.uploads.test_upload import push
from tests.admin.usage.test_usage import load, row
from tests.scale import scaled

MOST = 9_000_000 * 10**12
KEY_LIMITS: dict[str, Any] = {
    "requests_per_minute": 60,
    "tokens_per_minute": 10_000,
    "concurrent_requests": 0,
    "tokens_per_day": 1_000_000,
    "tokens_per_month": 1 << 50,
    "spend_per_day": "12.50",
    "spend_per_month": "300.00",
}
TENANT_LIMITS = KEY_LIMITS | {
    "adapters": 3,
    "adapter_bytes": 1 << 30,
    "cached_weight": 25,
    "weight": 7,
    "class": "interactive",
    "pin_bytes": 1 << 20,
}
NO_LIMITS: dict[str, Any] = dict.fromkeys(TENANT_LIMITS) | {
    "cached_weight": 100,
    "weight": 1,
    "class": "standard",
    "pin_bytes": 0,
}
PATHS = ("tenants/acme/quota", "keys/{key}/quota")


async def own_id(plane: Plane, client: httpx.AsyncClient) -> tuple[str, str]:
    """Of the tenant and the key that the client bears."""
    key_id = client.headers["authorization"].split("_")[1]
    return (await plane.client.get(f"keys/{key_id}")).json()["tenant_id"], key_id


async def actions(plane: Plane, subject: str) -> list[str]:
    found = [entry.action for entry in await entries(plane.database) if entry.object == subject]
    return [action for action in found if action.startswith("quota.")]


def limits_in(view: dict[str, Any], names: dict[str, Any]) -> dict[str, Any]:
    assert view.keys() - {"use", "updated_at", "object"} == names.keys()
    return {name: view[name] for name in names}


@pytest.mark.parametrize(
    ("path", "limits"), [(PATHS[0], TENANT_LIMITS), (PATHS[1], KEY_LIMITS)], ids=["tenant", "key"]
)
async def test_a_quota_is_set_as_a_whole_and_cleared(
    plane: Plane, path: str, limits: dict[str, Any]
):
    tenant_id, key_id = await own_id(plane, await plane.tenant("acme"))
    path, subject = path.format(key=key_id), key_id if "key" in path else tenant_id
    none = {name: NO_LIMITS[name] for name in limits}

    async def generation() -> int:
        async with plane.database.acquire() as connection:
            return await catalog_generation(connection)

    first = (await plane.client.get(path)).json()
    assert limits_in(first, limits) == none and first["updated_at"] is None
    before = await generation()
    answer = await plane.client.put(path, json=limits)
    assert answer.status_code == 200, answer.text
    made = answer.json()
    assert limits_in(made, limits) == limits
    assert set(made["use"]) == set(limits) - {"cached_weight", "weight", "class"}
    assert (await plane.client.get(path)).json() == made
    assert await generation() > before
    async with plane.database.acquire() as connection:
        (quota,) = (await load_catalog(connection)).quotas
    assert (quota.subject, quota.requests_per_minute) == (subject, 60)
    assert (quota.concurrent_requests, quota.spend_per_day) == (0, 12_500_000_000_000)

    less = {"tokens_per_day": 5}
    assert limits_in((await plane.client.put(path, json=less)).json(), limits) == none | less
    before = await generation()
    assert (await plane.client.delete(path)).json()["id"] == subject
    assert await generation() > before
    assert limits_in((await plane.client.get(path)).json(), limits) == none
    assert (await plane.client.delete(path)).status_code == 200
    assert await actions(plane, subject) == ["quota.create", "quota.update", "quota.delete"]


@pytest.mark.parametrize(
    ("limits", "named"),
    [
        ({"requests_per_second": 1}, "requests_per_second"),
        ({"requests_per_minute": -1}, "requests_per_minute"),
        ({"tokens_per_day": 1.5}, "tokens_per_day"),
        ({"tokens_per_minute": "10"}, "tokens_per_minute"),
        ({"concurrent_requests": 1 << 60}, "concurrent_requests"),
        ({"spend_per_day": "0.0000000000001"}, "spend_per_day"),
        ({"spend_per_day": -1}, "spend_per_day"),
        ({"spend_per_month": "9000000.000000000001"}, "spend_per_month"),
        ({"spend_per_month": 1e300}, "spend_per_month"),
        ({"spend_per_month": "1e-999999999"}, "spend_per_month"),
        ({"spend_per_month": "NaN"}, "spend_per_month"),
        ({"spend_per_month": "much"}, "spend_per_month"),
        ({"spend_per_month": "1_0"}, "spend_per_month"),
        ({"spend_per_day": " 1"}, "spend_per_day"),
        ({"spend_per_day": "\u0661"}, "spend_per_day"),
        ({"spend_per_month": True}, "spend_per_month"),
        ({"cached_weight": 101}, "cached_weight"),
        ({"weight": 0}, "weight"),
        ({"weight": 1001}, "weight"),
        ({"class": "urgent"}, "class"),
        ({"service_class": "batch"}, "service_class"),
        ({"pin_bytes": None}, "pin_bytes"),
    ],
)
async def test_limits_that_make_no_sense_are_refused_by_name(
    plane: Plane, limits: dict[str, Any], named: str
):
    _, key_id = await own_id(plane, await plane.tenant("acme"))
    for path in PATHS:
        refused = problem(await plane.client.put(path.format(key=key_id), json=limits), 400)
        assert named in f"{refused['param']} {refused['message']}"
    assert limits_in((await plane.client.get("tenants/acme/quota")).json(), NO_LIMITS) == NO_LIMITS


@pytest.mark.parametrize("name", sorted(TENANT_LIMITS.keys() - KEY_LIMITS.keys()))
async def test_what_a_tenant_has_is_no_limit_of_its_keys(plane: Plane, name: str):
    _, key_id = await own_id(plane, await plane.tenant("acme"))
    refused = await plane.client.put(f"keys/{key_id}/quota", json={name: 1})
    assert name in str(problem(refused, 400)["message"])


async def test_whose_quota_there_is_none(plane: Plane):
    admin_key = plane.client.headers["authorization"].split("_")[1]
    for method in ("GET", "PUT", "DELETE"):
        body = {} if method == "PUT" else None
        refused = await plane.client.request(method, f"keys/{admin_key}/quota", json=body)
        assert problem(refused, 400)["code"] == "admin_key"


async def test_a_tenant_sees_its_own_and_changes_nothing(plane: Plane):
    reads, globex = await plane.tenant("acme", scopes=["usage:read"]), await plane.tenant("globex")
    other = plane.bearing(str((await plane.key("acme"))["key"]))
    blind = plane.bearing(str((await plane.key("acme", scopes=["inference"]))["key"]))
    tenant_id, key_id = await own_id(plane, reads)
    _, other_id = await own_id(plane, other)
    globex_id, foreign_id = await own_id(plane, globex)
    own = ("tenants/acme/quota", f"tenants/{tenant_id}/quota", f"keys/{key_id}/quota")
    await plane.client.put(own[0], json={"tokens_per_day": 100, "spend_per_month": 7})
    await plane.client.put(own[2], json={"tokens_per_day": 10})
    for client in (plane.client, reads):
        shown = [(await client.get(path)).json() for path in own]
        assert [view["tokens_per_day"] for view in shown] == [100, 100, 10]
        assert shown[0]["use"]["spend_per_month"]["left"] == "7.00"
    theirs = (f"tenants/{globex_id}/quota", "tenants/globex/quota", "tenants/nobody/quota")
    for path in (*theirs, f"keys/{other_id}/quota", f"keys/{foreign_id}/quota", "keys/x/quota"):
        body = problem(await reads.get(path), 404)
        assert str(body["message"]).endswith(f"{path.split('/')[1]!r}")
    for path in own:
        problem(await blind.get(path), 403)
        problem(await reads.put(path, json={}), 403)
        problem(await reads.delete(path), 403)
    assert (await plane.client.get(own[2])).json()["tokens_per_day"] == 10


async def test_a_rotated_key_shares_the_limits_of_its_first(plane: Plane):
    _, old = await own_id(plane, await plane.tenant("acme"))
    assert (await plane.client.put(f"keys/{old}/quota", json=KEY_LIMITS)).status_code == 200
    made = (await plane.client.post(f"keys/{old}/rotate", json={})).json()["record"]["id"]
    for key in (old, made):
        view = (await plane.client.get(f"keys/{key}/quota")).json()
        assert {name: view[name] for name in KEY_LIMITS} == KEY_LIMITS
    changed = await plane.client.put(f"keys/{made}/quota", json={"tokens_per_day": 5})
    assert changed.json() == (await plane.client.get(f"keys/{old}/quota")).json()
    assert changed.json()["tokens_per_day"] == 5
    assert await actions(plane, old) == ["quota.create", "quota.update"]
    assert await actions(plane, made) == []


async def test_only_what_the_caller_saw_is_changed(plane: Plane):
    _, key_id = await own_id(plane, await plane.tenant("acme"))
    for path in (path.format(key=key_id) for path in PATHS):
        none = (await plane.client.get(path)).headers["etag"]
        seen = {"if-match": none}
        first = await plane.client.put(path, json={"tokens_per_day": 5}, headers=seen)
        assert first.status_code == 200 and first.headers["etag"] != none
        stale = await plane.client.put(path, json={"tokens_per_day": 6}, headers=seen)
        assert problem(stale, 412)["code"] == "precondition_failed"
        problem(await plane.client.delete(path, headers=seen), 412)
        shown = await plane.client.get(path)
        assert (shown.json()["tokens_per_day"], shown.headers["etag"]) == (5, first.headers["etag"])
        seen = {"if-match": first.headers["etag"]}
        assert (await plane.client.delete(path, headers=seen)).status_code == 200


DOLLARS = st.one_of(
    st.integers(0, MOST),
    st.integers(0, 9_000_000).map(lambda dollars: dollars * 10**12),
    st.integers(0, 10**9).map(lambda cents: min(cents * 10**10, MOST)),
)


@settings(
    max_examples=scaled(30, 500),
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(pico=DOLLARS, as_number=st.booleans(), exponent=st.booleans())
async def test_dollars_are_exact(plane: Plane, pico: int, as_number: bool, exponent: bool):
    """As text and as JSON numbers of any length, with an exponent or without."""
    if (await plane.client.get("tenants/acme")).status_code == 404:
        await plane.client.post("tenants", json={"name": "acme"})
    dollars = Decimal(pico).scaleb(-12)
    text = f"{dollars:e}" if exponent else f"{dollars:f}"
    body = f'{{"spend_per_day": {text if as_number else chr(34) + text + chr(34)}}}'
    answer = await plane.client.put("tenants/acme/quota", content=body)
    assert answer.status_code == 200, answer.text
    shown = answer.json()
    assert isinstance(shown["spend_per_day"], str)
    assert Decimal(shown["spend_per_day"]) == dollars
    assert Decimal(shown["use"]["spend_per_day"]["left"]) == dollars
    async with plane.database.acquire() as connection:
        assert await connection.fetchval("SELECT spend_per_day FROM quotas") == pico
    again = await plane.client.put(
        "tenants/acme/quota", json={"spend_per_day": shown["spend_per_day"]}
    )
    assert again.json()["spend_per_day"] == shown["spend_per_day"]


async def lease(
    connection: Connection, number: int, subject: str, start: str, kind: str, need: int
) -> int:
    """What gateway-1 is granted in its exchange of that number."""
    ask = {"subject": subject, "kind": kind, "start": start, "need": need, "want": need}
    ask |= {"taken": 0, "returned": 0, "answered": 0, "call": 0}
    (answer,) = await connection.fetchval(sql["quota_exchange"], "gateway-1", number, 60.0, [ask])
    assert answer["granted"] >= need
    return answer["granted"]


async def test_what_is_used_held_and_left(plane: Plane):
    """Of the windows that are open now; what is loaded leaves what its gateway holds."""
    acme = await plane.tenant("acme")
    tenant_id, key_id = await own_id(plane, acme)
    limits = {
        "requests_per_minute": 60,
        "concurrent_requests": 10,
        "tokens_per_day": 1000,
        "tokens_per_month": 100,
        "spend_per_day": "1",
    }
    await plane.client.put("tenants/acme/quota", json=limits)
    await plane.client.put(f"keys/{key_id}/quota", json={"tokens_per_day": 1000})
    now = datetime.now(UTC)
    midnight = now.replace(hour=0, minute=0, second=0, microsecond=0)
    minute, month = now.replace(second=0, microsecond=0), midnight.replace(day=1)
    asks = [
        (minute.isoformat(), "requests_per_minute", 2),
        ("-infinity", "concurrent_requests", 3),
        (midnight.isoformat(), "tokens_per_day", 100),
        (month.isoformat(), "tokens_per_month", 50),
        (midnight.isoformat(), "spend_per_day", 10**11),
    ]
    held: dict[str, int] = {}
    async with plane.database.transaction() as connection:
        for number, (start, kind, need) in enumerate(asks, 1):
            held[kind] = await lease(connection, number, tenant_id, start, kind, need)

    async def shown(path: str = "tenants/acme/quota") -> dict[str, dict[str, Any]]:
        return (await acme.get(path)).json()["use"]

    use = await shown()
    assert use["tokens_per_day"] == {
        "limit": 1000,
        "used": 0,
        "held": held["tokens_per_day"],
        "left": 1000 - held["tokens_per_day"],
        "ends_at": f"{midnight + timedelta(days=1):%Y-%m-%dT%H:%M:%SZ}",
    }
    assert use["concurrent_requests"]["held"] == held["concurrent_requests"]
    assert use["concurrent_requests"]["ends_at"] is None
    next_month = (month + timedelta(days=32)).replace(day=1)
    assert use["tokens_per_month"]["ends_at"] == f"{next_month:%Y-%m-%dT%H:%M:%SZ}"
    assert Decimal(use["spend_per_day"]["held"]) == Decimal(held["spend_per_day"]).scaleb(-12)

    charged = (1 << 0) | (1 << 1) | (1 << 2)
    of = {"tenant_id": tenant_id, "key_id": key_id, "metered_tokens": 40, "cost": 10**9}
    await load(
        plane.database,
        [
            row(1, now, **of, leased=charged),
            row(2, now - timedelta(days=40), **of, leased=0),
        ],
    )
    use = await shown()
    day = use["tokens_per_day"]
    assert (day["used"], day["held"]) == (40, held["tokens_per_day"] - 40)
    assert day["left"] == 1000 - held["tokens_per_day"]
    assert use["spend_per_day"]["used"] == "0.001"
    assert (await shown(f"keys/{key_id}/quota"))["tokens_per_day"]["used"] == 40
    await load(plane.database, [row(3, now, **of | {"metered_tokens": 500})])
    assert (await shown())["tokens_per_month"]["left"] == 0


async def test_pins_are_part_of_the_quota(plane: Plane, base: str):
    acme = await plane.tenant("acme")
    async with plane.database.transaction() as connection:
        tenant_id = await connection.fetchval("SELECT id FROM tenants")
        await make_ready(connection, tenant_id, "a", "b")
    pin, quota = "adapters/bot/aliases/prod/pin", "tenants/acme/quota"
    for client in (acme, plane.client):
        refused = await client.put(pin, params={"tenant": "acme"})
        assert problem(refused, 409)["code"] == "pin_quota"
    await plane.client.put(quota, json={"pin_bytes": MANIFEST.file_bytes, "adapters": 9})
    assert (await acme.put(pin)).json()["pinned"] is True
    use = (await acme.get(quota)).json()["use"]
    assert use["pin_bytes"]["left"] == 0 and use["pin_bytes"]["used"] == MANIFEST.file_bytes
    assert (use["adapters"]["used"], use["adapters"]["left"]) == (1, 8)
    for lowered in ({"pin_bytes": 1}, {}):
        refused = await plane.client.put(quota, json=lowered)
        assert problem(refused, 409)["code"] == "pin_quota"
    assert problem(await plane.client.delete(quota), 409)["code"] == "pin_quota"
    assert (await plane.client.get(quota)).json()["adapters"] == 9
    assert (await acme.delete(pin)).json()["pinned"] is False
    assert (await plane.client.delete(quota)).status_code == 200
    assert (await plane.client.get(quota)).json()["pin_bytes"] == 0


async def size_of(plane: Plane, tenant: str = "acme") -> int:
    await plane.client.put(f"tenants/{tenant}/quota", json={"adapter_bytes": 0})
    shown = (await plane.client.get(f"tenants/{tenant}/quota")).json()
    return shown["use"]["adapter_bytes"]["used"]


@pytest.fixture
def folders(tmp_path: Path) -> list[Path]:
    """Adapters of one size and different contents."""
    made = [tmp_path / f"adapter-{seed}" for seed in range(4)]
    for seed, folder in enumerate(made):
        write_adapter(folder, seed=seed)
    return made


async def test_uploads_keep_the_number_of_adapters(plane: Plane, base: str, folders: list[Path]):
    acme, globex = await plane.tenant("acme"), await plane.tenant("globex")
    await plane.client.put("tenants/acme/quota", json={"adapters": 1})
    assert (await push(acme, folders[0], name="bot")).status_code == 201
    stored = plane.files()
    refused = problem(await push(acme, folders[1], name="notes"), 409)
    assert (refused["code"], refused["param"]) == ("adapter_quota_exceeded", "adapters")
    told = {name: refused[name] for name in ("limit", "allowed", "used", "asked")}
    assert told == {"limit": "adapters", "allowed": 1, "used": 1, "asked": 1}
    assert plane.files() == stored
    assert problem(await acme.get("adapters/notes"), 404)
    assert (await push(acme, folders[1], name="bot")).json()["version"] == 2
    assert (await push(globex, folders[1], name="notes")).status_code == 201
    await plane.client.put("tenants/acme/quota", json={"adapters": 0})
    assert (await push(acme, folders[2], name="bot")).json()["version"] == 3
    assert (await acme.delete("adapters/bot")).status_code == 200
    assert problem(await push(acme, folders[0], name="bot"), 409)["used"] == 0
    await plane.client.put("tenants/acme/quota", json={"adapters": 1})
    assert (await push(acme, folders[0], name="notes")).status_code == 201


async def test_uploads_keep_the_bytes_of_adapters(plane: Plane, base: str, folders: list[Path]):
    """Each content once, whatever the names it has; what is retired counts no more, though requests
    may still have it."""
    acme = await plane.tenant("acme")
    tenant_id, _ = await own_id(plane, acme)
    assert (await push(acme, folders[0], name="bot")).status_code == 201
    size = await size_of(plane)
    assert size > 1000
    await plane.client.put("tenants/acme/quota", json={"adapter_bytes": 2 * size - 1})
    assert (await push(acme, folders[0], name="again")).status_code == 201
    stored = plane.files()
    refused = problem(await push(acme, folders[1], name="bot"), 409)
    assert (refused["code"], refused["limit"]) == ("adapter_quota_exceeded", "adapter_bytes")
    assert (refused["allowed"], refused["used"], refused["asked"]) == (2 * size - 1, size, size)
    assert plane.files() == stored
    await plane.client.put("tenants/acme/quota", json={"adapter_bytes": 2 * size})
    assert (await push(acme, folders[1], name="bot")).status_code == 201
    assert problem(await push(acme, folders[2], name="bot"), 409)["used"] == 2 * size
    await prove_all(plane.database)
    async with plane.database.acquire() as connection:
        await report(connection, "gateway-1", 1 << 40, {f"{tenant_id}/bot/2": 1})
    assert (await acme.delete("adapters/bot/versions/2")).json()["in_flight"] == 1
    assert len(plane.files()) == 2
    assert (await push(acme, folders[2], name="bot")).status_code == 201
    shown = (await acme.get("tenants/acme/quota")).json()
    assert shown["use"]["adapter_bytes"]["left"] == 0


async def test_two_uploads_at_once_do_not_both_take_the_last_place(
    plane: Plane, base: str, folders: list[Path]
):
    for round_, limits in enumerate(({"adapters": 1}, {"adapter_bytes": 10_000_000})):
        tenant = f"tenant-{round_}"
        client = await plane.tenant(tenant)
        if "adapter_bytes" in limits:
            await push(client, folders[0], name="first")
            limits = {"adapter_bytes": 2 * await size_of(plane, tenant)}
        await plane.client.put(f"tenants/{tenant}/quota", json=limits)
        answers = await asyncio.gather(
            *(push(client, folder, name=f"bot-{i}") for i, folder in enumerate(folders[1:]))
        )
        assert sorted(answer.status_code for answer in answers) == [201, 409, 409]
        kept = next(answer.json()["digest"] for answer in answers if answer.is_success)
        assert kept in plane.files()
        assert len((await client.get("adapters")).json()["data"]) == 1 + round_
    assert len(plane.files()) <= 3
