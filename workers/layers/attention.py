"""Self-attention over paged keys and values."""

from __future__ import annotations

from torch import Tensor

from ops.base import Ops, QKNorm
from workers.batch import ForwardBatch
from workers.layers.linear import Linear


class Attention:
    """qkv projection, rope, attention, output projection.

    rope: float32 [positions, D] of this layer; scale, window, softcap as in `Ops.paged_attention`.
    """

    def __init__(
        self,
        ops: Ops,
        layer: int,
        num_heads: int,
        *,
        scale: float,
        window: int | None,
        softcap: float | None,
        qkv: Linear,
        output: Linear,
        rope: Tensor,
        qk_norm: QKNorm | None,
    ) -> None:
        self._ops = ops
        self._layer = layer
        self._num_heads = num_heads
        self._scale = scale
        self._window = window
        self._softcap = softcap
        self._qkv = qkv
        self._output = output
        self._rope = rope
        self._qk_norm = qk_norm

    def forward(self, x: Tensor, batch: ForwardBatch) -> Tensor:
        """x [T, K] -> [T, K]; writes the rows' keys and values into their pages."""
        ops, rows, kv = self._ops, batch.attention, batch.kv
        qkv = self._qkv.forward(x, batch.lora)
        ops.rope_write_kv(qkv, self._rope, rows, kv, self._layer, self._num_heads, self._qk_norm)
        mixed = ops.paged_attention(
            qkv,
            rows,
            kv,
            self._layer,
            self._num_heads,
            scale=self._scale,
            window=self._window,
            softcap=self._softcap,
        )
        return self._output.forward(mixed, batch.lora)
