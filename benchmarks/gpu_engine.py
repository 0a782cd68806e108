"""Steps of the engine that only generate, on random weights: with the next step launched ahead and
not, with the step run as a graph and not. Imported where msgspec and safetensors are."""

from __future__ import annotations

import time
from collections.abc import Iterator
from functools import partial
from itertools import product
from types import SimpleNamespace
from typing import Any, cast

import torch
from torch import Tensor

from adapters.pool.pool import AdapterPool
from benchmarks.gpu_ops import CONTEXT
from benchmarks.gpu_timing import Bench
from benchmarks.shaped_model import Batch, ShapedModel
from memory.arena import Arena
from memory.kv_cache import KVCache
from ops.base import PAGE_TOKENS, AdapterTables
from workers.execution.engine import Engine
from workers.execution.graph_runner import Limits
from workers.execution.model_runner import ModelRunner
from workers.execution.step_ring import StepRing
from workers.execution.token_buffer import TokenBuffer
from workers.layers.forward_batch import ForwardBatch
from workers.models.decoder import Decoder
from workers.scheduling.scheduler import Scheduler
from workers.wire.protocol import AdapterRef, Generate, ModelInfo, SamplingParams

HOST_PARTS = ("schedule_us", "build_us", "forward_us", "update_us")


class Shaped:
    """A `ShapedModel` as the runner knows models."""

    def __init__(self, model: ShapedModel, max_model_len: int) -> None:
        self._model = model
        self.arrival = model.arrival
        self.plan = SimpleNamespace(kv_layout=model.layout, max_model_len=max_model_len)

    def forward(self, batch: ForwardBatch) -> Tensor:
        return self._model.hidden(Batch(batch.input_ids, batch.attention, batch.kv, batch.lora))

    def logits(self, hidden: Tensor, out: Tensor | None = None) -> Tensor:
        return self._model.logits(hidden, out)


class NoAdapters:
    """The pool of an engine that serves the base model alone."""

    is_leased = is_loading = False

    def poll(self) -> None:
        pass

    def may_displace(self, ref: AdapterRef, other: str) -> bool:
        return False

    def num_lacking(self, ref: AdapterRef) -> int:
        return 0


def engine_rows(bench: Bench, model: ShapedModel) -> Iterator[dict[str, Any]]:
    """gap_us: of a step's time what the captured forward alone does not take: the host where the
    device waits for it, sampling, transfers. host_us: what the host does, waiting for nothing."""
    context, num_steps = (20, 4) if bench.tiny else (CONTEXT, 64)
    for rows in (2,) if bench.tiny else (1, 32, 128):
        attention, kv = model.cache(rows, context)(1, context)
        ids = torch.zeros(rows, dtype=torch.int32, device=bench.device)
        device_s = bench.seconds(partial(model.forward, Batch(ids, attention, kv, None)))
        for runs_ahead, graphs in product((False, True), repeat=2):
            engine, ring = make_engine(model, rows, context + 2 * num_steps, runs_ahead, graphs)
            step_s, host_us = timed(engine, ring, rows, context, num_steps)
            yield {
                "model": model.shape.name,
                "rows": rows,
                "ahead": runs_ahead,
                "graphs": graphs,
                "ms": step_s * 1e3,
                "gap_us": (step_s - device_s) * 1e6,
                "host_us": host_us,
                "tokens_s": rows / step_s,
            }


def make_engine(
    model: ShapedModel, rows: int, max_len: int, runs_ahead: bool, graphs: bool
) -> tuple[Engine, StepRing]:
    device, page_bytes = model.ops.device, model.layout.page_bytes
    num_pages = rows * -(-max_len // PAGE_TOKENS) + rows
    extent_bytes = 8 * page_bytes
    arena = Arena(-(-num_pages // 8) * extent_bytes, extent_bytes, first_byte=page_bytes)
    memory = torch.empty(page_bytes + arena.num_bytes, dtype=torch.uint8, device=device)
    kv = KVCache(arena, "model", page_bytes)
    buffer = TokenBuffer(rows, max_len, device)
    pool = cast(AdapterPool, NoAdapters())
    size = (1, model.shape.layers, 7)
    offsets = torch.zeros(size, dtype=torch.int64, device=device)
    tables = AdapterTables(offsets, offsets, torch.zeros(size, dtype=torch.int32, device=device))
    runner = ModelRunner(
        *(cast(Decoder, Shaped(model, max_len)), model.ops, memory, buffer, tables),
        graphs=Limits.of(rows, max_len, 1, model.shape.vocab) if graphs else None,
    )
    scheduler = Scheduler(kv, pool, buffer, max_num_seqs=rows, max_batched_tokens=2048)
    ring = StepRing()
    engine = Engine(
        ModelInfo("model", "model", max_len),
        *(scheduler, runner, kv, pool, ring),
        vocab_size=model.shape.vocab,
        end_tokens=frozenset(),
        clock=time.monotonic,
        runs_ahead=runs_ahead,
    )
    return engine, ring


def timed(
    engine: Engine, ring: StepRing, rows: int, context: int, num_steps: int
) -> tuple[float, float]:
    """Seconds of a step, and microseconds in which the host does something for it."""
    params = SamplingParams(2 * num_steps, seed=0, temperature=0.0, ignore_eos=True)
    for number in range(rows):
        prompt = [number % 32] * context
        request = Generate(number, "", "model", prompt, params, cache_domain=str(number))
        assert engine.submit(0, request) is None
    while engine.num_generated_tokens < 2 * rows:
        engine.step()
    begin = time.perf_counter()
    for _ in range(num_steps):
        engine.step()
    seconds = (time.perf_counter() - begin) / num_steps
    steps = ring.last(num_steps)
    return seconds, float(sum(steps[part].mean() for part in HOST_PARTS))
