"""The admin plane without its database: a clear refusal soon, nothing half done, and back by
itself; and made-up keys, which cannot take the database from others."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from pathlib import Path

import httpx
import pytest

from loraplex.roles.planes import ADMIN_ACQUIRE_S
from store.database import Database
from store.records import new_key
from tests.admin.serve import administration
from tests.proxy import PostgresProxy, Way, everything

SOON_S = 4.0
"""Two limits of two seconds, one after the other; ten times as much is the deadline here."""
REQUESTS = [
    ("GET", "/tenants", None),
    ("GET", "/audit", None),
    ("POST", "/tenants", {"name": "acme"}),
    ("DELETE", "/tenants/nobody", None),
]


@pytest.fixture
async def client(proxy: PostgresProxy, tmp_path: Path) -> AsyncIterator[httpx.AsyncClient]:
    """An admin's, of a plane that reaches its database through the proxy."""
    own = await Database.connect(proxy.dsn, acquire_timeout=ADMIN_ACQUIRE_S)
    async with administration(own, tmp_path / "store") as client:
        assert (await client.get("/tenants")).status_code == 200
        yield client
    proxy.reset()
    await own.close()


async def refused(client: httpx.AsyncClient, method: str, path: str, body: object) -> None:
    began = time.monotonic()
    answer = await client.request(method, path, json=body)
    assert time.monotonic() - began < 10 * SOON_S
    assert answer.status_code == 503
    assert int(answer.headers["retry-after"]) > 0
    assert answer.json()["error"] == {
        "message": "The database does not answer.",
        "type": "server_error",
        "param": None,
        "code": "database_unavailable",
    }


async def test_a_database_that_is_gone(proxy: PostgresProxy, client: httpx.AsyncClient) -> None:
    async with proxy.closed():
        for request in REQUESTS:
            await refused(client, *request)
    await _is_as_before(client)


async def test_a_database_that_hangs(proxy: PostgresProxy, client: httpx.AsyncClient) -> None:
    proxy.ways["client"] = Way(swallows=everything)
    await asyncio.gather(*(refused(client, *request) for request in REQUESTS))
    proxy.ways["client"] = Way()
    proxy.reset()
    await _is_as_before(client)


async def _is_as_before(client: httpx.AsyncClient) -> None:
    """Nothing was made, and what is asked for again is."""
    async with asyncio.timeout(60):
        while (answer := await client.get("/tenants")).status_code == 503:
            await asyncio.sleep(0.1)
    assert answer.json()["data"] == []
    assert (await client.post("/tenants", json={"name": "acme"})).status_code == 201


async def test_a_checksum_that_is_wrong_asks_nothing(
    proxy: PostgresProxy, client: httpx.AsyncClient
) -> None:
    keys = [new_key().text[:-1] + "!" for _ in range(200)]
    answers = [
        await client.get("/tenants", headers={"authorization": f"Bearer {key}"}) for key in keys
    ]
    assert {answer.status_code for answer in answers} == {401}
    assert not [key for key in keys if key.split("_")[1].encode() in proxy.said]


async def test_a_flood_of_well_formed_keys_leaves_the_database_to_others(
    proxy: PostgresProxy, client: httpx.AsyncClient
) -> None:
    """Each query takes half a second: one for each key would outlast their patience."""
    proxy.set_both(Way(delay_s=0.1))

    async def ask() -> int:
        headers = {"authorization": f"Bearer {new_key().text}"}
        return (await client.get("/tenants", headers=headers)).status_code

    flood = [asyncio.create_task(ask()) for _ in range(60)]
    assert (await client.get("/tenants")).status_code == 200
    assert set(await asyncio.gather(*flood)) == {401}
    assert (await client.get("/tenants")).status_code == 200
