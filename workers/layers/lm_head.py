"""Output projection of a model."""

from __future__ import annotations

import torch
from torch import Tensor

from ops.base import Ops, PackedLinear


class LMHead:
    """Output matrix, with a family's scale (Granite) or cap (Gemma 2) on logits."""

    def __init__(self, ops: Ops, weight: PackedLinear, scale: float, softcap: float | None) -> None:
        self._ops = ops
        self._weight = weight
        self._scale = scale
        self._softcap = softcap

    def forward(self, hidden: Tensor, out: Tensor | None = None) -> Tensor:
        """Computes logits: hidden [N, K] -> float32 [N, V], in `out` if given."""
        logits = self._ops.linear(hidden, self._weight)
        logits = logits.to(torch.float32) if out is None else out.copy_(logits)
        if self._scale != 1.0:
            logits.mul_(self._scale)
        if self._softcap is not None:
            logits.div_(self._softcap).tanh_().mul_(self._softcap)
        return logits
