"""Measures single ops of the `cuda` backend at a served model's shapes, in bytes and FLOP per
second."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import torch

from benchmarks.gpu_timing import Bench
from benchmarks.shaped_model import Batch, ShapedModel
from memory.page_key import pages_of
from ops.base import (
    PAGE_TOKENS,
    AttentionBatch,
    FusedLinear,
    KVCacheView,
    LayerAttention,
    LoRABatch,
)

CONTEXT = 1024


def op_rows(bench: Bench, model: ShapedModel, rows: int) -> Iterator[dict[str, Any]]:
    """Yields a row for each op, with its bytes per second as a share of a copy's rate.

    A run calls the op for all layers, or for 32 copies of its input, so that little of the input is
    still in the L2 cache from the previous run.
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
    calls = [LayerAttention(attention, kv, n, shape.heads, scale=0.1) for n in layers]
    yield row(
        "rope_write_kv",
        2 * qkv[0].nbytes,
        shape.layers,
        lambda: [ops.rope_write_kv(qkv[n % copies], model.rope, at) for n, at in enumerate(calls)],
    )
    yield row(
        "paged_attention",
        rows * context * kv.layout.layer_bytes / PAGE_TOKENS,
        shape.layers,
        lambda: [ops.paged_attention(qkv[n % copies], at) for n, at in enumerate(calls)],
    )
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


def long_rows(bench: Bench, model: ShapedModel) -> Iterator[dict[str, Any]]:
    """Yields a row for attention of one layer with a long context among short ones, which the whole
    layer waits for."""
    ops, shape = model.ops, model.shape
    rows, short, long = (2, 16, 48) if bench.tiny else (32, 256, 32_768)
    attention, kv = model.cache(rows, short)(1, short)
    qkv = torch.randn(rows, (shape.heads + 2 * shape.kv_heads) * shape.dim, device=bench.device)
    qkv = qkv.to(model.dtype)

    def us(batch: AttentionBatch, view: KVCacheView, x: torch.Tensor) -> float:
        at = LayerAttention(batch, view, 0, shape.heads, scale=0.1)
        return 1e6 * bench.seconds(lambda: ops.paged_attention(x, at))

    num_pages = pages_of(long)
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


def product_rows(bench: Bench, model: ShapedModel) -> Iterator[dict[str, Any]]:
    """Yields rows for the linears of all layers by cuBLAS, with the bytes of weights and
    activations per second as a share of a copy's rate."""
    shape, copy = model.shape, bench.results["copy_bytes_per_second"]
    for rows in (2,) if bench.tiny else (1, 16, 32, 64, 128, 256):
        num_bytes = seconds = 0.0
        us: dict[str, float] = {}
        for name, fused in shape.fused_linears.items():
            x = torch.randn(rows, fused.in_features, device=bench.device).to(model.dtype)

            def multiply(name: str = name, x: torch.Tensor = x) -> None:
                for layer in model.layers:
                    model.ops.linear(x, layer[name])

            took = bench.seconds(multiply)
            seconds += took
            us[name] = took / shape.layers * 1e6
            width = sum(fused.widths)
            elements = fused.in_features * width + rows * (fused.in_features + width)
            num_bytes += shape.layers * elements * model.dtype.itemsize
        yield {"rows": rows, "us": us, "share_of_copy": num_bytes / seconds / copy}


def prefill_rows(bench: Bench, model: ShapedModel) -> Iterator[dict[str, Any]]:
    """Yields rows for the eager forward pass of a chunk of one prompt. The head is computed for
    every token. The FLOP of linears and of attention are counted."""
    shape = model.shape
    for rows in (18,) if bench.tiny else (512, 2048, 8192):
        attention, kv = model.cache(1, rows)(rows, rows)
        ids = torch.zeros(rows, dtype=torch.int32, device=bench.device)
        flops = 2.0 * rows * shape.linear_parameters
        flops += 2.0 * shape.layers * shape.heads * shape.dim * rows * rows
        adapters = model.adapters(1, (16,))
        for lora in (None, model.assign(adapters, rows, 1)):
            batch = Batch(ids, attention, kv, lora)
            took = bench.seconds(lambda b=batch: model.forward(b), captured=False, most=3)
            yield {
                "rows": rows,
                "lora": lora is not None,
                "ms": took * 1e3,
                "TFLOP_s": flops / took / 1e12,
            }
