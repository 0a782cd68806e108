"""Decoder of a given shape with random weights, which calls `Ops` directly, without a checkpoint or
the engine.

It needs only torch and a checkout, so that it runs on any GPU machine.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from memory.page_key import pages_of
from ops.base import (
    HEAD,
    AdapterTables,
    AttentionBatch,
    FusedLinear,
    KVCacheView,
    KVLayout,
    LayerAttention,
    LoRABatch,
    Ops,
    PackedLinear,
    QKNorm,
)
from workers.device.weight_image import Arrival, WeightImage


@dataclass(frozen=True, slots=True)
class Shape:
    name: str
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    dim: int
    inner: int
    vocab: int
    qk_norm: bool = False

    @property
    def fused_linears(self) -> dict[str, FusedLinear]:
        q, kv = self.heads * self.dim, self.kv_heads * self.dim
        return {
            "qkv": FusedLinear((0, 1, 2), (q, kv, kv), self.hidden),
            "output": FusedLinear((3,), (self.hidden,), q),
            "gate_up": FusedLinear((4, 5), (self.inner, self.inner), self.hidden),
            "down": FusedLinear((6,), (self.hidden,), self.inner),
        }

    @property
    def linear_parameters(self) -> int:
        """Number of weights that a decode step reads, including the head."""
        fused_linears = self.fused_linears.values()
        a_layer = sum(fused.in_features * sum(fused.widths) for fused in fused_linears)
        return self.layers * a_layer + self.hidden * self.vocab

    @property
    def rank_elements(self) -> int:
        """Number of elements that an adapter on all seven projections has for each unit of rank."""
        fused_linears = self.fused_linears.values()
        return self.layers * sum(
            len(fused.widths) * fused.in_features + sum(fused.widths) for fused in fused_linears
        )


SMOLLM2 = Shape("SmolLM2-135M", 30, 576, 9, 3, 64, 1536, 49152)
LLAMA_8B = Shape("Llama-3-8B", 32, 4096, 32, 8, 128, 14336, 128256)
TINY = Shape("tiny", 1, 32, 2, 1, 16, 48, 100, qk_norm=True)


@dataclass(frozen=True, slots=True)
class Batch:
    ids: Tensor
    attention: AttentionBatch
    kv: KVCacheView
    lora: LoRABatch | None


class ShapedModel:
    """Decoder with random weights, which are small enough to keep activations finite through all
    layers."""

    def __init__(
        self,
        ops: Ops,
        shape: Shape,
        dtype: torch.dtype,
        positions: int,
        image: WeightImage | None = None,
    ) -> None:
        """Creates the weights, and places them in `image` if it is given, so that they can be
        swapped. Seeds torch's random numbers, so that two models of the same shape on the same
        device have the same weights."""
        self.ops, self.shape, self.dtype = ops, shape, dtype
        self.arrival = Arrival() if image is None else image.arrival
        device = ops.device
        torch.manual_seed(0)

        def random(*size: int) -> Tensor:
            values = torch.empty(size, dtype=dtype, device=device)
            return values.normal_(0, size[-1] ** -0.5)

        def linear(*size: int) -> PackedLinear:
            packed = ops.pack_linear(random(*size))
            return packed if image is None else packed.placed(image.place)

        def end_part() -> None:
            if image is not None:
                image.end_part()

        self.table = random(shape.vocab, shape.hidden)
        if image is not None:
            self.table = image.place(self.table)
        end_part()
        self.layers: list[dict[str, PackedLinear]] = []
        for _ in range(shape.layers):
            fused_linears = shape.fused_linears.items()
            self.layers.append(
                {
                    name: linear(sum(fused.widths), fused.in_features)
                    for name, fused in fused_linears
                }
            )
            end_part()
        self.head = linear(shape.vocab, shape.hidden)
        end_part()
        self.norm = torch.ones(shape.hidden, device=device)
        ones = torch.ones(shape.dim, device=device)
        self.qk_norm = QKNorm(ones, ones, 1e-6) if shape.qk_norm else None
        half = shape.dim // 2
        angles = torch.arange(positions)[:, None] * 10000.0 ** -(torch.arange(half) / half)
        self.rope = torch.cat((angles.cos(), angles.sin()), dim=1).float().to(device)
        self.layout = KVLayout(shape.layers, shape.kv_heads, shape.dim, dtype)

    def forward(self, batch: Batch) -> Tensor:
        """Returns the logits of all tokens, float32 [T, V]."""
        return self.logits(self.hidden(batch), lora=batch.lora)

    def logits(
        self, hidden: Tensor, out: Tensor | None = None, lora: LoRABatch | None = None
    ) -> Tensor:
        self.arrival.wait(-1)
        logits = self.ops.linear(hidden, self.head)
        if lora is not None:
            fused = FusedLinear((HEAD,), (self.shape.vocab,), self.shape.hidden)
            self.ops.add_lora(logits, hidden, fused, lora.outer_layer, lora)
        return logits.float() if out is None else out.copy_(logits)

    def hidden(self, batch: Batch) -> Tensor:
        """Returns the hidden states after the last norm, [T, K]."""
        ops, fused_linears = self.ops, self.shape.fused_linears
        self.arrival.wait(0)
        residual = ops.embed(batch.ids, self.table)
        if batch.lora is not None:
            ops.add_embedding_lora(residual, batch.ids, batch.lora, 1.0)
        x = ops.rms_norm(residual, self.norm, 1e-5)

        def linear(name: str, x: Tensor, layer: int) -> Tensor:
            y = ops.linear(x, self.layers[layer][name])
            if batch.lora is not None:
                ops.add_lora(y, x, fused_linears[name], layer, batch.lora)
            return y

        scale, heads = self.shape.dim**-0.5, self.shape.heads
        for layer in range(self.shape.layers):
            self.arrival.wait(layer + 1)
            qkv = linear("qkv", x, layer)
            at = LayerAttention(batch.attention, batch.kv, layer, heads, scale)
            ops.rope_write_kv(qkv, self.rope, at, self.qk_norm)
            x = linear("output", ops.paged_attention(qkv, at), layer)
            x = ops.rms_norm(x, self.norm, 1e-5, residual)
            x = linear("down", ops.gated_activation(linear("gate_up", x, layer), "silu"), layer)
            x = ops.rms_norm(x, self.norm, 1e-5, residual)
        return x

    def cache(
        self, seqs: int, context: int
    ) -> Callable[[int, int], tuple[AttentionBatch, KVCacheView]]:
        """Returns a function that makes attention batches over filled KV pages of `seqs` sequences
        with `context` tokens each. Its arguments are the rows of each sequence, and the length of
        each sequence with these rows."""
        pages = pages_of(context)
        device, size = self.ops.device, self.layout.page_bytes
        arena = torch.empty(seqs * pages * size, dtype=torch.uint8, device=device)
        arena.view(self.dtype).normal_()
        tables = (torch.randperm(seqs * pages).view(seqs, pages) * size).to(device)
        view = KVCacheView(arena, self.layout)

        def batch(rows: int, end: int) -> tuple[AttentionBatch, KVCacheView]:
            def int32(values: Tensor) -> Tensor:
                return values.to(torch.int32).to(device)

            return AttentionBatch(
                int32(torch.arange(seqs + 1) * rows),
                int32(torch.arange(seqs).repeat_interleave(rows)),
                int32(torch.arange(end - rows, end).repeat(seqs)),
                int32(torch.full((seqs,), end)),
                tables,
                rows,
                end,
            ), view

        return batch

    def adapters(self, count: int, ranks: tuple[int, ...]) -> LoRABatch:
        """Returns a LoRA batch of `count` adapters on all projections of the layers, whose ranks
        repeat `ranks`. No rows are assigned to them yet; call `assign` for that."""
        shape, layout = self.shape, self.ops.factor_layout
        entries = (count, shape.layers + 1, 7)
        a, b = torch.zeros(entries, dtype=torch.int64), torch.zeros(entries, dtype=torch.int64)
        rank = torch.zeros(entries, dtype=torch.int32)
        at = 0
        for slot in range(count):
            r = ranks[slot % len(ranks)]
            rank[slot, : shape.layers] = r
            for layer in range(shape.layers):
                for fused in shape.fused_linears.values():
                    for projection, width in zip(fused.projections, fused.widths, strict=True):
                        for offset, size in ((a, (r, fused.in_features)), (b, (width, r))):
                            offset[slot, layer, projection] = at
                            at += -(-layout.num_bytes(*size, self.dtype) // 64) * 64
        device = self.ops.device
        arena = torch.empty(at, dtype=torch.uint8, device=device)
        arena.view(self.dtype).normal_(0, 0.02)
        tables = AdapterTables(a.to(device), b.to(device), rank.to(device))
        nothing = torch.zeros(1, dtype=torch.int32, device=device)
        return LoRABatch(arena, self.dtype, tables, nothing, nothing[:0], max(ranks))

    def assign(self, lora: LoRABatch, rows: int, count: int) -> LoRABatch:
        """Returns the batch with `rows` rows, divided among the first `count` adapters."""
        device = self.ops.device
        starts = (torch.arange(count + 1) * rows // count).to(torch.int32).to(device)
        slots = torch.arange(count, dtype=torch.int32, device=device)
        return replace(lora, segment_start=starts, segment_slot=slots)
