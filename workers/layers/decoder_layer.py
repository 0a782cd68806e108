"""Computes decoder layers as sequences of ops."""

from __future__ import annotations

from torch import Tensor

from ops.base import (
    AdaptedLinear,
    ForwardBatch,
    LayerAttention,
    LayerStack,
    LayerWeights,
    Norm,
    Ops,
    QKNorm,
    StacksLayers,
)
from workers.device.weight_image import Arrival


def bind_layers(ops: Ops, layers: list[LayerWeights], arrival: Arrival) -> LayerStack:
    """Returns the backend's own layer stack if the backend has one, and if the input of every block
    is a norm of the residual. Returns `OpByOp` otherwise."""
    reads_norms = all(layer.mlp_norm and layer.following_norm for layer in layers)
    if isinstance(ops, StacksLayers) and reads_norms:
        return ops.bind_layers(layers)
    return OpByOp(ops, layers, arrival)


class OpByOp:
    """`LayerStack` that calls single ops, so that it works with any backend. Each layer waits only
    for the copy of its own weights, and is computed while the weights of later layers are being
    copied."""

    def __init__(self, ops: Ops, layers: list[LayerWeights], arrival: Arrival) -> None:
        self._ops = ops
        self._layers = layers
        self._arrival = arrival

    def forward(self, x: Tensor, residual: Tensor, batch: ForwardBatch) -> Tensor:
        for part, layer in enumerate(self._layers, start=1):
            self._arrival.wait(part)
            x = run_layer(self._ops, layer, x, residual, batch)
        return x


def run_layer(
    ops: Ops, w: LayerWeights, x: Tensor, residual: Tensor, batch: ForwardBatch
) -> Tensor:
    """Computes attention and MLP of a layer and adds both to the residual [T, K], in place.

    x: input of the layer [T, K], which is the norm of the residual, or the residual itself if the
    layer has no norm before attention. Returns the input of the next layer.
    """

    def linear(x: Tensor, linear: AdaptedLinear) -> Tensor:
        y = ops.linear(x, linear.weight)
        if batch.lora is not None:
            ops.add_lora(y, x, linear.fused, w.layer, batch.lora)
        return y

    def norm(x: Tensor, norm: Norm, residual: Tensor | None = None) -> Tensor:
        return ops.rms_norm(x, norm.weight, norm.eps, residual)

    def add(x: Tensor, following: Norm | None) -> Tensor:
        """Adds x to the residual. Returns the input of the following block."""
        return residual.add_(x) if following is None else norm(x, following, residual)

    qkv = linear(x, w.qkv)
    if w.wide_qk_norm is not None:
        _norm_wide(ops, qkv, w.wide_qk_norm)
    sizes = (w.layer, w.num_heads, w.scale, w.window, w.softcap)
    at = LayerAttention(batch.attention, batch.kv, *sizes)
    ops.rope_write_kv(qkv, w.rope, at, w.qk_norm)
    x = ops.paged_attention(qkv, at)
    x = linear(x, w.output)
    if w.post_attention_norm is not None:
        x = norm(x, w.post_attention_norm)
    x = add(x, w.mlp_norm)
    x = ops.gated_activation(linear(x, w.gate_up), w.activation)
    x = linear(x, w.down)
    if w.post_mlp_norm is not None:
        x = norm(x, w.post_mlp_norm)
    return add(x, w.following_norm)


def _norm_wide(ops: Ops, qkv: Tensor, norm: QKNorm) -> None:
    """RMS-normalises q over all its heads together, and k over all its heads together, in place."""
    start = 0
    for weight in (norm.q_weight, norm.k_weight):
        part = qkv[:, start : start + len(weight)]
        part.copy_(ops.rms_norm(part.contiguous(), weight, norm.eps))
        start += len(weight)
