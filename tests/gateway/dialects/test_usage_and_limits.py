"""Every route that takes text is metered, limited, logged, traced and refused in one way."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Iterator, Sequence
from typing import Any, NamedTuple

import httpx
import pytest

from gateway.tracing import Tracing
from tests.gateway.limits.test_quotas import limited
from tests.gateway.live import GatewayPlane, Live
from tests.gateway.metering.test_usage import rows
from tests.otlp_receiver import SERVER, OtlpReceiver
from tests.scripted_worker import Reply
from tests.tracing import traced
from workers.wire.protocol import Generate

HI = [{"role": "user", "content": "Hi"}]


class Route(NamedTuple):
    path: str
    body: dict[str, Any]
    operation: str = ""
    """As the GenAI conventions name it; empty: nothing is asked of a worker."""
    num_generated: int = 0
    """Tokens of an answer; none: it is never streamed."""
    has_anthropic_errors: bool = False


ROUTES = {
    "chat": Route("/v1/chat/completions", {"messages": HI, "max_tokens": 8}, "chat", 3),
    "completions": Route(
        "/v1/completions", {"prompt": "Hi", "max_tokens": 8}, "text_completion", 3
    ),
    "messages": Route("/v1/messages", {"messages": HI, "max_tokens": 8}, "chat", 3, True),
    "responses": Route("/v1/responses", {"input": "Hi", "max_output_tokens": 8}, "chat", 3),
    "embeddings": Route("/v1/embeddings", {"input": ["Hi", "Ho!"]}, "embeddings"),
    "embed": Route("/v2/embed", {"texts": ["Hi", "Ho!"]}, "embeddings"),
    "score": Route("/v1/score", {"text_1": "Hi", "text_2": ["a", "b"]}, "embeddings"),
    "rerank": Route("/v1/rerank", {"query": "Hi", "documents": ["a", "b"]}, "embeddings"),
    "tokenize": Route("/tokenize", {"prompt": "Hi"}),
    "detokenize": Route("/detokenize", {"tokens": [1, 2]}),
    "count_tokens": Route("/v1/messages/count_tokens", {"messages": HI}, "", 0, True),
}
METERED = {name: route for name, route in ROUTES.items() if route.operation}
FREE = {name: route for name, route in ROUTES.items() if not route.operation}
"""They take a request from the limits and no tokens, and are not billed."""
PRICES = {"input": 5, "cached_input": 2, "output": 7}


async def ask(
    plane: GatewayPlane, route: Route, model: str = "bot", **fields: Any
) -> httpx.Response:
    return await plane.client.post(route.path, json={"model": model, **route.body, **fields})


def error_of(route: Route, answer: httpx.Response) -> dict[str, Any]:
    """Type, code, param and message of an error, wherever the dialect has them."""
    body = answer.json()
    error = body["error"]
    if not route.has_anthropic_errors:
        assert body.keys() == {"error"} and error.keys() >= {"message", "type", "param", "code"}
        return error
    assert body["type"] == "error" and body["request_id"] == answer.headers["x-request-id"]
    details = error["details"]
    return {**error, "code": details["error_code"], "param": details["param"]}


class Asked(NamedTuple):
    """One request, and all that is known of it afterwards."""

    route: Route
    answer: httpx.Response
    sent: Sequence[Generate]
    """What the worker got of it."""
    is_streamed: bool


async def asked_of_all(live: Live, plane: GatewayPlane) -> AsyncIterator[Asked]:
    """Every metered route once, and once more as a stream if it has one."""
    for route in METERED.values():
        for is_streamed in (False, True)[: 2 if route.num_generated else 1]:
            before = len(live.worker.requests)
            options = {"stream": True} if is_streamed else {}
            answer = await ask(plane, route, **options)
            assert answer.status_code == 200, answer.text
            yield Asked(route, answer, live.worker.requests[before:], is_streamed)


@pytest.fixture
def tracing() -> Iterator[tuple[Tracing, OtlpReceiver]]:
    """Opened before the loop of the test."""
    with traced() as opened:
        yield opened


async def test_usage_log_and_trace(
    tracing: tuple[Tracing, OtlpReceiver], live: Live, caplog: pytest.LogCaptureFixture
) -> None:
    """A row, a line and a trace each, and they say the same: what the worker was sent, what it
    answered, what that costs."""
    caplog.set_level(logging.INFO)
    live.worker.script = lambda _: Reply([65, 66, 67], num_cached_tokens=2)
    await live.make_ready("a")
    await live.price(**PRICES)
    given, receiver = tracing
    async with live.worker, live.gateway(tracing=given) as plane:
        asked = [each async for each in asked_of_all(live, plane)]
        for route in FREE.values():
            assert (await ask(plane, route)).status_code == 200
        found = {row["request_id"]: row for row in await rows(live, len(asked))}
    lines = {
        record.__dict__["request_id"]: record.__dict__
        for record in caplog.records
        if record.message == "answered"
    }
    assert lines.keys() == found.keys()
    for route, answer, sent, is_streamed in asked:
        request_id = answer.headers["x-request-id"]
        row, line = found[request_id], lines[request_id]
        prompt, completion = sum(len(each.tokens) for each in sent), route.num_generated
        cached = 2 if completion else 0
        assert {each.adapter and each.adapter.digest for each in sent} != {None}
        assert (row["tenant_id"], row["key_id"]) == (live.tenant_id, live.key[4:16])
        assert (row["model"], row["adapter"], row["adapter_version"]) == ("tiny", "bot", 1)
        told = (row["prompt_tokens"], row["cached_tokens"], row["completion_tokens"])
        assert told == (prompt, cached, completion)
        assert row["metered_tokens"] == prompt + completion
        assert row["cost"] == 5 * (prompt - cached) + 2 * cached + 7 * completion
        assert row["status"] == "completed"
        assert row["finish_reasons"] == (["stop"] if completion else [])

        assert (line["tenant"], line["key_id"]) == (live.tenant_id, live.key[4:16])
        assert line["tenant_name"] == "acme"
        assert (line["model"], line["adapter_version"]) == ("bot", 1)
        assert (line["in_tok"], line["out_tok"]) == (prompt, completion)
        assert line["worker"] == answer.headers["loraplex-worker"] == row["worker"]
        assert line["trace_id"] == row["trace_id"] and 0 < line["ttft_ms"] <= line["dur_ms"]

        spans = receiver.trace(row["trace_id"])
        (request,) = [span for span in spans if span.kind == SERVER]
        assert request.name == f"POST {route.path}" and not request.is_error
        below = sorted(span.name for span in spans if span.parent_id == request.span_id)
        assert below == ["catalog", "limits", "routing", "stream", "tokenise", "usage"]
        says = request.attributes
        assert says["gen_ai.operation.name"] == route.operation
        assert says["gen_ai.request.model"] == "bot"
        assert says["gen_ai.request.stream"] is is_streamed
        assert says["gen_ai.usage.input_tokens"] == prompt
        assert says["gen_ai.usage.output_tokens"] == completion
        assert says["loraplex.request.id"] == request_id
        assert says["loraplex.outcome"] == "completed"


def assert_is_over(route: Route, answer: httpx.Response, limit: str, code: str) -> None:
    assert answer.status_code == 429, answer.text
    error = error_of(route, answer)
    assert (error["type"], error["code"]) == ("rate_limit_error", code)
    assert error["param"] == limit and limit in error["message"]


async def test_requests_per_minute(live: Live) -> None:
    """Every route takes one, and is refused in its dialect's shape when none is left."""
    async with live.worker, live.gateway() as plane:
        await limited(live, plane, requests_per_minute=len(ROUTES))
        answers = [await ask(plane, route, "tiny") for route in ROUTES.values()]
        refused = [await ask(plane, route, "tiny") for route in ROUTES.values()]
    left = [int(answer.headers["x-ratelimit-remaining-requests"]) for answer in answers]
    assert left == list(reversed(range(len(ROUTES))))
    for route, answer in zip(ROUTES.values(), refused, strict=True):
        assert_is_over(route, answer, "requests_per_minute", "rate_limit_exceeded")
        assert int(answer.headers["retry-after-ms"]) > 0
        assert f"is {len(ROUTES)}; 0 of it is left" in error_of(route, answer)["message"]


