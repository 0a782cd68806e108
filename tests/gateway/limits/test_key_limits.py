"""What keys are limited to, where requests are served: models and networks."""

from __future__ import annotations

from typing import Any

import httpx
import pytest

from admin.keys import keys
from admin.keys.schemas import KeyCreate
from store.records import TENANT_SCOPES, new_key
from tests.gateway.live import GatewayPlane, Live
from tests.gateway.pepper import PEPPER
from tests.waiting import eventually


async def issue(live: Live, **rights: Any) -> str:
    async with live.database.transaction() as connection:
        rights = {"scopes": TENANT_SCOPES} | rights
        made = await keys.issue_key(connection, PEPPER, live.tenant_id, KeyCreate(**rights))
    return made[1]


def bearing(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


async def knows(plane: GatewayPlane, key: str) -> bool:
    answer = await plane.client.get("/v1/models", headers=bearing(key))
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
    async with live.worker, live.gateway() as plane:
        for key, (_, usable) in zip(issued, LISTS, strict=True):
            await eventually(lambda key=key: knows(plane, key))
            listed = await plane.client.get("/v1/models", headers=bearing(key))
            shown = {card["id"] for card in listed.json()["data"]}
            assert shown == usable & {"tiny", "bot", "bot@staging"}
            for name in [*NAMES, "nothing"]:
                answers = await _ask_all(plane, key, name)
                if name in usable:
                    assert [answer.status_code for answer in answers] == [200] * 5, name
                else:
                    assert [answer.status_code for answer in answers] == [404] * 5, name
                    said = {answer.json()["error"]["message"] for answer in answers}
                    assert said == {UNKNOWN.format(name)}


async def _ask_all(plane: GatewayPlane, key: str, name: str) -> list[httpx.Response]:
    """Every route that takes a model's name."""
    ask, headers = plane.client, bearing(key)
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
    async with live.worker, live.gateway(trusted_proxies=proxies) as plane:
        await eventually(lambda: knows(plane, local))

        async def status(key: str, forwarded: str | None) -> int:
            headers = bearing(key) | ({"x-forwarded-for": forwarded} if forwarded else {})
            return (await plane.client.get("/v1/models", headers=headers)).status_code

        assert await status(inside, "10.1.2.3") == (200 if is_trusted else 403)
        assert await status(inside, "10.1.2.3, 192.0.2.1") == 403
        assert await status(inside, "nonsense") == 403
        assert await status(inside, None) == 403
        assert await status(local, None) == 200
        assert await status(local, "10.1.2.3") == (403 if is_trusted else 200)


async def test_the_last_use_is_told_when_a_gateway_leaves(live: Live) -> None:
    async with live.worker, live.gateway() as plane:
        assert (await plane.client.get("/v1/models")).status_code == 200
        refused = await plane.client.get("/v1/models", headers=bearing(new_key().text))
        assert refused.status_code == 401
    uses = await live.fetch("SELECT key_id FROM key_uses")
    assert [use["key_id"] for use in uses] == [live.key.split("_")[1]]
