"""Requests that run without HTTP: what they hold is released when they end, however they end."""

from __future__ import annotations

import time

import pytest

from gateway.catalog.catalog import authorize
from gateway.exceptions import ModelNotFound
from gateway.http.request import INFERENCE
from gateway.metering.usage_loader import Status
from gateway.request import Request
from gateway.requests.request_scope import RequestScope
from gateway.tracing import Untraced
from tests.gateway.live import GatewayPlane, Live
from web.held_bytes import AnswerBudget, BodyBudget, HeldAnswer, HeldBody


async def run(live: Live, plane: GatewayPlane, model: str, *, is_answered: bool) -> int:
    """Returns the number of tokens that were generated. If `is_answered` is not set, the request
    ends when it is admitted."""
    view, body = plane.gateway.catalog.current, HeldBody(BodyBudget())
    answer, now = HeldAnswer(AnswerBudget(), body), time.perf_counter()
    with RequestScope(
        plane.gateway, "req_1", started_at=now, answer=answer, trace=Untraced()
    ) as scope:
        caller = authorize(view, view.keys[live.key[4:16]], INFERENCE)
        await scope.begin(caller).take(0, on_worker=True)
        started = await scope.start(Request(model=model, prompts=["Hi"], max_tokens=3))
        assert len(plane.gateway.in_flight_requests.open) == plane.gateway.admission.num_open == 1
        if is_answered:
            await started.generation.finish()
            await started.settlement.keep(Status.COMPLETED)
    return started.generation.usage.completion_tokens


async def test_a_request_without_http(live: Live) -> None:
    async with live.worker, live.gateway() as plane:
        await live.limit(concurrent_requests=1, tokens_per_minute=100)
        assert [
            await run(live, plane, "tiny", is_answered=each) for each in (True, False, True)
        ] == [3, 0, 3]
        with pytest.raises(ModelNotFound):
            await run(live, plane, "nothing", is_answered=True)
        assert not plane.gateway.in_flight_requests.open
        assert plane.gateway.admission.num_open == 0
        assert (await plane.complete("tiny")).status_code == 200
