"""`python -m benchmarks.ops`: measures each op at SmolLM2-135M's shapes, and compares it with a
bound for this machine.

The bound of a row is the larger of two times: its bytes at the measured read bandwidth, and its
floating-point operations at the measured peak rate. Times are the shortest of many runs with
`--threads` threads.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from gguf import GGMLQuantizationType
from gguf.quants import quantize
from rich.console import Console
from rich.table import Table
from torch import Tensor

from benchmarks.shaped_model import SMOLLM2, ShapedModel
from memory.page_key import pages_of
from ops.base import (
    AdaptedLinear,
    AdapterTables,
    AttentionBatch,
    ForwardBatch,
    FusedLinear,
    KVCacheView,
    KVLayout,
    LayerAttention,
    LayerWeights,
    LoRABatch,
    Norm,
    Ops,
    PackedLinear,
    StacksLayers,
)
from ops.block_matrix import BlockMatrix
from ops.registry import select
from ops.weight_format import WeightFormat

LAYERS, HIDDEN, HEADS, KV_HEADS, DIM, INNER, VOCAB = 30, 576, 9, 3, 64, 1536, 49152
QKV = (HEADS + 2 * KV_HEADS) * DIM
FUSED_LINEARS = (
    FusedLinear((0, 1, 2), (HIDDEN, KV_HEADS * DIM, KV_HEADS * DIM), HIDDEN),
    FusedLinear((3,), (HIDDEN,), HIDDEN),
    FusedLinear((4, 5), (INNER, INNER), HIDDEN),
    FusedLinear((6,), (HIDDEN,), INNER),
)
CONTEXT = 64
RANKS = (8, 8, 16, 16, 32, 32, 64, 64)


@dataclass(frozen=True, slots=True)
class Row:
    """Measurement of an op. `run` calls the op `calls` times. `others` are other implementations of
    the same work, by name."""

    name: str
    run: Callable[[], object]
    calls: int
    num_bytes: float
    flops: float
    others: dict[str, Callable[[], object]]


def best_seconds(run: Callable[[], object], budget: float = 0.25) -> float:
    run()
    best, end = float("inf"), time.perf_counter() + budget
    while time.perf_counter() < end:
        start = time.perf_counter()
        run()
        best = min(best, time.perf_counter() - start)
    return best


def read_bandwidth() -> float:
    """Returns the bytes per second of a sum over 256 MiB."""
    data = torch.ones(1 << 26)
    return data.nbytes / best_seconds(data.sum, 1.0)


def multiply_add_peak(dtype: torch.dtype) -> float:
    """Returns the floating-point operations per second of a matrix product that fits in the cache.
    Takes the faster of float32 and `dtype`."""
    times: list[float] = []
    for kind in {torch.float32, dtype}:
        a, b = torch.randn(768, 768).to(kind), torch.randn(768, 768).to(kind)
        times.append(best_seconds(lambda a=a, b=b: a @ b, 1.0))
    return 2 * 768**3 / min(times)


def linear_rows(ops: Ops, dtype: torch.dtype) -> Iterator[Row]:
    """Yields rows for linears. Each run uses thirty different weights, so that every weight is read
    from memory and not from the cache."""
    shapes = (
        (HIDDEN, QKV),
        (HIDDEN, HIDDEN),
        (HIDDEN, 2 * INNER),
        (INNER, HIDDEN),
        (HIDDEN, VOCAB),
    )
    for depth, columns in shapes:
        count = 1 if columns == VOCAB else LAYERS
        weights = [torch.randn(columns, depth).to(dtype) for _ in range(count)]
        packed = [ops.pack_linear(weight) for weight in weights]
        for rows in (1, 8, 32, 256):
            if columns == VOCAB and rows > 32:
                continue
            x = torch.randn(rows, depth)
            yield Row(
                f"linear {depth}x{columns}, {rows} rows",
                lambda x=x, packed=packed: [ops.linear(x, w) for w in packed],
                count,
                weights[0].nbytes + 4.0 * rows * (depth + columns),
                2.0 * rows * depth * columns,
                torch_linears(x, weights, dtype),
            )


def torch_linears(x: Tensor, weights: list[Tensor], dtype: torch.dtype) -> dict[str, Any]:
    narrow, linear = x.to(dtype), torch.nn.functional.linear
    prepack = torch.ops.mkldnn._reorder_linear_weight
    packed = [prepack(w.to_mkldnn() if dtype is torch.float32 else w, len(x)) for w in weights]
    run = torch.ops.mkldnn._linear_pointwise
    return {
        "torch": lambda: [linear(narrow, w) for w in weights],
        "oneDNN": lambda: [run(narrow, w, None, "none", [], "") for w in packed],
    }


def attention_rows(ops: Ops, dtype: torch.dtype) -> Iterator[Row]:
    layout = KVLayout(LAYERS, KV_HEADS, DIM, dtype)
    sdpa = torch.nn.functional.scaled_dot_product_attention
    cases = ((1, 1, 256), (8, 1, 256), (32, 1, 256), (1, 1, 4096), (1, 512, 512), (1, 512, 2048))
    for seqs, rows, context in cases:
        pages = pages_of(context)
        arena = torch.zeros(seqs * pages * layout.page_bytes, dtype=torch.uint8)
        tables = torch.randperm(seqs * pages).view(seqs, pages) * layout.page_bytes
        batch = AttentionBatch(
            torch.arange(seqs + 1).int() * rows,
            torch.arange(seqs).int().repeat_interleave(rows),
            torch.arange(context - rows, context).int().repeat(seqs),
            torch.full((seqs,), context).int(),
            tables,
            rows,
            context,
        )
        qkv, view = torch.randn(seqs * rows, QKV), KVCacheView(arena, layout)
        seen = seqs * sum(range(context - rows + 1, context + 1))
        query = torch.randn(seqs, HEADS, rows, DIM, dtype=dtype)
        keys = torch.randn(seqs, KV_HEADS, context, DIM, dtype=dtype)
        mask = torch.ones(rows, context, dtype=torch.bool).tril(context - rows)
        yield Row(
            f"attention {seqs} seqs x {rows} rows, context {context}",
            lambda qkv=qkv, batch=batch, view=view: [
                ops.paged_attention(qkv, LayerAttention(batch, view, layer, HEADS, scale=0.125))
                for layer in range(LAYERS)
            ],
            LAYERS,
            seqs * context * layout.layer_bytes / 16,
            4.0 * seen * HEADS * DIM,
            {
                "torch": lambda query=query, keys=keys, mask=mask: [
                    sdpa(query, keys, keys, attn_mask=mask, enable_gqa=True) for _ in range(LAYERS)
                ]
            },
        )


def lora_rows(ops: Ops, dtype: torch.dtype) -> Iterator[Row]:
    """Yields rows for the LoRA of a whole step, with all four linears of all layers."""
    cases = {
        "E, 8 rows": (RANKS, [1] * 8),
        "E, 32 rows": (RANKS, [4] * 8),
        "T, 32 rows": ((16,) * 8 + (8,) * 16 + (32,) * 4 + (64,) * 4, [1] * 32),
        "rank 16, 512 rows": ((16,), [512]),
        "rank 64, 512 rows": ((64,), [512]),
    }
    for name, (slot_ranks, rows) in cases.items():
        lora, num_bytes = make_lora(ops, slot_ranks, rows, dtype)
        total = sum(rows)
        inputs = {fused: torch.randn(total, fused.in_features) for fused in FUSED_LINEARS}
        outputs = {fused: torch.zeros(total, sum(fused.widths)) for fused in FUSED_LINEARS}
        work = sum(
            2.0 * r * n * (fused.in_features + width)
            for r, n in zip(slot_ranks, rows, strict=True)
            for fused in FUSED_LINEARS
            for width in fused.widths
        )

        def run(lora=lora, inputs=inputs, outputs=outputs) -> None:
            for layer in range(LAYERS):
                for fused in FUSED_LINEARS:
                    ops.add_lora(outputs[fused], inputs[fused], fused, layer, lora)

        yield Row(f"add_lora {name}, a step", run, 1, num_bytes, work * LAYERS, {})


def make_lora(
    ops: Ops, ranks: tuple[int, ...], rows: list[int], dtype: torch.dtype
) -> tuple[LoRABatch, int]:
    """Returns a step with an adapter of each rank, and the bytes of the adapters."""
    shape = (len(ranks), LAYERS, 7)
    a_offset, b_offset = (
        torch.zeros(shape, dtype=torch.int64),
        torch.zeros(shape, dtype=torch.int64),
    )
    rank = torch.tensor(ranks, dtype=torch.int32)[:, None, None].expand(shape).contiguous()
    at = 0
    for slot, r in enumerate(ranks):
        for layer in range(LAYERS):
            for fused in FUSED_LINEARS:
                for projection, width in zip(fused.projections, fused.widths, strict=True):
                    for offset, shape in (
                        (a_offset, (r, fused.in_features)),
                        (b_offset, (width, r)),
                    ):
                        offset[slot, layer, projection] = at
                        at += ops.factor_layout.num_bytes(*shape, dtype)
    starts = torch.tensor([0, *torch.tensor(rows).cumsum(0).tolist()], dtype=torch.int32)
    slots = torch.arange(len(ranks), dtype=torch.int32)
    arena = torch.zeros(at, dtype=torch.uint8)
    return LoRABatch(arena, dtype, AdapterTables(a_offset, b_offset, rank), starts, slots, 64), at


def other_rows(ops: Ops) -> Iterator[Row]:
    silu = torch.nn.functional.silu
    for rows in (1, 32, 512):
        x, weight = torch.randn(rows, HIDDEN), torch.ones(HIDDEN)
        yield Row(
            f"rms_norm {rows} rows",
            lambda x=x, weight=weight: ops.rms_norm(x, weight, 1e-5),
            *(1, 8.0 * x.numel(), 4.0 * x.numel()),
            {"torch": lambda x=x, w=weight: torch.nn.functional.rms_norm(x, (HIDDEN,), w, 1e-5)},
        )
        gate = torch.randn(rows, 2 * INNER)
        yield Row(
            f"gated_activation {rows} rows",
            lambda gate=gate: ops.gated_activation(gate, "silu"),
            *(1, 6.0 * gate.numel(), 20.0 * gate.numel()),
            {"torch": lambda g=gate: silu(g[:, :INNER]) * g[:, INNER:]},
        )


def step_rows(ops: Ops, dtype: torch.dtype) -> Iterator[Row]:
    """Yields rows for all linears of a step together, and for its output head, by the number of the
    step's tokens."""
    shapes = ((HIDDEN, QKV), (HIDDEN, HIDDEN), (HIDDEN, 2 * INNER), (INNER, HIDDEN))
    for format in (None, WeightFormat.Q8_0, WeightFormat.Q4_0):
        name = "" if format is None else f" in {format.name}"
        layers = [packed_copies(ops, columns, depth, dtype, format) for depth, columns in shapes]
        (head,), head_bytes = packed_copies(ops, VOCAB, HIDDEN, dtype, format, 1)
        for rows in (1, 8, 32, 512):
            inputs = [torch.randn(rows, depth) for depth, _ in shapes]
            yield Row(
                f"{rows} rows: linears{name}",
                lambda inputs=inputs, layers=layers: [
                    ops.linear(x, weight)
                    for x, (packed, _) in zip(inputs, layers, strict=True)
                    for weight in packed
                ],
                1,
                float(sum(LAYERS * num_bytes for _, num_bytes in layers)),
                2.0 * rows * LAYERS * sum(depth * columns for depth, columns in shapes),
                {},
            )
            sampled = inputs[0][:32].contiguous()
            yield Row(
                f"{rows} rows: head{name}, {len(sampled)} sampled",
                lambda x=sampled, weight=head: ops.linear(x, weight),
                *(1, float(head_bytes), 2.0 * sampled.numel() * VOCAB),
                {},
            )


