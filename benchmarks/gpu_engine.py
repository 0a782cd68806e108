"""Measures the engine's steps with random weights and adapters, run as CUDA graphs. Decode steps
are measured with and without launching the next step before the previous one has ended."""

from __future__ import annotations

import time
from collections.abc import Iterator
from functools import partial
from itertools import product
from types import SimpleNamespace
from typing import Any, cast

import torch
from torch import Tensor

from adapters.pool.source import FixedAdapters
from adapters.reference import AdapterRef
from benchmarks.gpu_ops import CONTEXT
from benchmarks.gpu_timing import Bench
from benchmarks.shaped_model import TINY, Batch, ShapedModel
from memory.arena import Arena
from memory.kv_cache import KVCache
from memory.page_key import pages_of
from ops.base import PAGE_TOKENS, AdapterTables, ForwardBatch, LoRABatch
from ops.commands import PendingCommands
from workers.execution.batch import ModelBuffers, rank_bound
from workers.execution.engine import Engine
from workers.execution.graph_runner import GraphRunner, Limits, compute_logits
from workers.execution.model_runner import ModelRunner
from workers.models.loading import LoadedModel
from workers.observe.report import EngineReport
from workers.observe.ring import StepRing
from workers.policies.fair_scheduler import fair_scheduler
from workers.scheduling.constraint import Unconstrained
from workers.wire.protocol import Generate, ModelInfo, SamplingParams
from workers.wire.request_check import RequestLimits

HOST_PARTS = ("schedule_us", "build_us", "forward_us", "update_us")


class Shaped:
    """`ShapedModel` with the interface of the runner's models."""

    def __init__(self, model: ShapedModel, max_model_len: int) -> None:
        self._model = model
        self.arrival = model.arrival
        self.plan = SimpleNamespace(kv_layout=model.layout, max_model_len=max_model_len)

    def forward(self, batch: ForwardBatch) -> Tensor:
        return self._model.hidden(Batch(batch.input_ids, batch.attention, batch.kv, batch.lora))

    def logits(
        self, hidden: Tensor, out: Tensor | None = None, lora: LoRABatch | None = None
    ) -> Tensor:
        return self._model.logits(hidden, out, lora)


