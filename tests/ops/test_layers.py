"""Layers in one call give what their ops give one after the other, bit by bit."""

from __future__ import annotations

import gc
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from ops.base import (
    PAGE_TOKENS,
    PROJECTIONS,
    AdaptedLinear,
    AdapterTables,
    AttentionBatch,
    ForwardBatch,
    FusedLinear,
    KVCacheView,
    KVLayout,
    LayerWeights,
    LoRABatch,
    Norm,
    Ops,
    QKNorm,
    StacksLayers,
)
from ops.cpu import CpuOps
from tests.ops.test_attention import make_batch
from workers.device.weight_image import Arrival
from workers.layers.decoder_layer import OpByOp
from workers.layers.rope_spec import RopeSpec
from workers.layers.rotary import rope_table

HIDDEN, INNER, HEADS, KV_HEADS, DIM, LAYERS = 80, 112, 6, 2, 16, 3
KV = KV_HEADS * DIM


def make_layer(ops: Ops, layer: int, dtype: torch.dtype, heads: int = HEADS) -> LayerWeights:
    """Of the Llama kind."""

    def linear(in_features: int, **widths: int) -> AdaptedLinear:
        out = sum(widths.values())
        weight = (torch.randn(out, in_features) / in_features**0.5).to(dtype)
        bias = torch.randn(out) if "q_proj" in widths else None
        return AdaptedLinear(
            ops.pack_linear(*weight.split(list(widths.values())), bias=bias),
            FusedLinear.of(in_features, **widths),
        )

    return LayerWeights(
        layer,
        heads,
        qkv=linear(HIDDEN, q_proj=heads * DIM, k_proj=KV, v_proj=KV),
        output=linear(heads * DIM, o_proj=HIDDEN),
        gate_up=linear(HIDDEN, gate_proj=INNER, up_proj=INNER),
        down=linear(INNER, down_proj=HIDDEN),
        rope=rope_table(RopeSpec(10000.0), DIM, 256),
        qk_norm=None,
        scale=0.25,
        window=None,
        softcap=None,
        activation="silu",
        post_attention_norm=None,
        mlp_norm=Norm(torch.rand(HIDDEN), 1e-5),
        post_mlp_norm=None,
        following_norm=Norm(torch.rand(HIDDEN), 1e-5),
    )


def like_gemma(layer: LayerWeights) -> LayerWeights:
    """Everything that a layer may have."""
    return replace(
        layer,
        qk_norm=QKNorm(torch.rand(DIM), torch.rand(DIM), 1e-4),
        window=9,
        softcap=4.0,
        activation="gelu_tanh",
        post_attention_norm=Norm(torch.rand(HIDDEN), 1e-6),
        post_mlp_norm=Norm(torch.rand(HIDDEN), 1e-4),
    )


