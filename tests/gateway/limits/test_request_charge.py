"""Each request with a tenant's key takes one from the request limits, whichever route it names and
however it ends. Only a refusal whose cause is on the server's side gives it back."""

from __future__ import annotations

import asyncio

import httpx
import pytest

from gateway.app import ROUTES
from tests.gateway.http.test_bodies import posting
from tests.gateway.limits.test_quotas import limited
from tests.gateway.live import GatewayPlane, Live
from tests.scripted_worker import Reply
from tests.waiting import eventually
from workers.wire.protocol import ErrorCode

REQUESTS = 9
CHAT = [{"role": "user", "content": "Hi"}]
CALLS = {
    "/v1/chat/completions": {"model": "tiny", "messages": CHAT},
    "/v1/completions": {"model": "tiny", "prompt": "Hi", "max_tokens": 3},
    "/v1/messages": {"model": "tiny", "messages": CHAT, "max_tokens": 3},
    "/v1/messages/count_tokens": {"model": "tiny", "messages": CHAT},
    "/v1/responses": {"model": "tiny", "input": "Hi", "max_output_tokens": 3},
    "/v1/embeddings": {"model": "tiny", "input": "Hi"},
    "/v2/embed": {"model": "tiny", "texts": ["Hi"]},
    "/v1/score": {"model": "tiny", "text_1": "Hi", "text_2": "a"},
    "/score": {"model": "tiny", "text_1": "Hi", "text_2": "a"},
    "/v1/rerank": {"model": "tiny", "query": "Hi", "documents": ["a"]},
    "/v2/rerank": {"model": "tiny", "query": "Hi", "documents": ["a"]},
    "/rerank": {"model": "tiny", "query": "Hi", "documents": ["a"]},
    "/v1/models": None,
    "/v1/models/{model}": None,
    "/tokenize": {"model": "tiny", "prompt": "Hi"},
    "/detokenize": {"model": "tiny", "tokens": [1, 2]},
}
"""A body for each metered route; None: it is read."""
NOT_ON_WORKER = (
    "/v1/models",
    "/v1/models/{model}",
    "/v1/messages/count_tokens",
    "/tokenize",
    "/detokenize",
)


async def call(plane: GatewayPlane, path: str) -> httpx.Response:
    body = CALLS[path]
    if body is None:
        return await plane.client.get(path.replace("{model}", "tiny"))
    return await plane.client.post(path, json=body)


def left(answer: httpx.Response) -> int:
    return int(answer.headers["x-ratelimit-remaining-requests"])


async def test_every_route_that_takes_a_key_is_metered(live: Live) -> None:
    metered = [path for each in ROUTES if each.needs is not None for path in each.paths]
    assert sorted(metered) == sorted(CALLS)
    async with live.worker, live.gateway() as plane:
        await limited(live, plane, requests_per_minute=len(CALLS))
        answers = [await call(plane, path) for path in CALLS]
        refused = [await call(plane, path) for path in CALLS]
    assert [answer.status_code for answer in answers] == [200] * len(CALLS)
    assert [left(answer) for answer in answers] == list(reversed(range(len(CALLS))))
    assert [answer.status_code for answer in refused] == [429] * len(CALLS)
    assert {left(answer) for answer in refused} == {0}


@pytest.mark.parametrize(
    ("body", "status"),
    [
        (b'{"model":', 400),
        (b'{"model":"tiny","prompt":[]}', 400),
        (b'{"model":"tiny","prompt":[1],"temperature":9}', 400),
        (b'{"model":"nobody","prompt":"Hi"}', 404),
    ],
)
async def test_a_bad_request_keeps_what_it_took(live: Live, body: bytes, status: int) -> None:
    async with live.worker, live.gateway() as plane:
        await limited(live, plane, requests_per_minute=2)
        answers = [await plane.client.post("/v1/completions", content=body) for _ in range(3)]
    assert [answer.status_code for answer in answers] == [status, status, 429]


OURS = (ErrorCode.MODEL_UNAVAILABLE, ErrorCode.ADAPTER_UNAVAILABLE)
THEIRS = (ErrorCode.OVERLOADED, ErrorCode.EXPIRED, ErrorCode.INVALID, ErrorCode.PROMPT_TOO_LONG)
ON_WORKER = [path for path in CALLS if path not in NOT_ON_WORKER]


