"""Reads packed factors number by number, from the description of their layout."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from ops.factor_layout import PANELS, FactorLayout


def read_factor(packed: Tensor, rows: int, depth: int, layout: FactorLayout) -> Tensor:
    """Returns the factor [rows, depth] at the start of `packed`."""
    if layout is not PANELS:
        return packed[: rows * depth].view(rows, depth)
    words, per_word = depth, 4 // packed.itemsize
    if per_word == 2:
        steps = math.ceil(depth / 32)
        words = steps * math.ceil(depth / (2 * steps))
    row, k = torch.arange(rows)[:, None], torch.arange(depth)
    first = row // 16 * 16
    width = (rows - first).clamp(max=16)
    word = first * words + k // per_word * width + row - first
    return packed[word * per_word + k % per_word]
