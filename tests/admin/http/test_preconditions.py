"""ETag and If-Match: nobody overwrites what he has not seen."""

from __future__ import annotations

import asyncio
from typing import Any

import httpx
import pytest

from store.database import EVERYTHING
from store.key_uses import KeyUses
from tests.admin.conftest import Plane
from tests.admin.http.test_routes import problem
from tests.admin.lifecycle import make_ready

PRICE = {"input": "1", "output": "2"}
RESOURCES: dict[str, tuple[str, Any, Any]] = {
    # How it is changed, and by which bodies in turn.
    "tenants/acme": ("PATCH", {"sharing_group": "a"}, {"sharing_group": "b"}),
    "models/tiny": ("PATCH", {"max_model_len": 64}, {"max_model_len": 65}),
    "tenants/acme/quota": ("PUT", {"requests_per_minute": 5}, {"requests_per_minute": 6}),
    "prices/tiny": ("PUT", PRICE | {"output": "3"}, PRICE | {"output": "4"}),
    "adapters/bot/aliases/prod": ("PUT", {"version": 2}, {"version": 3}),
    "keys": ("DELETE", None, None),
}


class Resource:
    """One of each kind, with requests to it."""

    def __init__(self, client: httpx.AsyncClient, kind: str, path: str) -> None:
        self.method, *self.bodies = RESOURCES[kind]
        self._client = client
        self._path = path

    async def request(self, method: str, body: Any = None, **headers: str) -> httpx.Response:
        sent = {name.replace("_", "-"): value for name, value in headers.items()}
        return await self._client.request(method, self._path, json=body, headers=sent)

    async def etag(self) -> str:
        answer = await self.request("GET")
        assert answer.status_code == 200, answer.text
        return answer.headers["etag"]


@pytest.fixture(params=RESOURCES)
async def resource(request: pytest.FixtureRequest, plane: Plane, base: str) -> Resource:
    kind, client = request.param, plane.client
    acme = await plane.tenant("acme")
    async with plane.database.transaction(EVERYTHING) as connection:
        tenant_id = await connection.fetchval("SELECT id FROM tenants")
        await make_ready(connection, tenant_id, "a", "b", "c")
    assert (await client.put("prices/tiny", json=PRICE)).status_code == 200
    path = kind
    if kind == "keys":
        path = f"keys/{(await plane.key('acme'))['record']['id']}"  # type: ignore[index]
    return Resource(acme if kind.startswith("adapters") else client, kind, path)


async def test_a_change_wants_what_was_seen(resource: Resource):
    first = await resource.etag()
    assert first == await resource.etag() and first.startswith('"')
    for stale in ('"nothing"', f"W/{first}", '"a", "b"'):
        refused = await resource.request(resource.method, resource.bodies[0], if_match=stale)
        assert problem(refused, 412)["code"] == "precondition_failed"
    assert await resource.etag() == first, "a refusal changes nothing"
    changed = await resource.request(
        resource.method, resource.bodies[0], if_match=f'"other", {first}'
    )
    assert changed.status_code == 200, changed.text
    second = await resource.etag()
    assert second != first and changed.headers["etag"] == second
    problem(await resource.request(resource.method, resource.bodies[1], if_match=first), 412)
    last = await resource.request(resource.method, resource.bodies[1], if_match="*")
    assert last.status_code == 200


async def test_nobody_comes_between(resource: Resource):
    """Of many with the same ETag one changes it."""
    # As many connections to the database as requests: they go in step.
    (seen,) = set(await asyncio.gather(*(resource.etag() for _ in range(10))))
    answers = await asyncio.gather(
        *(resource.request(resource.method, body, if_match=seen) for body in resource.bodies * 5)
    )
    assert sorted(answer.status_code for answer in answers) == [200] + [412] * 9


async def test_a_deletion_wants_it_too(resource: Resource):
    refused = await resource.request("DELETE", if_match='"nothing"')
    problem(refused, 412)
    for unread in ("nothing", '"', "", "*, *", '"a" "b"'):
        refused = await resource.request("DELETE", if_match=unread)
        assert problem(refused, 400)["param"] == "If-Match"
    await resource.etag()


async def test_the_use_of_a_key_is_no_change(plane: Plane):
    await plane.client.post("tenants", json={"name": "acme"})
    path = f"keys/{(await plane.key('acme'))['record']['id']}"  # type: ignore[index]
    before = await plane.client.get(path)
    uses = KeyUses()
    uses.note(path.removeprefix("keys/"))
    await uses.write(plane.database)
    after = await plane.client.get(path)
    assert after.json()["last_used_at"] and not before.json()["last_used_at"]
    assert after.headers["etag"] == before.headers["etag"]


async def test_what_is_not_there_matches_nothing(plane: Plane, base: str):
    answer = await plane.client.put("prices/tiny", json=PRICE, headers={"if-match": "*"})
    problem(answer, 412)
    assert (await plane.client.put("prices/tiny", json=PRICE)).status_code == 200


async def test_an_undo_is_not_repeated_with_the_same_etag(plane: Plane, base: str):
    acme = await plane.tenant("acme")
    async with plane.database.transaction(EVERYTHING) as connection:
        tenant_id = await connection.fetchval("SELECT id FROM tenants")
        await make_ready(connection, tenant_id, "a", "b")
    path = "adapters/bot/aliases/prod"
    moved = await acme.put(path, json={"version": 2})
    seen = {"if-match": moved.headers["etag"]}
    assert (await acme.post(f"{path}/rollback", headers=seen)).json()["version"] == 1
    problem(await acme.post(f"{path}/rollback", headers=seen), 412)
    assert (await acme.get(path)).json()["version"] == 1
