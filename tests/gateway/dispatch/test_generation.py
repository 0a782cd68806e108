"""A request's generation is freed as soon as it has ended."""

from __future__ import annotations

import asyncio
import gc
import time
import weakref
from types import SimpleNamespace
from typing import Any, cast

import pytest

from gateway.catalog.catalog import Principal
from gateway.catalog.resolved_model import ResolvedModel
from gateway.dispatch.failover import RetryBudget
from gateway.dispatch.generation import Generation
from gateway.dispatch.prompts import make_prompt
from gateway.dispatch.run import Run, frames_of
from gateway.request import Request
from gateway.text.tokenizer import SamplingDefaults
from tests.gateway.catalog.test_page_identity import KEY, MODELS, TENANTS
from workers.wire.client import Sink
from workers.wire.protocol import FinishReason, Generate, SequenceOutput


class Worker:
    """Keeps the sinks of sequences, as a WorkerClient does."""

    instance_id = "worker"

    def __init__(self) -> None:
        self.sinks: dict[int, Sink] = {}

    def send(self, request: Generate, sink: Sink) -> int:
        self.sinks[len(self.sinks) + 1] = sink
        return len(self.sinks)

    def cancel(self, sequence_id: int) -> None:
        self.sinks.pop(sequence_id, None)

    def abort(self, sequence_id: int) -> bool:
        return sequence_id in self.sinks


async def begun(worker: Worker) -> Generation:
    asked = Request(model="tiny", prompts=[[1]], num_choices=2, max_tokens=2)
    target = ResolvedModel("tiny", MODELS[0])
    spelling = SimpleNamespace(all=None, detokenizer=lambda _: SimpleNamespace(flush=str))
    tokenizer: Any = SimpleNamespace(
        pooling=None, defaults=SamplingDefaults(), spelling=spelling, verdict_tokens=()
    )
    prompts, deadline = [make_prompt(target, [1])], time.perf_counter() + 60
    run = Run(
        "r", Principal(TENANTS[0], KEY.caller), asked, target, tokenizer, prompts, deadline, 0
    )
    reservation: Any = SimpleNamespace(max_tokens=[2], give=lambda number: number)
    failover: Any = SimpleNamespace(budget=RetryBudget())
    return Generation(
        run, await frames_of(run), reservation, cast("Any", worker), "layout", failover
    )


@pytest.mark.parametrize("is_answered", [True, False])
async def test_no_cycle_of_references_is_left(is_answered: bool) -> None:
    """Or its memory would stay until the garbage collector runs, whose pauses grow with it."""
    worker = Worker()
    generation = await begun(worker)
    ended, task = weakref.ref(generation), asyncio.create_task(generation.finish())
    gc.disable()
    try:
        await asyncio.sleep(0)
        assert len(worker.sinks) == 2
        if is_answered:
            for number in list(worker.sinks):
                end = SequenceOutput(number, [], finish_reason=FinishReason.LENGTH)
                worker.sinks.pop(number)(end)
            assert len(await task) == 2
        else:
            task.cancel()
            await asyncio.wait([task])
        generation.cancel()
        del generation, task
        await asyncio.sleep(0)
        assert not worker.sinks and ended() is None
    finally:
        gc.enable()
