"""Weight of a linear in panels of 48 output columns, as native/linear.cpp reads it."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from copy import copy

import torch
from torch import Tensor

from ops.block_matrix import BlockMatrix, Weight
from ops.kernel_library import NativePart
from ops.weight_format import BLOCK_SIZES, WeightFormat

PANEL = 48
"""Number of output columns in a panel."""


class PanelLinear:
    """Weights of one linear, each with its own format and its own output columns, and one bias.

    The bias is stored as float32, followed by zeros for one more panel, because kernels read whole
    panels.
    """

    def __init__(
        self, library: ctypes.CDLL, weights: Sequence[Weight], bias: Tensor | None
    ) -> None:
        self.in_features = weights[0].shape[1]
        self.out_features = sum(weight.shape[0] for weight in weights)
        self._parts = [(_format(weight), weight.shape[0]) for weight in weights]
        # The panels of all weights are side by side, because large pages make reads faster.
        self._panels = torch.empty(sum(self._sizes()), dtype=torch.uint8)
        for weight, panels in zip(weights, self._panels.split(self._sizes()), strict=True):
            _pack(library, weight, panels)
        self._bias = None
        if bias is not None:
            self._bias = torch.zeros(self.out_features + PANEL)
            self._bias[: self.out_features] = bias
        self.num_bytes = sum(map(_num_bytes, (self._panels, self._bias)))
        self._point()

    def placed(self, place: Callable[[Tensor], Tensor]) -> PanelLinear:
        moved = copy(self)
        moved._panels = place(self._panels)
        moved._bias = None if self._bias is None else place(self._bias)
        moved._point()
        return moved

    def _sizes(self) -> list[int]:
        return [panel_bytes(*part, self.in_features) for part in self._parts]

    def _point(self) -> None:
        self.num_parts = len(self._parts)
        parts = zip(self._panels.split(self._sizes()), self._parts, strict=True)
        self.parts = (NativePart * self.num_parts)(
            *(NativePart(panels.data_ptr(), *part) for panels, part in parts)
        )
        self.bias_ptr = 0 if self._bias is None else self._bias.data_ptr()


def panel_bytes(format: WeightFormat, columns: int, depth: int) -> int:
    """Returns the size in bytes of the panels of a weight [columns, depth]."""
    if format is WeightFormat.FP32:
        bits = 32.0
    elif format is WeightFormat.BF16:
        bits, depth = 16.0, depth + depth % 2
    else:
        bits = BLOCK_SIZES[format].panel_bits
    return int(-(-columns // PANEL) * PANEL * depth * bits) // 8


def _format(weight: Weight) -> WeightFormat:
    return weight.format if isinstance(weight, BlockMatrix) else WeightFormat.of(weight.dtype)


def _num_bytes(tensor: Tensor | None) -> int:
    return 0 if tensor is None else tensor.nbytes


def _pack(library: ctypes.CDLL, weight: Weight, panels: Tensor) -> None:
    columns, depth = weight.shape
    format = _format(weight)
    if isinstance(weight, BlockMatrix):
        parts = weight.unpack()
        scales, minimums = parts.scales.contiguous(), parts.minimums
        minimums = None if minimums is None else minimums.contiguous()
        library.pack_blocks(
            *(parts.levels.data_ptr(), scales.data_ptr()),
            *(0 if minimums is None else minimums.data_ptr(), format, columns, depth),
            panels.data_ptr(),
        )
    else:
        weight = weight.contiguous()
        library.pack_linear(weight.data_ptr(), format, columns, depth, panels.data_ptr())
