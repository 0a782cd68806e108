"""ETag and If-Match: nobody overwrites what he has not seen."""

from __future__ import annotations

import asyncio
from pathlib import Path

import httpx

from store.database import EVERYTHING
from store.key_uses import KeyUses
from tests.admin.calls import ROUTES, Route
from tests.admin.conftest import Plane
from tests.admin.http.test_routes import problem
from tests.admin.lifecycle import make_ready
from tests.admin.recorded import Recorder, recorder

PRICE = {"input": "1", "output": "2"}
CONDITIONAL = [route for route in ROUTES if route.takes("header", "If-Match")]


class Subject:
    """A call of a route that takes If-Match."""

    def __init__(self, made: Recorder, route: Route) -> None:
        who = "tenant" if "adapters:write" in route.scopes else "administrator"
        self._client, self._method = made.callers[who], route.method
        path, self._arguments = route.request(made.furnished.values, is_named=False)
        self._url = made.url + path
        self._thing = (
            self._url.removesuffix("/rotate").removesuffix("/rollback").removesuffix("/pin")
        )

    async def change(self, if_match: str) -> httpx.Response:
        headers = {"if-match": if_match}
        return await self._client.request(
            self._method, self._url, headers=headers, **self._arguments
        )

    async def etag(self) -> str | None:
        """The thing's; None if there is none any more."""
        answer = await self._client.get(self._thing)
        return answer.headers["etag"] if answer.is_success else None


async def test_a_change_wants_what_was_seen(tmp_path: Path):
    async with recorder(tmp_path) as made:
        for route in CONDITIONAL:
            async with made.copy():
                subject = Subject(made, route)
                first = await subject.etag()
                assert first == await subject.etag() and first is not None and first[0] == '"'
                for stale in ('"nothing"', f"W/{first}", '"a", "b"'):
                    refused = problem(await subject.change(stale), 412)
                    assert refused["code"] == "precondition_failed"
                for unread in ("nothing", '"', "", "*, *", '"a" "b"'):
                    assert problem(await subject.change(unread), 400)["param"] == "If-Match"
                assert await subject.etag() == first, "a refusal changes nothing"
                changed = await subject.change(f'"other", {first}')
                assert changed.is_success, changed.text
                second = await subject.etag()
                assert second != first, route.name
                assert changed.headers.get("etag", second) == second
                assert (await subject.change(first)).status_code in (404, 412)


async def test_nobody_comes_between(tmp_path: Path):
    """Of many with the same ETag one changes it."""
    async with recorder(tmp_path) as made:
        for route in CONDITIONAL:
            async with made.copy():
                subject = Subject(made, route)
                seen = await subject.etag()
                assert seen is not None
                # As many connections to the database as requests: they go in step.
                answers = await asyncio.gather(*(subject.change(seen) for _ in range(10)))
                assert sum(answer.is_success for answer in answers) == 1, route.name
                assert {answer.status_code for answer in answers} <= {200, 201, 404, 412}


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
