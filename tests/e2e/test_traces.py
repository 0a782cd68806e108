"""Traces of real workers behind a real gateway: what the spans say is what happened."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio
import torch

from ops.registry import select
from tests.e2e.fleet import FleetPlane, FleetSetup
from tests.e2e.tiny import NAME
from tests.otlp_receiver import SERVER, OtlpReceiver, ReceivedSpan
from tests.tracing import traced
from workers.models.plan import ModelPlan

OTHER = "other"
ANSWER_TOKENS = 200
"""So long that a kill meets it half-way."""

pytestmark = [pytest.mark.full, pytest.mark.asyncio(loop_scope="module")]


@pytest.fixture(scope="module")
def setup(tmp_path_factory: pytest.TempPathFactory) -> FleetSetup:
    return FleetSetup(tmp_path_factory.mktemp("traces"), 1, [OTHER])


@pytest.fixture(scope="module")
def receiver_and_tracing() -> Any:
    with traced() as (tracing, receiver):
        yield receiver, tracing


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def plane(setup: FleetSetup, receiver_and_tracing: Any) -> AsyncIterator[FleetPlane]:
    """Two workers with room for one of two base models each."""
    plan = ModelPlan.read(setup.tiny.model, setup.tiny.shape.digest, torch.float32)
    room = 7 * plan.max_bytes(select("cpu")) // 4
    async with setup.plane(2, tracing=receiver_and_tracing[1], device_memory=room) as plane:
        yield plane


@pytest.fixture(scope="module")
def receiver(receiver_and_tracing: Any) -> OtlpReceiver:
    return receiver_and_tracing[0]


def prompt() -> list[int]:
    rng = random.Random(7)
    return [rng.randrange(256) for _ in range(40)]


async def test_a_killed_worker_and_a_model_swap_are_in_one_trace(
    plane: FleetPlane, receiver: OtlpReceiver
) -> None:
    """The worker of a stream is killed half-way. The other, which has the other base model on its
    device, takes the stream up: it swaps, loads the adapter, and says where the time went."""
    await part_models(plane)
    stream = await plane.client.completions.with_raw_response.create(
        model="a000",
        prompt=prompt(),
        max_tokens=ANSWER_TOKENS,
        stream=True,
        extra_body={"ignore_eos": True},
    )
    first, request_id = stream.headers["loraplex-worker"], stream.headers["x-request-id"]
    num_chunks = 0
    async for _ in stream.parse():
        num_chunks += 1
        if num_chunks == 3:
            await plane.workers[first].kill()
    (second,) = plane.workers.keys() - {first}
    spans = {span.name: span for span in receiver.trace(request_id.removeprefix("req_"))}
    request = spans["POST /v1/completions"]
    (resume,) = [event for event in request.events if event.name == "resume"]
    assert resume.attributes["loraplex.worker.from"] == first
    assert resume.attributes["loraplex.worker.to"] == second
    assert 0 < resume.attributes["loraplex.tokens_resumed"] < ANSWER_TOKENS
    assert request.attributes["gen_ai.usage.output_tokens"] == ANSWER_TOKENS
    assert sorted(spans["routing"].attributes["loraplex.routing.candidates"]) == [
        *sorted([first, second])
    ]
    assert_stages_follow(spans, second)
    swap, load = spans["model_swap"], spans["adapter_load"]
    assert load.attributes["loraplex.adapter.tier"] == "store"
    assert {swap.parent_id, load.parent_id} == {spans["stream"].span_id}
    assert swap.attributes["loraplex.worker"] == load.attributes["loraplex.worker"] == second
    assert swap.start_ns < swap.end_ns <= spans["prefill"].start_ns + 1e5
    assert load.end_ns <= spans["prefill"].start_ns + 1e5
    assert spans["queue"].start_ns >= resume.time_ns - 1e5


async def part_models(plane: FleetPlane) -> None:
    """Each worker has one of the two base models on its device, and not the other."""
    async with asyncio.timeout(60):
        while not (plane.holders_of(NAME) and plane.holders_of(OTHER)):
            for model in (OTHER, NAME):
                await plane.client.completions.create(model=model, prompt=prompt(), max_tokens=4)
                await plane.told()


def assert_stages_follow(spans: dict[str, ReceivedSpan], worker: str) -> None:
    (request,) = [span for span in spans.values() if span.kind == SERVER]
    stream, queue = spans["stream"], spans["queue"]
    prefill, decode = spans["prefill"], spans["decode"]
    assert len(spans) <= 12
    assert stream.parent_id == request.span_id
    assert {queue.parent_id, prefill.parent_id, decode.parent_id} == {stream.span_id}
    bounds = [queue.end_ns - prefill.start_ns, prefill.end_ns - decode.start_ns]
    assert max(map(abs, bounds)) < 1e5, "one ends where the next begins"
    assert stream.start_ns - 1e5 <= queue.start_ns <= queue.end_ns <= prefill.end_ns
    assert prefill.end_ns < decode.end_ns <= stream.end_ns + 1e5
    assert {span.attributes["loraplex.worker"] for span in (queue, prefill, decode)} == {worker}
