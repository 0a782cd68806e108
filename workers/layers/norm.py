"""RMS norm (Zhang and Sennrich 2019)."""

from __future__ import annotations

from torch import Tensor

from ops.base import Ops


class RMSNorm:
    """weight float32 [K], a family's offset folded in."""

    __slots__ = ("_eps", "_ops", "_weight")

    def __init__(self, ops: Ops, weight: Tensor, eps: float) -> None:
        self._ops = ops
        self._weight = weight
        self._eps = eps

    def forward(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        """With a residual: adds x to it in place and returns its norm; else the norm of x."""
        return self._ops.rms_norm(x, self._weight, self._eps, residual)
