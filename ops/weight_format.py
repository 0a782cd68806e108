"""Encodings of numbers in weights, KV pages and adapters' factors."""

from __future__ import annotations

from enum import IntEnum
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    import torch


class BlockSizes(NamedTuple):
    """Sizes of a block. block: number of elements. block_bytes: number of bytes. group: number of
    elements that share a scale. panel_bits: bits per element in the CPU backend's panels, including
    scales and minimums."""

    block: int
    block_bytes: int
    group: int
    panel_bits: float


class WeightFormat(IntEnum):
    """Storage format of numbers. The values are the same as in `WeightFormat` of native/vector.h.

    The formats from Q8_0 on are GGUF's block formats, see `ops.block_matrix`.
    """

    FP32 = 0
    BF16 = 1
    Q8_0 = 2
    Q4_0 = 3
    Q4_1 = 4
    Q4_K = 5
    Q6_K = 6

    @classmethod
    def of(cls, dtype: torch.dtype) -> WeightFormat:
        """Returns the format of a plain tensor. Raises KeyError for any other dtype."""
        return _OF[str(dtype)]


_OF = {"torch.float32": WeightFormat.FP32, "torch.bfloat16": WeightFormat.BF16}

BLOCK_SIZES = {
    WeightFormat.Q8_0: BlockSizes(32, 34, 32, 8.5),
    WeightFormat.Q4_0: BlockSizes(32, 18, 32, 4.5),
    WeightFormat.Q4_1: BlockSizes(32, 20, 32, 5.0),
    WeightFormat.Q4_K: BlockSizes(256, 144, 32, 6.0),
    WeightFormat.Q6_K: BlockSizes(256, 210, 16, 10.0),
}