def engine_rows(bench: Bench, model: ShapedModel, rows: int) -> Iterator[dict[str, Any]]:
    """Yields rows for decode steps of `rows` sequences through the engine.

    - gap_us: time of a step beyond the captured forward pass of the base model alone. It consists
      of adapters, sampling, transfers, and the time in which the device waits for the host.
    - host_us: time in which the host works for a step, without waiting.
    - of_base: tokens per second as a share of the rate without adapters.
    - of_bytes: share of the step's time that reading the weights, KV and adapters would take at the
      rate of a copy.
    """
    num_steps = 2 if bench.tiny else 48
    mixes: tuple[tuple[int, ...], ...] = ((), (16,), (16,) * 8, (16,) * 32)
    if bench.tiny:
        mixes = ((), (4, 2))
    elif rows > 1:
        mixes = ((), (16,) * 8, (16,) * 32)
    context = 20 if bench.tiny else min(CONTEXT, 65_536 // rows)
    attention, kv = model.cache(rows, context)(1, context)
    ids = torch.zeros(rows, dtype=torch.int32, device=bench.device)
    device_s = bench.seconds(partial(model.forward, Batch(ids, attention, kv, None)))
    del attention, kv
    base_s = 0.0
    for ranks, runs_ahead in product(mixes, (True, False)):
        if len(ranks) > rows or not (runs_ahead or bench.tiny or rows == 1):
            continue
        step_s, host_us = _measured(model, rows, context, runs_ahead, ranks, num_steps)
        bench.free_memory()
        if not ranks and runs_ahead:
            base_s = step_s
        shape = model.shape
        num_bytes = 2 * (shape.linear_parameters + sum(ranks) * shape.rank_elements)
        num_bytes += rows * context * model.layout.page_bytes // PAGE_TOKENS
        copy = bench.results.get("copy_bytes_per_second", float("inf"))
        yield {
            "model": shape.name,
            "rows": rows,
            "context": context,
            "adapters": len(ranks),
            "ranks": sorted(set(ranks)),
            "ahead": runs_ahead,
            "ms": step_s * 1e3,
            "of_base": base_s / step_s,
            "of_bytes": num_bytes / copy / step_s,
            "gap_us": (step_s - device_s) * 1e6,
            "host_us": host_us,
            "tokens_s": rows / step_s,
        }


def _measured(
    model: ShapedModel,
    rows: int,
    context: int,
    runs_ahead: bool,
    ranks: tuple[int, ...],
    num_steps: int,
) -> tuple[float, float]:
    """Creates an engine, measures it with `timed`, and drops it."""
    # Twice as many rows as sequences, because the scheduler reserves rows for tenants without a
    # running sequence.
    engine, ring = make_engine(
        model, 2 * rows, context + 4 * num_steps, runs_ahead, model.shape is not TINY, ranks
    )
    return timed(engine, ring, rows, context, num_steps, len(ranks))


def mixed_rows(bench: Bench, model: ShapedModel) -> Iterator[dict[str, Any]]:
    """Yields rows for steps of 32 streams, with and without a prompt of 200 tokens in each step.
    The difference is the delay that arriving prompts cause for running streams."""
    rows, prompt, num_steps = (2, 9, 2) if bench.tiny else (32, 200, 32)
    context = 20 if bench.tiny else CONTEXT
    max_len = context + 6 * num_steps
    for ranks in ((), (4, 2) if bench.tiny else (16,) * 8):
        # Twice as many rows as sequences, because the scheduler reserves rows for tenants without a
        # running sequence.
        engine, ring = make_engine(model, 2 * rows, max_len, True, not bench.tiny, ranks)
        decode_s, _ = timed(engine, ring, rows, context, num_steps, len(ranks), 6 * num_steps)
        # The first prompt is not timed, because it may load kernels.
        _submit_prompt(engine, rows, prompt, ranks)
        _step_and_capture(engine)
        begin = time.perf_counter()
        for number in range(1, num_steps + 1):
            _submit_prompt(engine, rows + number, prompt, ranks)
            engine.step()
        mixed_s = (time.perf_counter() - begin) / num_steps
        steps = ring.last(num_steps)
        del engine
        bench.free_memory()
        yield {
            "rows": rows,
            "adapters": len(ranks),
            "prompt_tokens": prompt,
            "decode_ms": decode_s * 1e3,
            "mixed_ms": mixed_s * 1e3,
            "prefill_tokens_a_step": float(steps["num_prefill_tokens"].mean()),
        }


def _submit_prompt(engine: Engine, number: int, length: int, ranks: tuple[int, ...]) -> None:
    params = SamplingParams(1, seed=0, temperature=0.0, ignore_eos=True)
    slot = str(number % len(ranks)) if ranks else ""
    request = Generate(
        number,
        "",
        "model",
        [number % 32] * length,
        params,
        cache_domain=f"p{number}",
        adapter=AdapterRef(slot, slot) if slot else None,
    )
    assert engine.submit(0, request) is None


def make_engine(
    model: ShapedModel,
    rows: int,
    max_len: int,
    runs_ahead: bool,
    graphs: bool,
    ranks: tuple[int, ...] = (),
) -> tuple[Engine, StepRing]:
    """Creates an engine. `graphs` must be false for the tiny model, because Triton's interpreter
    would compute all padding of the graphs. `ranks`: ranks of the adapters, which are stored after
    the KV pages."""
    device, page_bytes = model.ops.device, model.layout.page_bytes
    num_pages = rows * pages_of(max_len) + rows
    extent_bytes = 8 * page_bytes
    arena = Arena(-(-num_pages // 8) * extent_bytes, extent_bytes, first_byte=page_bytes)
    first = page_bytes + arena.num_bytes
    lora = model.adapters(max(len(ranks), 1), ranks or (1,))
    memory = torch.empty(first + lora.arena.nbytes, dtype=torch.uint8, device=device)
    memory[first:] = lora.arena
    tables = lora.tables
    tables = AdapterTables(tables.a_offset + first, tables.b_offset + first, tables.rank)
    del lora
    kv = KVCache(arena, "model", page_bytes)
    tokens = torch.zeros(rows, max_len, dtype=torch.int32, device=device)
    pool = FixedAdapters({str(slot): rank for slot, rank in enumerate(ranks)})
    num_slots, vocab = len(tables.rank), model.shape.vocab
    max_tokens = 2048
    buffers = ModelBuffers(memory, tokens, tables)
    parts = cast(LoadedModel, Shaped(model, max_len)), model.ops, buffers
    limits = Limits(rows, max_tokens, max_len, num_slots, rank_bound(max(ranks, default=0)), vocab)
    compute = partial(compute_logits, parts[0], buffers)
    runner = ModelRunner(*parts, GraphRunner(limits, model.ops, compute) if graphs else None)
    scheduler = fair_scheduler(
        *(kv, pool, PendingCommands()), max_num_seqs=rows, max_batched_tokens=max_tokens
    )
    ring = StepRing()
    info = ModelInfo("model", "model", max_len)
    engine = Engine(
        *(info, scheduler, runner),
        EngineReport("model", scheduler, ring),
        Unconstrained(),
        RequestLimits(max_len, kv.num_total, vocab, frozenset()),
        clock=time.monotonic,
        runs_ahead=runs_ahead,
    )
    return engine, ring


def timed(
    engine: Engine,
    ring: StepRing,
    rows: int,
    context: int,
    num_steps: int,
    num_adapters: int = 0,
    num_tokens: int = 0,
) -> tuple[float, float]:
    """Returns the mean seconds of a decode step, and the mean microseconds of the host's work for a
    step. `num_tokens`: maximum number of tokens that each sequence generates. The default 0 allows
    four times `num_steps`."""
    max_tokens = num_tokens or 4 * num_steps
    params = SamplingParams(max_tokens, seed=0, temperature=0.0, ignore_eos=True)
    for number in range(rows):
        prompt = [number % 32] * context
        slot = str(number % num_adapters) if num_adapters else ""
        adapter = AdapterRef(slot, slot) if slot else None
        domain = str(number)
        request = Generate(
            number, "", "model", prompt, params, cache_domain=domain, adapter=adapter
        )
        assert engine.submit(0, request) is None
    while not _all_generate(ring, rows):
        engine.step()
    _step_and_capture(engine)
    begin = time.perf_counter()
    for _ in range(num_steps):
        engine.step()
    seconds = (time.perf_counter() - begin) / num_steps
    steps = ring.last(num_steps)
    return seconds, float(sum(steps[part].mean() for part in HOST_PARTS))


def _step_and_capture(engine: Engine) -> None:
    """Runs a step, and captures the graph that it lacked."""
    engine.step()
    graphs = cast(ModelRunner, engine.runner).graphs
    if graphs is not None and graphs.can_capture:
        graphs.capture_next()


def _all_generate(ring: StepRing, rows: int) -> bool:
    return any(
        step["num_sequences"] == rows and step["num_prefill_tokens"] == 0 for step in ring.last(1)
    )
