"""Output projection of a model."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from numpy.typing import NDArray
from torch import Tensor

from ops.base import HEAD, FusedLinear, LoRABatch, Ops, PackedLinear
from workers.layers.table_rows import replace_logits

Head = Callable[[Tensor, NDArray[Any]], Tensor]
"""Function that computes logits, float32 [n, V]. Its arguments are the hidden states [n, K] and the
adapter slot of each row, int32 [n]. Rows without an adapter (-1) are last."""


class LMHead:
    """Output matrix of a model, with the factor (Granite) or the soft cap (Gemma 2) that the model
    family applies to logits."""

    def __init__(self, ops: Ops, weight: PackedLinear, scale: float, softcap: float | None) -> None:
        self._ops = ops
        self._weight = weight
        self._fused = FusedLinear((HEAD,), (weight.out_features,), weight.in_features)
        self._scale = scale
        self._softcap = softcap

    def forward(
        self, hidden: Tensor, out: Tensor | None = None, lora: LoRABatch | None = None
    ) -> Tensor:
        """Computes the logits, float32 [N, V], of the hidden states [N, K]. Writes them to `out` if
        it is given. lora: adapter segments of the rows of `hidden`, not of all tokens of the
        step."""
        logits = self._ops.linear(hidden, self._weight)
        if lora is not None:
            replace_logits(self._ops, logits, hidden, lora)
            self._ops.add_lora(logits, hidden, self._fused, lora.outer_layer, lora)
        logits = logits.to(torch.float32) if out is None else out.copy_(logits)
        if self._scale != 1.0:
            logits.mul_(self._scale)
        if self._softcap is not None:
            logits.div_(self._softcap).tanh_().mul_(self._softcap)
        return logits
