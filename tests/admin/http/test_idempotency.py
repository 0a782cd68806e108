"""Creates with the header Idempotency-Key: once, whoever repeats them and whenever."""

from __future__ import annotations

import asyncio
from datetime import timedelta
from pathlib import Path
from typing import Any

import httpx
import pytest

from admin import idempotency
from store.database import EVERYTHING, Database
from tests.admin.calls import ROUTES
from tests.admin.conftest import Plane, write_model
from tests.admin.dump import dump
from tests.admin.http.test_routes import problem
from tests.admin.recorded import recorder
from tests.admin.serve import PATH, admin_key, admin_process

HEADER = {"idempotency-key": "0b5f1c9e-7d3a-4c55-9a53-0d6a5c8b2e11"}


async def post(
    client: httpx.AsyncClient, path: str, body: Any, header: dict[str, str] = HEADER
) -> httpx.Response:
    return await client.post(path, json=body, headers=header)


def is_replay(answer: httpx.Response) -> bool:
    return answer.headers.get("idempotent-replayed") == "true"


async def count(plane: Plane, table: str) -> int:
    async with plane.database.transaction(EVERYTHING) as connection:
        return await connection.fetchval(f"SELECT count(*) FROM {table}")


async def test_the_same_again_is_answered_as_the_first_time(tmp_path: Path):
    async with recorder(tmp_path) as made:
        admin = made.callers["administrator"]
        for route in ROUTES:
            if not route.takes("header", "Idempotency-Key"):
                continue
            async with made.copy() as plane:
                path, arguments = route.request(made.furnished.values, is_named=True)

                async def create(path: str = path, arguments: Any = arguments) -> httpx.Response:
                    return await admin.post(made.url + path, headers=HEADER, **arguments)

                before = await dump(plane.database, but=("key_uses",))
                first = await create()
                after = await dump(plane.database, but=("key_uses",))
                assert first.status_code == 201 and not is_replay(first) and before != after
                for _ in range(2):
                    again = await create()
                    assert is_replay(again) and again.content == first.content
                assert await dump(plane.database, but=("key_uses",)) == after
                if text := first.json().get("key"):
                    bears = {"authorization": f"Bearer {text}"}
                    known = await admin.get(f"{made.url}/admin/v1/models", headers=bears)
                    # A key that may only infer is refused with 403.
                    assert known.status_code in (200, 403)


async def test_another_request_with_the_same_header_is_refused(plane: Plane):
    assert (await post(plane.client, "tenants", {"name": "acme"})).status_code == 201
    for path, body in [
        ("tenants", {"name": "globex"}),
        ("tenants", {"name": "acme", "sharing_group": "g"}),
        ("tenants/acme/keys", {}),
        ("tenants?", {"name": "acme"}),
    ]:
        refused = await post(plane.client, path, body)
        if path.endswith("?"):
            assert is_replay(refused)
            continue
        assert problem(refused, 422)["code"] == "idempotency_key_reused"
        assert refused.headers["x-should-retry"] == "false"
    assert await count(plane, "tenants") == 1


async def test_a_header_belongs_to_who_sends_it(plane: Plane):
    without = await plane.client.post("keys", json={})
    assert without.status_code == 201 and not is_replay(without)
    other = plane.bearing(without.json()["key"])
    assert (await post(plane.client, "tenants", {"name": "acme"})).status_code == 201
    assert problem(await post(other, "tenants", {"name": "acme"}), 409)["code"] == "already_exists"
    assert (await post(other, "tenants", {"name": "globex"})).status_code == 201


async def test_a_refusal_leaves_the_header_free(plane: Plane):
    problem(await post(plane.client, "tenants", {"name": "a/b"}), 400)
    problem(await post(plane.client, "tenants", {"name": "ten_x"}), 400)
    made = await post(plane.client, "tenants", {"name": "acme"})
    assert made.status_code == 201 and not is_replay(made)
    assert await count(plane, "idempotent_requests") == 1


async def test_of_twins_one_is_done(plane: Plane):
    await plane.client.post("tenants", json={"name": "acme"})
    answers = await asyncio.gather(
        *(post(plane.client, "tenants/acme/keys", {"name": "ci"}) for _ in range(12))
    )
    assert {answer.status_code for answer in answers} == {201}
    assert len({answer.content for answer in answers}) == 1
    assert sum(not is_replay(answer) for answer in answers) == 1
    assert await count(plane, "api_keys") == 2


@pytest.mark.parametrize("header", ["", "x" * 256, "a b", "é", "tab\there"])
async def test_a_header_of_another_form_is_refused(plane: Plane, header: str):
    sent = {"idempotency-key": header.encode("utf-8")}
    answer = await plane.client.post("tenants", json={"name": "acme"}, headers=sent)
    problem(answer, 400)
    assert await count(plane, "tenants") == 0


async def test_the_database_never_holds_a_secret(plane: Plane):
    """Neither the new key's text nor the header from which it could be made again."""
    await plane.client.post("tenants", json={"name": "acme"})
    made = (await post(plane.client, "tenants/acme/keys", {})).json()
    rotated = (
        await post(
            plane.client,
            f"keys/{made['record']['id']}/rotate",
            {},
            {"idempotency-key": "another-one"},
        )
    ).json()
    held = "\n".join(row for rows in (await dump(plane.database)).values() for row in rows)
    assert made["record"]["id"] in held, "the search finds what is there"
    for text in (made["key"], rotated["key"]):
        secret = text.split("_")[2]
        for part in (secret, secret[:43], secret[:20]):
            assert part not in held and part.encode().hex() not in held
    for header in (HEADER["idempotency-key"], "another-one"):
        assert header not in held and header.encode().hex() not in held


async def test_a_day_later_it_is_forgotten(plane: Plane):
    first = (await post(plane.client, "keys", {})).json()
    async with plane.database.transaction(EVERYTHING) as connection:
        await connection.execute(
            "UPDATE idempotent_requests SET created_at = now() - $1::interval",
            idempotency.KEPT - timedelta(minutes=1),
        )
    await idempotency.forget(plane.database)
    assert (await post(plane.client, "keys", {})).json() == first
    async with plane.database.transaction(EVERYTHING) as connection:
        await connection.execute(
            "UPDATE idempotent_requests SET created_at = now() - $1::interval",
            idempotency.KEPT + timedelta(seconds=1),
        )
    await idempotency.forget(plane.database)
    again = await post(plane.client, "keys", {})
    assert not is_replay(again) and again.json()["key"] != first["key"]


@pytest.mark.full
async def test_a_crash_leaves_both_or_neither(dsn: str, tmp_path: Path):
    """A plane that dies amid creates: each header has its tenant or none, and may be sent again."""
    write_model(tmp_path / "store", "b" * 64)
    database = await Database.connect(dsn, sees=EVERYTHING)
    process = admin_process(tmp_path, dsn, tmp_path / "store")
    await process.start()
    names = [f"t{number}" for number in range(200)]

    async def create(client: httpx.AsyncClient, name: str) -> httpx.Response:
        return await post(client, "tenants", {"name": name}, {"idempotency-key": name})

    async with process.new_client(await admin_key(database), PATH) as client:
        tasks = [asyncio.create_task(create(client, name)) for name in names]
        await asyncio.gather(*tasks[:20])
        await process.kill()
        await asyncio.gather(*tasks, return_exceptions=True)
    async with database.acquire() as connection:
        made = await connection.fetchval("SELECT count(*) FROM tenants")
        kept = await connection.fetchval("SELECT count(answer) FROM idempotent_requests")
    assert 20 <= made == kept < len(names)
    await database.close()