async def test_tokens_are_taken_as_they_are_billed(live: Live) -> None:
    """By each route that asks a worker, streamed or not, and by no other."""
    await live.make_ready("a")
    limit = 10_000
    async with live.worker, live.gateway() as plane:
        await limited(live, plane, tokens_per_minute=limit)
        num_asked = len([each async for each in asked_of_all(live, plane)])
        found = await rows(live, num_asked)
        billed = sum(row["metered_tokens"] for row in found)
        for route in FREE.values():
            answer = await ask(plane, route)
            assert answer.headers["x-ratelimit-remaining-tokens"] == str(limit - billed)


@pytest.mark.parametrize(
    ("limit", "code"),
    [
        ("tokens_per_minute", "rate_limit_exceeded"),
        ("tokens_per_month", "insufficient_quota"),
        ("spend_per_month", "insufficient_quota"),
    ],
)
async def test_too_many_tokens(live: Live, limit: str, code: str) -> None:
    """Refused in the dialect's shape before a worker is asked; what is not billed goes on."""
    await live.price(**PRICES)
    async with live.worker, live.gateway() as plane:
        await limited(live, plane, **{limit: 1})
        refused = [await ask(plane, route, "tiny") for route in METERED.values()]
        free = [await ask(plane, route, "tiny") for route in FREE.values()]
    for route, answer in zip(METERED.values(), refused, strict=True):
        assert_is_over(route, answer, limit, code)
        assert answer.headers["x-should-retry"] == "false"
        assert "It can never be served" in error_of(route, answer)["message"]
    assert [answer.status_code for answer in free] == [200] * len(FREE)
    assert not live.worker.requests


async def test_refusals_name_what_is_wrong(live: Live) -> None:
    """A field that is in no schema, a model that is not there, no key; nothing is billed."""
    async with live.worker, live.gateway() as plane:
        for route in ROUTES.values():
            unknown = await ask(plane, route, "tiny", frobnicate=1)
            assert unknown.status_code == 400
            assert error_of(route, unknown)["param"] == "frobnicate"
            absent = await ask(plane, route, "no-such-model")
            assert absent.status_code == 404
            assert error_of(route, absent)["code"] == "model_not_found"
            keyless = await plane.client.post(
                route.path, json=route.body, headers={"authorization": "Bearer none"}
            )
            assert keyless.status_code == 401
            assert error_of(route, keyless)["type"] in ("authentication_error", "auth")
    assert not live.worker.requests and not await live.fetch("SELECT 1 FROM usage")
