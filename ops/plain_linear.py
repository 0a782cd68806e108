"""Weight of a linear for torch's matrix product."""

from __future__ import annotations

from collections.abc import Callable
from copy import copy

from torch import Tensor


class PlainLinear:
    """Weight [N, K] and bias [N] of a linear, stored unchanged."""

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        self.weight = weight
        self.bias = bias
        self.out_features, self.in_features = weight.shape
        self.num_bytes = weight.nbytes + (0 if bias is None else bias.nbytes)

    def placed(self, place: Callable[[Tensor], Tensor]) -> PlainLinear:
        moved = copy(self)
        moved.weight = place(self.weight)
        moved.bias = None if self.bias is None else place(self.bias)
        return moved
