"""Keys that gateways refuse are in the audit log, although a gateway's catalog has no revoked keys
and no request waits for the database."""

from __future__ import annotations

from contextlib import nullcontext

import httpx

from admin.audit.audit import AuditView
from admin.http.plane import AdminConfig
from admin.keys import keys
from admin.keys.schemas import KeyCreate
from gateway.http.routing import DataPlane
from loraplex.roles.forwarding import Forwarding
from loraplex.roles.management import public_app
from store.records import TENANT_SCOPES, new_key
from tests.admin.audit.test_audit import entries, verified
from tests.gateway.live import GatewayPlane, Live
from tests.gateway.pepper import PEPPER
from tests.plane import Plane
from tests.waiting import eventually


async def refusals(live: Live) -> list[AuditView]:
    assert (await verified(live.database)).broken is None
    return [entry for entry in await entries(live.database) if entry.action == "key.refuse"]


async def issue(live: Live, *scopes: str) -> str:
    rights = KeyCreate(frozenset(scopes) or TENANT_SCOPES)
    async with live.database.transaction() as connection:
        return (await keys.issue_key(connection, PEPPER, live.tenant_id, rights))[1]


async def revoke(live: Live, key: str) -> None:
    async with live.database.transaction() as connection:
        await keys.revoke_key(connection, key.split("_")[1])


async def status(plane: GatewayPlane, headers: dict[str, str], path: str = "/v1/models") -> int:
    # Without the client's own key.
    async with httpx.AsyncClient(base_url=plane.client.base_url, headers=headers) as client:
        return (await client.get(path)).status_code


def bearing(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


async def test_two_gateways_write_what_each_refused(live: Live) -> None:
    revoked, uploader = await issue(live), await issue(live, "adapters:write")
    await revoke(live, revoked)
    async with live.gateway("gateway-1") as one, live.gateway("gateway-2") as other:
        for plane in (one, other):
            assert await status(plane, bearing(revoked)) == 401
            assert await status(plane, {"x-api-key": revoked}) == 401
            assert await status(plane, bearing(uploader)) == 403
            for _ in range(20):
                assert await status(plane, bearing(new_key().text)) == 401
            assert await status(plane, {}) == 401
        assert await refusals(live) == []
        for plane in (one, other):
            await plane.gateway.refused_keys.write(live.database)
        found = await refusals(live)
        assert sorted((e.details["process"], e.object, e.details["requests"]) for e in found) == [
            (name, *each)
            for name in ("gateway-1", "gateway-2")
            for each in sorted(
                [(revoked.split("_")[1], 2), (uploader.split("_")[1], 1), ("unknown", 20)]
            )
        ]
        reasons = {entry.object: entry.details["reason"] for entry in found}
        assert set(reasons.values()) == {"revoked", "insufficient_scope", "unknown"}
        assert {entry.tenant_id for entry in found} == {live.tenant_id, None}


async def test_what_a_gateway_refused_is_written_when_it_ends(live: Live) -> None:
    for name in ("gateway-1", "gateway-2"):
        async with live.gateway(name) as plane:
            assert await status(plane, bearing(new_key().text)) == 401
    assert [e.details["process"] for e in await refusals(live)] == ["gateway-1", "gateway-2"]


async def test_the_address_is_that_behind_a_trusted_proxy(live: Live) -> None:
    async with live.gateway(trusted_proxies=["127.0.0.1"]) as plane:
        headers = {**bearing(new_key().text), "x-forwarded-for": "198.51.100.7, 203.0.113.9"}
        assert await status(plane, headers) == 401
    (entry,) = await refusals(live)
    assert entry.address == "203.0.113.9"


async def test_keys_for_metrics_and_for_loads_are_counted_too(live: Live) -> None:
    """Counts keys that the routes of other planes on a gateway refuse."""
    lacks = await issue(live, "usage:read")
    async with live.gateway() as plane:
        forwarding = Forwarding("http://127.0.0.1:1", plane.gateway, AdminConfig(pepper=PEPPER))
        data = DataPlane(plane.gateway, [], nullcontext, None)
        app = public_app(data, None, loading=forwarding.app())
        async with Plane(app) as plane, httpx.AsyncClient(base_url=plane.url) as client:
            bad = bearing(new_key().text)
            assert (await client.get("/metrics", headers=bad)).status_code == 401
            for headers, expected in ((bad, 401), (bearing(lacks), 403)):
                answer = await client.post("/v1/load_lora_adapter", headers=headers, json={})
                assert answer.status_code == expected
        await forwarding.close()
    unknown, known = sorted(await refusals(live), key=lambda entry: -entry.details["requests"])
    assert (unknown.object, unknown.details["requests"]) == ("unknown", 2)
    assert (known.object, known.details["requests"]) == (lacks.split("_")[1], 1)


async def test_a_key_that_cannot_be_looked_up_is_not_counted(live: Live) -> None:
    """It gets 503 `key_unconfirmed`, because it may be valid."""
    async with live.gateway() as plane:
        async with live.postgres_away():
            await eventually(lambda: plane.gateway.catalog.unconfirmed_s > 0)
            assert await status(plane, bearing(new_key().text)) == 503
        await eventually(lambda: plane.gateway.catalog.unconfirmed_s == 0)
    assert await refusals(live) == []
