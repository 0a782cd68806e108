"""What keys are limited to, where requests are served: models, networks, time, and made-up keys."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack
from typing import Any
from urllib.parse import urlsplit

import httpx
import pytest

from admin import keys
from admin.keys import KeyRights
from admin.records import TENANT_SCOPES, new_key
from tests.gateway.live import Live, Served, eventually
from tests.gateway.service import PEPPER
from tests.scale import scaled


async def issue(live: Live, **rights: Any) -> str:
    async with live.database.transaction() as connection:
        rights = {"scopes": TENANT_SCOPES} | rights
        made = await keys.issue_key(connection, PEPPER, live.tenant_id, KeyRights(**rights))
    return made[1]


def bearing(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


async def knows(served: Served, key: str) -> bool:
    answer = await served.client.get("/v1/models", headers=bearing(key))
    return answer.status_code != 401


NAMED = [
    ("/v1/completions", {"prompt": "Hi", "max_tokens": 1}),
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 1}),
    ("/tokenize", {"prompt": "Hi"}),
    ("/detokenize", {"tokens": [65]}),
]
UNKNOWN = "The model '{}' does not exist or you do not have access to it."
LISTS = [
    ({"bot"}, {"bot", "bot@prod", "acme/bot"}),
    ({"bot@2"}, {"bot@2"}),
    ({"bot@*"}, {"bot", "bot@prod", "acme/bot", "bot@1", "bot@2", "bot@02", "bot@staging"}),
    ({"tiny", "bot@staging"}, {"tiny", "bot@staging"}),
    ({"gone"}, set[str]()),
]
NAMES = ["tiny", "bot", "bot@prod", "acme/bot", "bot@1", "bot@2", "bot@02", "bot@staging"]


async def test_a_key_with_a_list_knows_nothing_else(live: Live) -> None:
    """On every route that takes a model's name, in the words for one that does not exist."""
    await live.make_ready("a", "b")
    async with live.database.transaction() as connection:
        await connection.execute(
            "SELECT point_alias($1, 'bot', 'staging', 2, NULL, NULL, NULL, 'promote', NULL, NULL)",
            live.tenant_id,
        )
    issued = [await issue(live, models=frozenset(listed)) for listed, _ in LISTS]
    async with live.worker, live.gateway() as served:
        for key, (_, usable) in zip(issued, LISTS, strict=True):
            await eventually(lambda key=key: knows(served, key))
            listed = await served.client.get("/v1/models", headers=bearing(key))
            shown = {card["id"] for card in listed.json()["data"]}
            assert shown == usable & {"tiny", "bot", "bot@staging"}
            for name in [*NAMES, "nothing"]:
                answers = await _ask_all(served, key, name)
                if name in usable:
                    assert [answer.status_code for answer in answers] == [200] * 5, name
                else:
                    assert [answer.status_code for answer in answers] == [404] * 5, name
                    said = {answer.json()["error"]["message"] for answer in answers}
                    assert said == {UNKNOWN.format(name)}


async def _ask_all(served: Served, key: str, name: str) -> list[httpx.Response]:
    """Every route that takes a model's name."""
    ask, headers = served.client, bearing(key)
    answers = [
        await ask.post(path, json=body | {"model": name}, headers=headers) for path, body in NAMED
    ]
    return [*answers, await ask.get(f"/v1/models/{name}", headers=headers)]


@pytest.mark.parametrize("is_trusted", [True, False])
async def test_a_forwarded_address_counts_from_trusted_proxies_only(
    live: Live, is_trusted: bool
) -> None:
    inside = await issue(live, cidrs=("10.0.0.0/8",))
    local = await issue(live, cidrs=("127.0.0.0/8",))
    proxies = ["127.0.0.0/8"] if is_trusted else []
    async with live.worker, live.gateway(trusted_proxies=proxies) as served:
        await eventually(lambda: knows(served, local))

        async def status(key: str, forwarded: str | None) -> int:
            headers = bearing(key) | ({"x-forwarded-for": forwarded} if forwarded else {})
            return (await served.client.get("/v1/models", headers=headers)).status_code

        assert await status(inside, "10.1.2.3") == (200 if is_trusted else 403)
        assert await status(inside, "10.1.2.3, 192.0.2.1") == 403
        assert await status(inside, "nonsense") == 403
        assert await status(inside, None) == 403
        assert await status(local, None) == 200
        assert await status(local, "10.1.2.3") == (403 if is_trusted else 200)