@pytest.mark.parametrize("code", OURS + THEIRS)
async def test_a_worker_s_refusal_gives_it_back_if_the_cause_is_ours(
    live: Live, code: ErrorCode
) -> None:
    live.worker.script = lambda _: Reply([], failure=code)
    paths = ("/v1/completions", "/v1/messages")
    async with live.worker, live.gateway() as plane:
        await limited(live, plane, requests_per_minute=REQUESTS)
        # It expires at once.
        plane.client.headers["x-request-timeout"] = "0.001" if code is ErrorCode.EXPIRED else "9"
        answers = [await call(plane, path) for path in paths * 2]
    assert all(answer.status_code >= 400 for answer in answers)
    taken = [0] * 4 if code in OURS else [1, 2, 3, 4]
    assert [REQUESTS - left(answer) for answer in answers] == taken


async def test_a_gateway_that_can_run_nothing_gives_it_back(live: Live) -> None:
    """There is no worker, or no room for what is used."""
    async with live.gateway() as plane:
        await limited(live, plane, requests_per_minute=REQUESTS)
        answers = [await call(plane, path) for path in ON_WORKER]
    live.max_wal_bytes = 0
    async with live.worker, live.gateway() as plane:
        await eventually(lambda: plane.gateway.fleet.why_not_serving() is None)
        answers += [await call(plane, path) for path in ON_WORKER]
    assert {answer.status_code for answer in answers} == {503, 529}
    assert {left(answer) for answer in answers} == {REQUESTS}


@pytest.mark.parametrize("limit", ["tokens_per_minute", "tokens_per_day"])
async def test_another_limit_s_refusal_keeps_it(live: Live, limit: str) -> None:
    """Whether the prompt is tokenised for it, or nothing is left at all."""
    async with live.worker, live.gateway() as plane:
        await limited(live, plane, requests_per_minute=REQUESTS, **{limit: 10})
        # Each of these uses 5 tokens.
        answers = [await plane.complete("tiny", max_tokens=each) for each in (3, 4, 3, 3)]
    assert [answer.status_code for answer in answers] == [200, 429, 200, 429]
    assert [REQUESTS - left(answer) for answer in answers] == [1, 2, 3, 4]


async def test_of_a_request_too_many_at_once_nothing_is_read(live: Live) -> None:
    """On every route whose requests a worker runs. One takes its place when its head has come, and
    leaves it when it has ended or its client has left."""
    whole = b'{"model": "tiny", "prompt": "Hi", "max_tokens": 3}'
    path = "/v1/completions"
    async with live.worker, live.gateway() as plane:
        await limited(live, plane, requests_per_minute=100, concurrent_requests=1)
        first = await call(plane, path)
        async with posting(plane, live.key, path, len(whole)) as open_request:
            await eventually(lambda: is_refused(plane))
            for each in ON_WORKER:
                async with posting(plane, live.key, each, 5 << 20) as request:
                    status, head, error = await request.answer()
                    assert status == 429 and b"x-ratelimit-remaining-requests" in head
                    assert "concurrent_requests" in str(error)
            for each in NOT_ON_WORKER:
                assert (await call(plane, each)).status_code == 200
            await open_request.send(whole)
            assert (await open_request.answer())[0] == 200
        async with posting(plane, live.key, path, len(whole)):
            await eventually(lambda: is_refused(plane))
        await eventually(lambda: plane.serves("tiny"))
    assert first.status_code == 200


async def is_refused(plane: GatewayPlane) -> bool:
    return (await plane.complete("tiny")).status_code == 429


async def test_a_client_that_leaves_early_keeps_it(live: Live) -> None:
    """Or it would be held for ever, or asked for nothing again and again."""
    live.worker.script = lambda _: Reply([65], idle_steps=1 << 40)
    async with live.worker, live.gateway() as plane:
        await limited(live, plane, requests_per_minute=REQUESTS)
        asked = asyncio.create_task(plane.complete("tiny"))
        await eventually(lambda: live.worker.num_running == 1)
        asked.cancel()
        await eventually(lambda: live.worker.num_running == 0)
        answer = await call(plane, "/v1/models")
        assert left(answer) == REQUESTS - 2
