"""Measures alternatives to the block sizes and kernels that `ops.triton_table` chooses by
arithmetic."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from benchmarks.gpu_numerics import sampling_batch
from benchmarks.gpu_timing import Bench
from benchmarks.shaped_model import ShapedModel
from ops import triton_attention, triton_lora, triton_table
from ops.base import FusedLinear, LayerAttention, LoRABatch
from ops.cuda import CudaOps
from ops.triton_table import Blocks

CONTEXTS = ((1, 1024), (1, 32_768), (32, 1024), (256, 1024))
"""Pairs of the number of decoding sequences and the context tokens of each."""


def attention_rows(bench: Bench, model: ShapedModel) -> Iterator[dict[str, Any]]:
    """Yields rows for attention of a layer, by the number of pipeline stages (s) and tokens of a
    tile (t). The first rows are of decoding sequences, the last ones of the last 2,048 tokens of a
    prompt."""
    shape = model.shape
    group = shape.heads // shape.kv_heads
    itemsize = model.dtype.itemsize
    long = triton_table.long_attention(group, shape.dim, itemsize, cuda_ops(model).shared_bytes)
    for num_seqs, context in ((2, 40),) if bench.tiny else CONTEXTS:
        short = triton_table.short_attention(num_seqs, shape.kv_heads, group, context, itemsize)
        blocks = {
            f"s{stages}t{tile}": (replace(short, stages=stages, tile=tile), long)
            for stages in (3, 5, 7)
            for tile in (32, 64)
        }
        yield _attention_row(bench, model, num_seqs, 1, context, blocks)
    for tokens, context in ((9, 40),) if bench.tiny else ((2048, 2048), (2048, 32_768)):
        short = triton_table.short_attention(1, shape.kv_heads, group, context, itemsize)
        blocks = {f"s{stages}": (short, replace(long, stages=stages)) for stages in (2, 3, 5)}
        yield _attention_row(bench, model, 1, tokens, context, blocks)


def _attention_row(
    bench: Bench,
    model: ShapedModel,
    num_seqs: int,
    tokens: int,
    context: int,
    blocks: dict[str, tuple[triton_table.AttentionBlocks, triton_table.AttentionBlocks]],
) -> dict[str, Any]:
    """Returns a row with the microseconds of each of `blocks`. `tokens`: new tokens of each
    sequence."""
    shape = model.shape
    attention, kv = model.cache(num_seqs, context)(tokens, context)
    width = (shape.heads + 2 * shape.kv_heads) * shape.dim
    qkv = torch.randn(num_seqs * tokens, width, device=bench.device).to(model.dtype)
    us: dict[str, float] = {}
    for name, (short, long) in blocks.items():

        def attend(
            short: triton_table.AttentionBlocks = short, long: triton_table.AttentionBlocks = long
        ) -> None:
            for layer in range(shape.layers):
                at = LayerAttention(attention, kv, layer, shape.heads, scale=0.1)
                triton_attention.paged_attention(qkv, at, short, long)

        us[name] = 1e6 * bench.seconds(attend, most=3) / shape.layers
    return {"rows": len(qkv), "context": context, "us": us}


def sampling_rows(bench: Bench, model: ShapedModel) -> Iterator[dict[str, Any]]:
    """Yields rows for sampling without a filter, with top-k 50 at several temperatures, and with
    top-k and top-p."""
    vocab = model.shape.vocab
    samplers: dict[str, dict[str, float]] = {
        "plain": {},
        **{f"T={t}": {"temperature": t, "top_k": 50} for t in (1.0, 0.5, 0.2)},
        "top_p": {"top_k": 50, "top_p": 0.9},
    }
    for rows in (2,) if bench.tiny else (32, 256):
        logits = torch.randn(rows, vocab, device=bench.device) * 3
        us: dict[str, float] = {}
        for name, changes in samplers.items():
            batch = sampling_batch(rows, vocab, bench.device, changes)
            us[name] = 1e6 * bench.seconds(partial(model.ops.sample, logits, batch))
        yield {"rows": rows, "us": us}


def form_rows(bench: Bench, model: ShapedModel) -> Iterator[dict[str, Any]]:
    """Yields rows for LoRA of a layer with the kernels by row and by adapter, at the numbers of
    adapters for which graphs are captured. `triton_table.reads_by_row` chooses between the two."""
    shape, layers = model.shape, range(model.shape.layers)
    overlaps = cuda_ops(model).overlaps
    for rows, count in ((2, 2),) if bench.tiny else ((32, 8), (32, 16), (128, 8), (256, 32)):
        lora = model.assign(model.adapters(count, (16,)), rows, count)
        us: dict[str, dict[str, float]] = {"by_row_us": {}, "by_adapter_us": {}}
        for name, fused in shape.fused_linears.items():
            x = torch.randn(rows, fused.in_features, device=bench.device).to(model.dtype)
            y = torch.zeros(rows, sum(fused.widths), device=bench.device, dtype=model.dtype)
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
                        planes = triton_lora.shrink(x, fused, n, lora, shrinks, overlaps)
                        triton_lora.expand_add(y, planes, fused, n, lora, expands, overlaps)

                us[f"{form}_us"][name] = 1e6 * bench.seconds(add) / len(layers)
        yield {"rows": rows, "adapters": count, **us}
        del lora


def beside_rows(bench: Bench, model: ShapedModel) -> Iterator[dict[str, Any]]:
    """Yields rows for a linear with its LoRA at 32 rows. The shrink runs either after the base
    product, as in a step, or concurrently with it on another stream. Both read the same input."""
    rows = 2 if bench.tiny else 32
    ops, shape, layers = model.ops, model.shape, range(model.shape.layers)
    side = torch.cuda.Stream(bench.device) if bench.device.type == "cuda" else None
    for count, rank in ((1, 16), (32, 16), (32, 64)):
        if count > rows:
            continue
        lora = model.assign(model.adapters(count, (rank,)), rows, count)
        us: dict[str, dict[str, float]] = {"behind_us": {}, "beside_us": {}}
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
                        planes = triton_lora.shrink(x, fused, n, lora, shrinks, False)
                    y = ops.linear(x, model.layers[n][name])
                    if side is not None:
                        torch.cuda.current_stream().wait_stream(side)
                    triton_lora.expand_add(y, planes, fused, n, lora, expands, False)

            us["behind_us"][name] = bench.seconds(behind) / len(layers) * 1e6
            us["beside_us"][name] = bench.seconds(beside) / len(layers) * 1e6
        ratios = {
            name: us["beside_us"][name] / us["behind_us"][name] for name in shape.fused_linears
        }
        yield {"rows": rows, "adapters": count, "rank": rank, **us, "of_behind": ratios}


def _forked(side: torch.cuda.Stream | None) -> AbstractContextManager[object]:
    """Submits work of this context to the stream `side`, after the present work of the current
    stream. If `side` is None, work goes to the current stream."""
    if side is None:
        return nullcontext()
    side.wait_stream(torch.cuda.current_stream())
    return torch.cuda.stream(side)


def cuda_ops(model: ShapedModel) -> CudaOps:
    assert isinstance(model.ops, CudaOps)
    return model.ops