def packed_copies(
    ops: Ops,
    columns: int,
    depth: int,
    dtype: torch.dtype,
    format: WeightFormat | None,
    count: int = LAYERS,
) -> tuple[list[PackedLinear], int]:
    """Returns `count` separate copies of a packed matrix, and the bytes of one."""
    weight = torch.randn(columns, depth)
    if format is None:
        return [ops.pack_linear(weight.to(dtype)) for _ in range(count)], 2 * weight.numel()
    blocks = torch.from_numpy(quantize(weight.numpy(), GGMLQuantizationType[format.name]))
    return [ops.pack_linear(BlockMatrix(format, blocks)) for _ in range(count)], blocks.nbytes


def show_adapters(ops: Ops, dtype: torch.dtype, bandwidth: float, seconds: float = 5.0) -> None:
    """Prints the time that eight adapters add to the layers of a step, measured in turns with the
    layers alone, and its ratio to the time in which the adapters' bytes can be read."""
    assert isinstance(ops, StacksLayers)
    model = ShapedModel(ops, SMOLLM2, dtype, CONTEXT)
    stack = ops.bind_layers([layer_weights(model, layer) for layer in range(LAYERS)])
    adapters = model.adapters(len(RANKS), RANKS)
    read = adapters.arena.nbytes / bandwidth
    table = Table(title=f"layers of a step with adapters of ranks {', '.join(map(str, RANKS))}")
    for column in ("rows", "base ms", "added ms", "bytes ms", "added / bytes", "share of base"):
        table.add_column(column, justify="right")
    for rows in (8, 32, 512):
        attention, kv = model.cache(min(rows, 32), CONTEXT)(max(rows // 32, 1), CONTEXT)
        x, ids = torch.randn(rows, HIDDEN), torch.zeros(rows, dtype=torch.int32)
        alone = ForwardBatch(ids, attention, kv, None)
        batches = alone, replace(alone, lora=model.assign(adapters, rows, len(RANKS)))
        times: list[list[float]] = [[], []]
        end = time.perf_counter() + seconds
        while len(times[1]) < 3 or time.perf_counter() < end:
            for batch, of in zip(batches, times, strict=True):
                begin = time.perf_counter()
                stack.forward(x, x.clone(), batch)
                of.append(time.perf_counter() - begin)
        base, both = map(min, times)
        shown = (1e3 * base, 1e3 * (both - base), 1e3 * read, (both - base) / read, base / both)
        table.add_row(str(rows), *(f"{value:.2f}" for value in shown))
    Console(width=120).print(table)


def layer_weights(model: ShapedModel, layer: int) -> LayerWeights:
    packed, norm = model.layers[layer], Norm(model.norm, 1e-5)
    qkv, output, gate_up, down = (
        AdaptedLinear(packed[name], fused) for name, fused in model.shape.fused_linears.items()
    )
    return LayerWeights(
        *(layer, HEADS, qkv, output, gate_up, down, model.rope, None, DIM**-0.5, None, None),
        *("silu", None, norm, None, norm),
    )


def show(rows: Iterator[Row], bandwidth: float, peak: float, title: str) -> None:
    table = Table(title=title)
    table.add_column("op")
    for column in ("µs a call", "GB/s", "GFLOP/s", "% of bound", "torch µs", "oneDNN µs"):
        table.add_column(column, justify="right")
    for row in rows:
        seconds = best_seconds(row.run) / row.calls
        bound = max(row.num_bytes / bandwidth, row.flops / peak)
        others = {name: best_seconds(run) / row.calls for name, run in row.others.items()}
        shown = [f"{others[n] * 1e6:,.0f}" if n in others else "" for n in ("torch", "oneDNN")]
        table.add_row(
            row.name,
            f"{seconds * 1e6:,.1f}",
            f"{row.num_bytes / seconds / 1e9:.1f}",
            f"{row.flops / seconds / 1e9:.0f}",
            f"{100 * bound / seconds:.0f}",
            *shown,
        )
    Console(width=120).print(table)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--backend", default="cpu")
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--only", choices=("linear", "attention", "lora", "other", "step"))
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    torch.set_grad_enabled(False)
    ops, dtype = select(options.backend), getattr(torch, options.dtype)
    bandwidth, peak = read_bandwidth(), multiply_add_peak(dtype)
    print(f"{options.threads} threads: {bandwidth / 1e9:.1f} GB/s, {peak / 1e9:.0f} GFLOP/s")
    groups = {
        "linear": lambda: linear_rows(ops, dtype),
        "attention": lambda: attention_rows(ops, dtype),
        "lora": lambda: lora_rows(ops, dtype),
        "other": lambda: other_rows(ops),
        "step": lambda: step_rows(ops, dtype),
    }
    if options.only in (None, "step"):
        show_adapters(ops, dtype, bandwidth)
    for name, rows in groups.items():
        if options.only in (None, name):
            show(rows(), bandwidth, peak, f"{name}, {options.dtype}")


if __name__ == "__main__":
    main()
