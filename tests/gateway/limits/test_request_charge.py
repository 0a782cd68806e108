"""Each request with a tenant's key takes one from the request limits, whichever route it names and
however it ends; only an answer that says "come again" gives it back."""

from __future__ import annotations

import asyncio

import httpx
import pytest
from litestar.handlers import HTTPRouteHandler

from gateway.app import ROUTES
from gateway.http.guards import public
from tests.gateway.limits.test_quotas import limited
from tests.gateway.live import Live, Served, eventually
from tests.stub_worker import Reply

REQUESTS = 9
CHAT = [{"role": "user", "content": "Hi"}]
CALLS = {
    "/v1/chat/completions": {"model": "tiny", "messages": CHAT},
    "/v1/completions": {"model": "tiny", "prompt": "Hi", "max_tokens": 3},
    "/v1/messages": {"model": "tiny", "messages": CHAT, "max_tokens": 3},
    "/v1/messages/count_tokens": {"model": "tiny", "messages": CHAT},
    "/v1/responses": {"model": "tiny", "input": "Hi", "max_output_tokens": 3},
    "/v1/embeddings": {"model": "tiny", "input": "Hi"},
    "/v1/score": {"model": "tiny", "text_1": "Hi", "text_2": "a"},
    "/score": {"model": "tiny", "text_1": "Hi", "text_2": "a"},
    "/v1/rerank": {"model": "tiny", "query": "Hi", "documents": ["a"]},
    "/v2/rerank": {"model": "tiny", "query": "Hi", "documents": ["a"]},
    "/rerank": {"model": "tiny", "query": "Hi", "documents": ["a"]},
    "/v1/models": None,
    "/v1/models/{model:path}": None,
    "/tokenize": {"model": "tiny", "prompt": "Hi"},
    "/detokenize": {"model": "tiny", "tokens": [1, 2]},
}
"""A body for each metered route; None: it is read."""


def paths(route: HTTPRouteHandler) -> list[str]:
    return sorted(route.paths)


async def call(served: Served, path: str) -> httpx.Response:
    body = CALLS[path]
    if body is None:
        return await served.client.get(path.replace("{model:path}", "tiny"))
    return await served.client.post(path, json=body)


def left(answer: httpx.Response) -> int:
    return int(answer.headers["x-ratelimit-remaining-requests"])


async def test_every_route_that_takes_a_key_is_metered(live: Live) -> None:
    metered = [each for each in ROUTES if public not in (each.guards or ())]
    assert sorted(path for each in metered for path in paths(each)) == sorted(CALLS)
    async with live.worker, live.gateway() as served:
        await limited(live, served, requests_per_minute=len(CALLS))
        answers = [await call(served, path) for path in CALLS]
        refused = [await call(served, path) for path in CALLS]
    assert [answer.status_code for answer in answers] == [200] * len(CALLS)
    assert [left(answer) for answer in answers] == list(reversed(range(len(CALLS))))
    assert [answer.status_code for answer in refused] == [429] * len(CALLS)
    assert {left(answer) for answer in refused} == {0}


@pytest.mark.parametrize(
    ("body", "status"),
    [
        (b'{"model":', 400),
        (b'{"model":"tiny","prompt":[]}', 400),
        (b'{"model":"tiny","prompt":[1],"max_tokens":9999}', 400),
        (b'{"model":"nobody","prompt":"Hi"}', 404),
    ],
)
async def test_a_bad_request_keeps_what_it_took(live: Live, body: bytes, status: int) -> None:
    async with live.worker, live.gateway() as served:
        await limited(live, served, requests_per_minute=2)
        answers = [await served.client.post("/v1/completions", content=body) for _ in range(3)]
    assert [answer.status_code for answer in answers] == [status, status, 429]


async def test_who_is_told_to_come_again_has_it_back(live: Live) -> None:
    """429 of another limit, and 503."""
    async with live.worker, live.gateway() as served:
        await limited(live, served, requests_per_minute=REQUESTS, tokens_per_minute=10)
        assert await served.serves("tiny")
        refused = [await served.complete("tiny", max_tokens=4) for _ in range(3)]
    async with live.gateway() as served:
        away = [await served.complete("tiny", max_tokens=3) for _ in range(3)]
    assert [answer.status_code for answer in refused + away] == [429] * 3 + [503] * 3
    assert {left(answer) for answer in refused} == {REQUESTS - 1}
    assert {answer.headers["x-ratelimit-remaining-tokens"] for answer in refused} == {"5"}
    assert len({left(answer) for answer in away}) == 1


async def test_a_client_that_leaves_early_keeps_it(live: Live) -> None:
    """Or it would be held for ever, or asked for nothing again and again."""
    live.worker.script = lambda _: Reply([65], idle_steps=1 << 40)
    async with live.worker, live.gateway() as served:
        await limited(live, served, requests_per_minute=REQUESTS)
        asked = asyncio.create_task(served.complete("tiny"))
        await eventually(lambda: live.worker.num_running == 1)
        asked.cancel()
        await eventually(lambda: live.worker.num_running == 0)
        answer = await call(served, "/v1/models")
        assert left(answer) == REQUESTS - 2
