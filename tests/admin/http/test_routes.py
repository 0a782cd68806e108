"""The admin plane over real HTTP: who may do what, and what it answers."""

import asyncio
from datetime import UTC, datetime, timedelta
from urllib.parse import urlsplit

import httpx
import pytest

from store.database import Database
from tests.admin.conftest import Plane, write_model


def problem(answer: httpx.Response, status: int) -> dict[str, object]:
    assert answer.status_code == status, answer.text
    body = answer.json()["error"]
    assert {"message", "type", "param", "code"} <= body.keys()
    return body


async def test_a_key_is_shown_once_and_revoked_for_good(plane: Plane):
    tenant = await plane.tenant("acme")
    assert (await tenant.get("models")).status_code == 200
    listed = (await plane.client.get("tenants/acme/keys")).json()["data"]
    assert len(listed) == 1
    assert "key" not in listed[0] and "hash" not in listed[0]
    revoked = (await plane.client.delete(f"keys/{listed[0]['id']}")).json()
    assert revoked["revoked_at"]
    assert (await plane.client.delete(f"keys/{listed[0]['id']}")).json() == revoked
    assert problem(await tenant.get("models"), 401)["code"] == "invalid_api_key"
    problem(await plane.client.delete("keys/nokeyofthis1"), 404)


async def test_who_leaves_before_the_request_is_whole_is_no_error(
    plane: Plane, caplog: pytest.LogCaptureFixture
):
    place = urlsplit(plane.url)
    reader, writer = await asyncio.open_connection(place.hostname, place.port)
    key = plane.client.headers["authorization"].encode()
    writer.write(
        b"POST /admin/v1/tenants HTTP/1.1\r\nhost: x\r\ncontent-length: 100\r\n"
        b"authorization: %s\r\n\r\n{" % key
    )
    writer.write_eof()
    assert await reader.read() == b""
    writer.close()
    await plane.client.get("tenants")
    assert [each for each in caplog.records if each.levelname == "ERROR"] == []


async def test_a_change_that_another_came_between_is_worth_a_retry(plane: Plane, owner: Database):
    """Postgres ended one of two that waited for each other, here twice."""
    async with owner.transaction() as connection:
        await connection.execute("CREATE SEQUENCE tries; GRANT USAGE ON tries TO loraplex_app")
        await connection.execute(
            "CREATE FUNCTION collide() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN"
            " IF nextval('tries') < 3 THEN"
            " RAISE 'deadlock detected' USING ERRCODE = 'deadlock_detected'; END IF;"
            " RETURN NEW; END $$"
        )
        await connection.execute(
            "CREATE TRIGGER collide BEFORE INSERT ON tenants"
            " FOR EACH ROW EXECUTE FUNCTION collide()"
        )
    for _ in range(2):
        answer = await plane.client.post("tenants", json={"name": "acme"})
        assert problem(answer, 409)["code"] == "conflict"
        assert answer.headers["x-should-retry"] == "true"
    assert (await plane.client.post("tenants", json={"name": "acme"})).status_code == 201


async def test_a_key_expires(plane: Plane):
    await plane.client.post("tenants", json={"name": "acme"})
    soon = datetime.now(UTC) + timedelta(hours=1)
    key = await plane.key("acme", expires_at=soon.isoformat())
    client = plane.bearing(str(key["key"]))
    assert (await client.get("models")).status_code == 200
    async with plane.database.acquire() as connection:
        await connection.execute(
            "UPDATE api_keys SET not_before = now() - interval '2 s',"
            " expires_at = now() - interval '1 s' WHERE expires_at IS NOT NULL"
        )
    problem(await client.get("models"), 401)
    past = {"expires_at": (soon - timedelta(days=1)).isoformat()}
    refused = await plane.client.post("tenants/acme/keys", json=past)
    assert problem(refused, 400)["param"] == "expires_at"


@pytest.mark.parametrize("scopes", [["admin"], ["inference", "root"], []])
async def test_a_tenants_key_has_no_other_scopes(plane: Plane, scopes: list[str]):
    await plane.client.post("tenants", json={"name": "acme"})
    refused = await plane.client.post("tenants/acme/keys", json={"scopes": scopes})
    assert problem(refused, 400)["param"] == "scopes"


@pytest.mark.parametrize(
    "header",
    ["", "Bearer", "Bearer x", "Basic abc", "Bearer lpx_' OR 1=1 --", "Bearer lpx_" + "0" * 62],
)
async def test_what_is_no_key_is_refused(plane: Plane, header: str):
    plane.client.headers["authorization"] = header
    answer = await plane.client.get("tenants")
    assert problem(answer, 401)["type"] == "authentication_error"
    assert answer.headers["www-authenticate"] == "Bearer"


async def test_models_are_registered_by_a_digest_of_the_store(plane: Plane, base: str):
    shown = (await plane.client.get("models/tiny")).json()
    assert (shown["digest"], shown["max_model_len"]) == (base, 512)
    body = {"name": "tiny", "digest": base, "max_model_len": 64}
    assert (await plane.client.post("models", json=body)).json()["max_model_len"] == 64
    body["max_model_len"] = 513
    assert problem(await plane.client.post("models", json=body), 400)["param"] == "max_model_len"
    for digest, code in [("c" * 64, "not_in_store"), ("../../etc", "invalid"), ("", "invalid")]:
        answer = await plane.client.post("models", json={"name": "other", "digest": digest})
        assert problem(answer, 400)["code"] == code
    write_model(plane.store, "d" * 64)
    answer = await plane.client.post("models", json={"name": "tiny", "digest": "d" * 64})
    assert answer.status_code == 201
    assert len((await plane.client.get("models")).json()["data"]) == 1


@pytest.mark.parametrize("version", [0, -(2**31) - 1, 2**31 - 1, 2**31, 2**63, 10**100])
async def test_a_version_that_cannot_be_is_as_absent_as_none(plane: Plane, version: int):
    acme = await plane.tenant("acme")
    path = f"adapters/bot/versions/{version}"
    for answer in (
        await acme.get(path),
        await acme.delete(path),
        await plane.client.post(f"{path}/template/approve", params={"tenant": "acme"}),
    ):
        found = problem(answer, 404)
        assert found["message"] == f"no version {version} of adapter 'bot'"


async def test_bad_bodies_name_what_is_wrong(plane: Plane):
    answer = await plane.client.post("tenants", json={"name": "a", "color": 1})
    assert "color" in str(problem(answer, 400)["message"])
    problem(await plane.client.post("tenants", content=b"{"), 400)
    problem(await plane.client.post("tenants", json={"name": "a/b"}), 400)
    problem(await plane.client.post("tenants", json={"name": "x" * 100_000}), 413)
    problem(await plane.client.get("nothing"), 404)
    problem(await plane.client.put("tenants", json={}), 405)
    badly = await plane.client.put("adapters/bot/aliases/prod", json={"canary": {"x": 1}})
    assert problem(badly, 400)["param"] == "canary"
