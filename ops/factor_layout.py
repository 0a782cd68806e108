"""Layouts of adapters' factors. Each backend reads one of them.

A factor is a matrix [rows, depth]: A is [rank, K], and scaled B is [N, rank]. A of the embedding is
[V, rank] with contiguous rows in every layout.
"""

from __future__ import annotations

import torch
from torch import Tensor

PANEL_ROWS = 16
"""Number of rows in a panel."""


class FactorLayout:
    """Layout of factors with contiguous rows. name: part of the names of cached images."""

    name = "nr"

    def num_bytes(self, rows: int, depth: int, dtype: torch.dtype) -> int:
        """Returns the size of a packed factor."""
        return rows * depth * dtype.itemsize

    def pack(self, factor: Tensor, dtype: torch.dtype) -> Tensor:
        """Returns the packed factor, one-dimensional, rounded to `dtype`."""
        return factor.to(dtype).flatten()


class PanelLayout(FactorLayout):
    """Layout of factors in panels of `PANEL_ROWS` rows, as native/factors.h describes it. The
    kernels of all variants read it."""

    name = "panels"

    def num_bytes(self, rows: int, depth: int, dtype: torch.dtype) -> int:
        return rows * self._padded(depth, dtype) * dtype.itemsize

    def pack(self, factor: Tensor, dtype: torch.dtype) -> Tensor:
        rows, depth = factor.shape
        padded, per_word = self._padded(depth, dtype), 4 // dtype.itemsize
        words = torch.zeros(rows, padded, dtype=dtype)
        words[:, :depth] = factor
        words = words.view(rows, padded // per_word, per_word)
        whole = rows - rows % PANEL_ROWS
        panels = words[:whole].view(-1, PANEL_ROWS, *words.shape[1:]).transpose(1, 2)
        return torch.cat((panels.flatten(), words[whole:].transpose(0, 1).flatten()))

    @staticmethod
    def _padded(depth: int, dtype: torch.dtype) -> int:
        """Returns the number of elements of a row. Rows of bfloat16 are divided into equal steps of
        at most `PANEL_ROWS` pairs."""
        if dtype is torch.float32:
            return depth
        steps = -(-depth // (2 * PANEL_ROWS))
        return steps * 2 * -(-depth // (2 * steps))


ROWS, PANELS = FactorLayout(), PanelLayout()
