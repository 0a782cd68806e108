"""The GPU benchmark's parts about single ops: their bandwidth, their forms, and a long row."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any

import torch

from benchmarks.gpu_timing import Bench
from benchmarks.shaped_model import ShapedModel
from ops import triton_lora, triton_table
from ops.base import PAGE_TOKENS, AttentionBatch, FusedLinear, KVCacheView, LoRABatch, SamplingBatch
from ops.triton_table import Blocks

CONTEXT = 1024


def op_rows(bench: Bench, model: ShapedModel, rows: int) -> Iterator[dict[str, Any]]:
    """Each op alone at a model's shapes, its bytes over its time as a share of the copy's.

    A run goes through all layers, or through as many copies of its input, so that little of it is
    still in the L2 from the run before.
    """
    ops, shape, device = model.ops, model.shape, bench.device
    copies = 1 if bench.tiny else 32
    copy = bench.results["copy_bytes_per_second"]

    def random(*size: int) -> list[torch.Tensor]:
        return [torch.randn(*size, device=device).to(model.dtype) for _ in range(copies)]

    def row(name: str, num_bytes: float, calls: int, run: Callable[[], object]) -> dict[str, Any]:
        took = bench.seconds(run) / calls
        share = num_bytes / took / copy
        what = {"model": shape.name, "op": name, "rows": rows, "us": took * 1e6}
        return {**what, "MB": num_bytes / 1e6, "share_of_copy": share}

    x, residual = random(rows, shape.hidden), random(rows, shape.hidden)
    yield row(
        "rms_norm",
        4 * x[0].nbytes,
        copies,
        lambda: [ops.rms_norm(a, model.norm, 1e-5, b) for a, b in zip(x, residual, strict=True)],
    )
    gates = random(rows, 2 * shape.inner)
    yield row(
        "gated_activation",
        1.5 * gates[0].nbytes,
        copies,
        lambda: [ops.gated_activation(gate, "silu") for gate in gates],
    )
    context = 64 if bench.tiny else CONTEXT
    attention, kv = model.cache(rows, context)(1, context)
    qkv = random(rows, (shape.heads + 2 * shape.kv_heads) * shape.dim)
    layers = range(shape.layers)
    yield row(
        "rope_write_kv",
        2 * qkv[0].nbytes,
        shape.layers,
        lambda: [
            ops.rope_write_kv(qkv[n % copies], model.rope, attention, kv, n, shape.heads)
            for n in layers
        ],
    )
    yield row(
        "paged_attention",
        rows * context * kv.layout.layer_bytes / PAGE_TOKENS,
        shape.layers,
        lambda: [
            ops.paged_attention(qkv[n % copies], attention, kv, n, shape.heads, scale=0.1)
            for n in layers
        ],
    )
    logits = torch.randn(rows, shape.vocab, device=device)
    for name, batch in (
        ("sample", _sampling(device, rows, 0, 1.0)),
        ("sample, top-k and top-p", _sampling(device, rows, 50, 0.9)),
    ):
        yield row(name, logits.nbytes, 1, lambda batch=batch: ops.sample(logits, batch))
    for count, rank in ((1, 16), (8, 16), (32, 16), (32, 64)):
        if count > rows:
            continue
        lora = model.assign(model.adapters(count, (rank,)), rows, count)
        for name, fused in shape.fused_linears.items():
            x, y = random(rows, fused.in_features), random(rows, sum(fused.widths))
            elements = len(fused.widths) * fused.in_features + sum(fused.widths)
            num_bytes = count * rank * elements * 2 + x[0].nbytes + 2 * y[0].nbytes

            def run(
                x: list[torch.Tensor] = x,
                y: list[torch.Tensor] = y,
                fused: FusedLinear = fused,
                lora: LoRABatch = lora,
            ) -> None:
                for n in layers:
                    ops.add_lora(y[n % copies], x[n % copies], fused, n, lora)

            measured = row(f"add_lora {name}", num_bytes, shape.layers, run)
            yield {**measured, "adapters": count, "rank": rank}


def beside_rows(bench: Bench, model: ShapedModel, rows: int) -> Iterator[dict[str, Any]]:
    """A linear with its LoRA, whose shrink comes behind the base product, as in a step, or on a
    stream of its own beside it: both read the same input. A step does so when these figures say
    that it pays."""
    ops, shape, layers = model.ops, model.shape, range(model.shape.layers)
    side = torch.cuda.Stream(bench.device) if bench.device.type == "cuda" else None
    for count, rank in ((1, 16), (32, 16), (32, 64)):
        if count > rows:
            continue
        lora = model.assign(model.adapters(count, (rank,)), rows, count)
        for name, fused in shape.fused_linears.items():
            x = torch.randn(rows, fused.in_features, device=bench.device).to(model.dtype)
            shrinks = triton_table.shrink(rows, count, fused.in_features, rank, x.itemsize)
            expands = triton_table.expand(rows, count, rank, x.itemsize)

            def behind(
                name: str = name,
                fused: FusedLinear = fused,
                lora: LoRABatch = lora,
                x: torch.Tensor = x,
            ) -> None:
                for n in layers:
                    ops.add_lora(ops.linear(x, model.layers[n][name]), x, fused, n, lora)

            def beside(
                name: str = name,
                fused: FusedLinear = fused,
                lora: LoRABatch = lora,
                x: torch.Tensor = x,
                shrinks: Blocks = shrinks,
                expands: Blocks = expands,
            ) -> None:
                for n in layers:
                    with _forked(side):
                        planes = triton_lora.shrink(x, fused, n, lora, shrinks)
                    y = ops.linear(x, model.layers[n][name])
                    if side is not None:
                        torch.cuda.current_stream().wait_stream(side)
                    triton_lora.expand_add(y, planes, fused, n, lora, expands)

            took = bench.seconds(behind), bench.seconds(beside)
            yield {
                "model": shape.name,
                "linear": name,
                "rows": rows,
                "adapters": count,
                "rank": rank,
                "behind_us": took[0] / len(layers) * 1e6,
                "beside_us": took[1] / len(layers) * 1e6,
                "of_behind": took[1] / took[0],
            }


def long_rows(bench: Bench, model: ShapedModel) -> Iterator[dict[str, Any]]:
    """One long context among short ones: attention of a layer waits for it."""
    ops, shape = model.ops, model.shape
    rows, short, long = (2, 16, 48) if bench.tiny else (32, 256, 32_768)
    attention, kv = model.cache(rows, short)(1, short)
    qkv = torch.randn(rows, (shape.heads + 2 * shape.kv_heads) * shape.dim, device=bench.device)
    qkv = qkv.to(model.dtype)

    def us(batch: AttentionBatch, view: KVCacheView, x: torch.Tensor) -> float:
        return 1e6 * bench.seconds(
            lambda: ops.paged_attention(x, batch, view, 0, shape.heads, scale=0.1)
        )

    num_pages = -(-long // PAGE_TOKENS)
    alone, long_kv = model.cache(1, long)(1, long)
    tables = torch.zeros(rows, num_pages, dtype=torch.int64, device=bench.device)
    tables[0] = alone.block_tables[0]
    context = torch.full((rows,), short, dtype=torch.int32, device=bench.device)
    context[0] = long
    mixed = replace(
        attention,
        positions=context - 1,
        context_lens=context,
        block_tables=tables,
        max_context=long,
    )
    yield {
        "rows": rows,
        "short": short,
        "long": long,
        "all_short_us": us(attention, kv, qkv),
        "long_alone_us": us(alone, long_kv, qkv[:1]),
        "one_long_us": us(mixed, long_kv, qkv),
    }


def form_rows(bench: Bench, model: ShapedModel) -> Iterator[dict[str, Any]]:
    """LoRA of a layer by row and by adapter, at the numbers of adapters that graphs are made for:
    `triton_table.reads_by_row` chooses between the two."""
    shape, layers = model.shape, range(model.shape.layers)
    for rows, count in ((2, 2),) if bench.tiny else ((32, 8), (32, 16), (128, 8), (256, 32)):
        lora = model.assign(model.adapters(count, (16,)), rows, count)
        for name, fused in shape.fused_linears.items():
            x = torch.randn(rows, fused.in_features, device=bench.device).to(model.dtype)
            y = torch.zeros(rows, sum(fused.widths), device=bench.device, dtype=model.dtype)
            us: dict[str, float] = {}
            few = min(count, max((rows - 1) // 2, 1))
            for form, segments in (("by_row", rows), ("by_adapter", few)):
                shrinks = triton_table.shrink(rows, segments, fused.in_features, 16, x.itemsize)
                expands = triton_table.expand(rows, segments, 16, x.itemsize)

                def add(
                    shrinks: Blocks = shrinks,
                    expands: Blocks = expands,
                    fused: FusedLinear = fused,
                    x: torch.Tensor = x,
                    y: torch.Tensor = y,
                    lora: LoRABatch = lora,
                ) -> None:
                    for n in layers:
                        planes = triton_lora.shrink(x, fused, n, lora, shrinks)
                        triton_lora.expand_add(y, planes, fused, n, lora, expands)

                us[f"{form}_us"] = 1e6 * bench.seconds(add) / len(layers)
            yield {"linear": name, "rows": rows, "adapters": count, **us}
        del lora


def _forked(side: torch.cuda.Stream | None) -> AbstractContextManager[object]:
    """What is submitted within goes to that stream, behind what the current one has by now. None:
    to the current one."""
    if side is None:
        return nullcontext()
    side.wait_stream(torch.cuda.current_stream())
    return torch.cuda.stream(side)


def _sampling(device: torch.device, rows: int, top_k: int, top_p: float) -> SamplingBatch:
    def full(value: float, dtype: torch.dtype) -> torch.Tensor:
        return torch.full((rows,), value, dtype=dtype, device=device)

    zeros, ints = full(0, torch.float32), full(0, torch.int32)
    longs, starts = full(0, torch.int64), torch.zeros(rows + 1, dtype=torch.int32, device=device)
    return SamplingBatch(
        *(full(1, torch.float32), full(top_k, torch.int32), full(top_p, torch.float32), zeros),
        *(longs, torch.arange(rows, device=device), longs, zeros, zeros, full(1, torch.float32)),
        *(ints[:, None], ints, ints, ints, starts, ints[:0], zeros[:0], False, False, False),
    )
