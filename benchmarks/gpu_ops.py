"""The GPU benchmark's parts about single ops: their bandwidth, and block sizes for the table."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict
from functools import partial
from itertools import product
from typing import Any

import torch

from benchmarks.gpu_timing import Bench
from benchmarks.shaped_model import ShapedModel
from ops import triton_lora, triton_table
from ops.base import PAGE_TOKENS, FusedLinear, LoRABatch, SamplingBatch
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


def _forked(side: torch.cuda.Stream | None) -> AbstractContextManager[object]:
    """What is submitted within goes to that stream, behind what the current one has by now. None:
    to the current one."""
    if side is None:
        return nullcontext()
    side.wait_stream(torch.cuda.current_stream())
    return torch.cuda.stream(side)


def sweep(bench: Bench, model: ShapedModel) -> Iterator[dict[str, Any]]:
    """Block sizes of shrink and expand at gate_up, for triton_table. Wider expands than it allows
    are timed too; whether they are right is for tests/ops/test_cuda.py to say."""
    fused, layers = model.shape.fused_linears["gate_up"], range(model.shape.layers)
    for rows, count, rank in ((8, 1, 16), (32, 8, 16), (32, 32, 16), (128, 32, 64), (2048, 1, 16)):
        lora = model.assign(model.adapters(count, (rank,)), rows, count)
        x = torch.randn(rows, fused.in_features, device=bench.device).to(model.dtype)
        y = torch.zeros(rows, sum(fused.widths), device=bench.device, dtype=model.dtype)

        def shrink(
            blocks: Blocks, x: torch.Tensor = x, lora: LoRABatch = lora
        ) -> list[triton_lora.Planes]:
            return [triton_lora.shrink(x, fused, n, lora, blocks) for n in layers]

        def expand(
            blocks: Blocks,
            planes: triton_lora.Planes,
            y: torch.Tensor = y,
            lora: LoRABatch = lora,
        ) -> None:
            for n in layers:
                triton_lora.expand_add(y, planes, fused, n, lora, blocks)

        def row(
            kind: str, blocks: Blocks, chosen: Blocks, run: Callable[[], object]
        ) -> dict[str, Any]:
            took = bench.seconds(run, most=5) / len(layers)
            return {"kind": kind, "us": took * 1e6, "in_table": blocks == chosen, **asdict(blocks)}

        what = {"T": rows, "adapters": count, "rank": rank}
        chosen = triton_table.shrink(rows, count, fused.in_features, rank, 2)
        for height, depth, split in product((1, 16, 64), (128, 256), (1, 4, 8)):
            blocks = Blocks(height, chosen.columns, depth, split, 4, 3)
            yield what | row("shrink", blocks, chosen, partial(shrink, blocks))
        planes = shrink(chosen)[0]
        chosen = triton_table.expand(rows, count, rank, 2)
        for height, columns, warps in product((1, 16, 64), (32, 64, 128, 256), (4, 8)):
            blocks = Blocks(height, columns, chosen.depth, 1, warps, 1)
            yield what | row("expand", blocks, chosen, partial(expand, blocks, planes))


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
