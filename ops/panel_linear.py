"""A linear's weight as the C++ kernels want it."""

from __future__ import annotations

from collections.abc import Callable
from copy import copy

import torch
from torch import Tensor

from ops.weight_format import WeightFormat

PANEL = 48
"""Output columns that a packed weight keeps together; see native/linear.cpp."""


class PanelLinear:
    """A weight in panels, and its bias float32, padded to whole panels."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        self.format = WeightFormat.of(weight.dtype)
        self.out_features, self.in_features = weight.shape
        rows = -(-self.out_features // PANEL) * PANEL
        multiple = self.format.depth_multiple
        depth = -(-self.in_features // multiple) * multiple
        self.panels = torch.empty(rows * depth, dtype=weight.dtype)
        self.bias = None
        if bias is not None:
            self.bias = torch.zeros(rows)
            self.bias[: self.out_features] = bias
        self.num_bytes = self.panels.nbytes + (0 if self.bias is None else self.bias.nbytes)
        self._point()

    def placed(self, place: Callable[[Tensor], Tensor]) -> PanelLinear:
        moved = copy(self)
        moved.panels = place(self.panels)
        moved.bias = None if self.bias is None else place(self.bias)
        moved._point()
        return moved

    def _point(self) -> None:
        self.panels_ptr = self.panels.data_ptr()
        self.bias_ptr = 0 if self.bias is None else self.bias.data_ptr()
