"""Integer matrix with one scale for each row and group of columns, and its exact conversion to
block formats."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ops.weight_format import BLOCK_SIZES, WeightFormat
from workers.importer.safetensors_file import Blocks

LEVELS = {WeightFormat.Q4_0: (-8, 7), WeightFormat.Q8_0: (-128, 127)}
"""Lowest and highest integer of the block formats to which integers are converted. The smallest
format is first."""


class GroupedIntegers(NamedTuple):
    """Matrix [N, K] whose elements are (code - zero) * scale.

    zeros, scales: zero point and scale of each row and group, [N, G]. If `zeros` is an int, it is
    the zero point of the whole matrix. groups: index of each column's group.
    """

    codes: NDArray[Any]
    zeros: NDArray[Any] | int
    scales: NDArray[np.float32]
    groups: NDArray[np.int32]

    def values(self) -> NDArray[np.float32]:
        """Returns the elements of the matrix, computed in float32."""
        values = self._levels().astype(np.float32)
        values *= self.scales[:, self.groups]
        return values

    def format(self) -> WeightFormat | None:
        """Returns the smallest block format that can hold the matrix exactly, or None if there is
        no such format."""
        block = BLOCK_SIZES[WeightFormat.Q8_0].block
        if len(self.groups) % block:
            return None
        groups = self.groups.reshape(-1, block)
        if (groups != groups[:, :1]).any():
            return None
        with np.errstate(over="ignore"):
            halfs = self.scales.astype(np.float16)
        if not (np.isfinite(halfs) & (halfs == self.scales)).all():
            return None
        levels = self._levels()
        least, most = levels.min(), levels.max()
        return next(
            (each for each, (low, high) in LEVELS.items() if low <= least and most <= high), None
        )

    def blocks(self, format: WeightFormat) -> Blocks:
        """Returns the matrix in a block-quantised format, uint8 [N, bytes of a row]. format: format
        that the method `format` returned."""
        sizes = BLOCK_SIZES[format]
        scales = self.scales[:, self.groups[:: sizes.block]].astype(np.float16)
        levels = self._levels().reshape(*scales.shape, sizes.block)
        if format is WeightFormat.Q8_0:
            quants = levels.astype(np.int8).view(np.uint8)
        else:
            low, high = np.split((levels + 8).astype(np.uint8), 2, axis=-1)
            quants = low | high << np.uint8(4)
        blocks = np.concatenate([scales[..., None].view(np.uint8), quants], axis=-1)
        return blocks.reshape(len(scales), -1)

    def _levels(self) -> NDArray[np.int16]:
        zeros = np.asarray(self.zeros, np.int16)
        return self.codes.astype(np.int16) - (zeros[:, self.groups] if zeros.ndim else zeros)
