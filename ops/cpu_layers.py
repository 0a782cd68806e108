"""Runs all decoder layers in one C call."""

from __future__ import annotations

import ctypes
import time
from collections.abc import Callable
from ctypes import byref, c_int32

import torch
from torch import Tensor

from ops.base import AdaptedLinear, ForwardBatch, LayerWeights, Norm
from ops.kernel_library import NativeLayer, NativeLinear, NativeNorm, NativeStep
from ops.panel_linear import PanelLinear
from ops.weight_format import WeightFormat


class NativeLayers:
    """Implementation of `LayerStack` on the CPU."""

    def __init__(
        self,
        library: ctypes.CDLL,
        layers: list[LayerWeights],
        after_step: Callable[[float, float], None],
    ) -> None:
        """library: the compiled kernels. after_step: function called after each step with the
        times, in seconds, at which the step began and ended."""
        self._run = library.run_layers
        self._after_step = after_step
        self._layers = layers  # keeps the memory that the structures point to
        self._native = (NativeLayer * len(layers))(*map(_layer, layers))

    def forward(self, x: Tensor, residual: Tensor, batch: ForwardBatch) -> Tensor:
        """Implements `LayerStack.forward`."""
        assert x.dtype is torch.float32 and residual.dtype is torch.float32
        assert x.is_contiguous() and residual.is_contiguous() and residual.shape == x.shape
        assert x.shape[1] == self._layers[0].qkv.weight.in_features
        y = x.clone()
        step = _step(len(x), batch)
        begin = time.perf_counter()
        self._run(self._native, len(self._layers), byref(step), y.data_ptr(), residual.data_ptr())
        self._after_step(begin, time.perf_counter())
        return y


def _layer(w: LayerWeights) -> NativeLayer:
    qk = w.qk_norm
    return NativeLayer(
        qkv=_linear(w.qkv),
        output=_linear(w.output),
        gate_up=_linear(w.gate_up),
        down=_linear(w.down),
        q=_norm(None if qk is None else Norm(qk.q_weight, qk.eps)),
        k=_norm(None if qk is None else Norm(qk.k_weight, qk.eps)),
        post_attention=_norm(w.post_attention_norm),
        mlp=_norm(w.mlp_norm),
        post_mlp=_norm(w.post_mlp_norm),
        following=_norm(w.following_norm),
        rope=w.rope.data_ptr(),
        layer=w.layer,
        num_heads=w.num_heads,
        window=w.window or 0,
        silu=w.activation == "silu",
        scale=w.scale,
        softcap=w.softcap or 0.0,
    )


def _linear(linear: AdaptedLinear) -> NativeLinear:
    weight, fused = linear.weight, linear.fused
    assert isinstance(weight, PanelLinear)
    array = c_int32 * len(fused.widths)
    return NativeLinear(
        parts=weight.parts,
        bias=weight.bias_ptr,
        projections=array(*fused.projections),
        widths=array(*fused.widths),
        num_parts=weight.num_parts,
        num_projections=len(fused.widths),
        in_features=weight.in_features,
        out_features=weight.out_features,
    )


def _norm(norm: Norm | None) -> NativeNorm:
    if norm is None:
        return NativeNorm(weight=0, eps=0.0)
    assert norm.weight.dtype is torch.float32 and norm.weight.is_contiguous()
    return NativeNorm(weight=norm.weight.data_ptr(), eps=norm.eps)


def _step(rows: int, batch: ForwardBatch) -> NativeStep:
    attention, kv, lora = batch.attention, batch.kv, batch.lora
    layout, tables = kv.layout, attention.block_tables
    assert tables.dtype is torch.int64
    step = NativeStep(
        rows=rows,
        num_seqs=len(attention.context_lens),
        max_context=attention.max_context,
        table_stride=tables.stride(0),
        query_start=attention.query_start.data_ptr(),
        token_seq=attention.token_seq.data_ptr(),
        positions=attention.positions.data_ptr(),
        block_tables=tables.data_ptr(),
        arena=kv.arena.data_ptr(),
        layer_bytes=layout.layer_bytes,
        num_kv=layout.num_kv_heads,
        dim=layout.head_dim,
        kv_format=WeightFormat.of(layout.dtype),
        num_segments=0,
    )
    if lora is not None:
        step.num_segments = len(lora.segment_slot)
        step.segment_start = lora.segment_start.data_ptr()
        step.segment_slot = lora.segment_slot.data_ptr()
        step.layer_entries = lora.tables.rank.shape[2]
        step.slot_entries = lora.tables.rank[0].numel()
        step.a_offset = lora.tables.a_offset.data_ptr()
        step.b_offset = lora.tables.b_offset.data_ptr()
        step.rank = lora.tables.rank.data_ptr()
        step.lora_arena = lora.arena.data_ptr()
        step.lora_format = WeightFormat.of(lora.dtype)
    return step