async def test_a_revoked_key_is_refused_by_every_gateway(live: Live) -> None:
    """Within a second is what is asked; ten are the deadline here."""
    await _revoke_with_three_gateways(live, poll_interval_s=3600)


async def test_a_revocation_that_nobody_is_told_of_is_seen_by_the_poll(live: Live) -> None:
    async with live.database.transaction() as connection:
        await connection.execute(
            "CREATE OR REPLACE FUNCTION bump_catalog() RETURNS trigger LANGUAGE plpgsql AS $$"
            " BEGIN UPDATE catalog_generation SET generation = generation + 1; RETURN NULL; END $$"
        )
    await _revoke_with_three_gateways(live, poll_interval_s=1)


async def _revoke_with_three_gateways(live: Live, poll_interval_s: float) -> None:
    key = await issue(live)
    async with AsyncExitStack() as stack:
        await stack.enter_async_context(live.worker)
        gateways = [
            await stack.enter_async_context(
                live.gateway(f"gateway-{i}", poll_interval_s=poll_interval_s)
            )
            for i in range(3)
        ]
        for served in gateways:
            await eventually(lambda served=served: knows(served, key))
        async with live.database.transaction() as connection:
            await keys.revoke_key(connection, key.split("_")[1])
        async with asyncio.timeout(10):
            for served in gateways:
                while await knows(served, key):
                    await asyncio.sleep(0.02)


TABLES = "SELECT table_name FROM information_schema.tables WHERE table_schema = 'public'"


async def count_rows(live: Live) -> dict[str, int]:
    """Of each table."""
    tables = [row["table_name"] for row in await live.fetch(TABLES)]
    return {
        table: (await live.fetch(f'SELECT count(*) AS n FROM "{table}"'))[0]["n"]
        for table in tables
    }


async def test_made_up_keys_write_no_row_and_ask_no_database(live: Live) -> None:
    """Neither those that a checksum tells, nor those of the right form that were never issued."""
    number = scaled(10_000, 100_000)
    async with live.worker, live.gateway() as served:
        before = await count_rows(live)
        async with live.postgres_away():
            place = urlsplit(str(served.client.base_url))
            refused = await asyncio.gather(
                *(_flood(place.hostname, place.port, number // 8) for _ in range(8))
            )
        assert sum(refused) == number
        assert await count_rows(live) == before
        assert (await served.client.get("/v1/models")).status_code == 200


async def _flood(host: str | None, port: int | None, number: int) -> int:
    """Requests with bad keys on one connection; how many were answered by 401."""
    reader, writer = await asyncio.open_connection(host, port)
    refused = 0
    for i in range(number):
        key = new_key().text
        if i % 2:
            key = key[:-1] + ("0" if key[-1] != "0" else "1")
        writer.write(
            f"GET /v1/models HTTP/1.1\r\nhost: x\r\nauthorization: Bearer {key}\r\n\r\n".encode()
        )
        head = await reader.readuntil(b"\r\n\r\n")
        refused += head.startswith(b"HTTP/1.1 401")
        length = head.lower().split(b"content-length: ")[1].split(b"\r\n")[0]
        await reader.readexactly(int(length))
    writer.close()
    await writer.wait_closed()
    return refused


async def test_the_last_use_is_told_when_a_gateway_leaves(live: Live) -> None:
    async with live.worker, live.gateway() as served:
        assert (await served.client.get("/v1/models")).status_code == 200
        refused = await served.client.get("/v1/models", headers=bearing(new_key().text))
        assert refused.status_code == 401
    uses = await live.fetch("SELECT key_id FROM key_uses")
    assert [use["key_id"] for use in uses] == [live.key.split("_")[1]]