def make_pages(dtype: torch.dtype, cached: list[int], fresh: list[int]) -> tuple:
    layout = KVLayout(LAYERS, KV_HEADS, DIM, dtype)
    pages = -(-max(c + f for c, f in zip(cached, fresh, strict=True)) // PAGE_TOKENS)
    tables = torch.randperm(len(cached) * pages).view(len(cached), pages) * layout.page_bytes
    arena = torch.randn(len(cached) * pages * layout.page_bytes // dtype.itemsize).to(dtype)
    return KVCacheView(arena.view(torch.uint8), layout), make_batch(tables, cached, fresh)


def make_lora(dtype: torch.dtype, segments: list[int], ranks: list[int]) -> LoRABatch:
    """Every slot's factors begin at the arena's start: which they are does not matter here."""
    shape = (len(ranks), LAYERS, len(PROJECTIONS))
    arena = (torch.randn(64 * INNER) / 8).to(dtype).view(torch.uint8)
    rank = torch.tensor(ranks, dtype=torch.int32)[:, None, None].expand(shape).clone()
    rank[0, 1, 3] = 0
    offsets = torch.arange(rank.numel()).view(shape) * 64
    starts = [sum(segments[:n]) for n in range(len(segments) + 1)]
    return LoRABatch(
        arena,
        dtype,
        AdapterTables(offsets, offsets.flip(0).contiguous(), rank),
        torch.tensor(starts, dtype=torch.int32),
        torch.arange(len(segments), dtype=torch.int32) % len(ranks),
        max(ranks),
    )


def run(
    stack, x: Tensor, residual: Tensor, batch: AttentionBatch, kv: KVCacheView, lora
) -> tuple[Tensor, Tensor, Tensor]:
    kv = replace(kv, arena=kv.arena.clone())
    residual = residual.clone()
    ids = torch.empty(0, dtype=torch.int32)  # no layer reads them
    step = ForwardBatch(ids, batch, kv, lora)
    return stack.forward(x, residual, step), residual, kv.arena


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("has_adapters", [False, True])
@pytest.mark.parametrize("kind", ["llama", "gemma"])
@pytest.mark.parametrize("fresh", [[1], [1, 1, 1, 20], [150, 1, 9]])
def test_one_call_gives_the_bits_of_its_ops(cpu: Ops, dtype, has_adapters, kind, fresh):
    torch.manual_seed(len(fresh))
    layers = [make_layer(cpu, layer, dtype) for layer in range(LAYERS)]
    if kind == "gemma":
        layers = [like_gemma(layer) for layer in layers]
    kv, batch = make_pages(dtype, [31, 0, 5, 2][: len(fresh)], fresh)
    lora = make_lora(dtype, fresh[:-1] or fresh, [4, 16]) if has_adapters else None
    x, residual = torch.randn(sum(fresh), HIDDEN), torch.randn(sum(fresh), HIDDEN)
    before = x.clone()
    assert isinstance(cpu, StacksLayers)
    stack = cpu.bind_layers(layers)
    gc.collect()
    expected = run(OpByOp(cpu, layers, Arrival()), x, residual, batch, kv, lora)
    computed = run(stack, x, residual, batch, kv, lora)
    for want, got in zip(expected, computed, strict=True):
        assert torch.equal(want, got)
    assert torch.equal(x, before)
    assert torch.isfinite(computed[0]).all()


@pytest.mark.parametrize("fresh", [[1, 1, 20], [220, 1, 31]])
def test_layers_may_have_different_numbers_of_heads(cpu: CpuOps, fresh: list[int]):
    torch.manual_seed(0)
    layers = [
        make_layer(cpu, layer, torch.bfloat16, heads=2 + 4 * layer) for layer in range(LAYERS)
    ]
    kv, batch = make_pages(torch.bfloat16, [31, 0, 5], fresh)
    x, residual = torch.randn(sum(fresh), HIDDEN), torch.randn(sum(fresh), HIDDEN)
    expected = run(OpByOp(cpu, layers, Arrival()), x, residual, batch, kv, None)
    computed = run(cpu.bind_layers(layers), x, residual, batch, kv, None)
    assert all(map(torch.equal, expected, computed))


@pytest.mark.parametrize("fresh", [[1, 1, 20], [220, 1, 31]])
def test_bits_do_not_depend_on_the_number_of_threads(cpu: CpuOps, fresh: list[int]):
    torch.manual_seed(0)
    stack = cpu.bind_layers([make_layer(cpu, layer, torch.bfloat16) for layer in range(LAYERS)])
    kv, batch = make_pages(torch.bfloat16, [31, 0, 5], fresh)
    lora = make_lora(torch.bfloat16, fresh, [4, 16])
    x, residual = torch.randn(sum(fresh), HIDDEN), torch.randn(sum(fresh), HIDDEN)
    results: list[tuple[Tensor, ...]] = []
    for threads in (1, 3, 5, 2):
        CpuOps(variant=cpu.variant, threads=threads)  # sets the number of the shared library
        results.append(run(stack, x, residual, batch, kv, lora))
    for result in results:
        assert all(map(torch.equal, results[0], result))
