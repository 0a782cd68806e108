"""Matrices in GGUF's block formats.

Each row is a sequence of blocks. A block holds integer *levels* and, for each group of 16 or 32
levels, a scale and possibly a minimum: element = scale * level + minimum, computed in float32 and
rounded to bfloat16. The byte layouts are the same as in ggml
(https://github.com/ggml-org/ggml/blob/master/src/ggml-common.h).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ops.weight_format import BLOCK_SIZES, WeightFormat


@dataclass(frozen=True, slots=True)
class Levels:
    """Integers of a matrix [N, K], and their scales and minimums.

    levels   int8 [N, K]
    scales   float32 [N, K / group]
    minimums float32 [N, K / group], None for a format that has none
    """

    levels: Tensor
    scales: Tensor
    minimums: Tensor | None


@dataclass(frozen=True, slots=True)
class BlockMatrix:
    """Matrix [N, K] in a block format. blocks: uint8 [N, K / block * block_bytes]."""

    format: WeightFormat
    blocks: Tensor

    @property
    def shape(self) -> tuple[int, int]:
        """Number of rows and columns, (N, K)."""
        sizes = BLOCK_SIZES[self.format]
        rows, num_bytes = self.blocks.shape
        return rows, num_bytes // sizes.block_bytes * sizes.block

    def __getitem__(self, rows: Tensor | slice) -> BlockMatrix:
        """Returns the matrix of the selected rows."""
        return BlockMatrix(self.format, self.blocks[rows])

    def unpack(self) -> Levels:
        """Returns the levels, scales and minimums."""
        num_bytes = BLOCK_SIZES[self.format].block_bytes
        return _UNPACK[self.format](self.blocks.unflatten(1, (-1, num_bytes)))

    def dequantize(self) -> Tensor:
        """Returns the matrix as bfloat16 [N, K]."""
        parts = self.unpack()
        grouped = parts.levels.unflatten(1, (parts.scales.shape[1], -1))
        exact = grouped * parts.scales.unsqueeze(2)
        if parts.minimums is not None:
            exact += parts.minimums.unsqueeze(2)
        return exact.flatten(1).to(torch.bfloat16)


Weight = Tensor | BlockMatrix
"""Matrix [N, K], plain or in blocks."""


def densify(weights: Sequence[Weight]) -> Tensor:
    """Dequantises matrices in blocks, and returns all matrices, concatenated by rows, as one."""
    plain = [each.dequantize() if isinstance(each, BlockMatrix) else each for each in weights]
    return plain[0] if len(plain) == 1 else torch.cat(plain)


def _halfs(blocks: Tensor, start: int) -> Tensor:
    """Returns the float16 number at byte `start` of each block, as float32 [N, blocks]."""
    return blocks[..., start : start + 2].contiguous().view(torch.float16).squeeze(-1).float()


def _nibbles(quants: Tensor) -> Tensor:
    """Returns the low halves of bytes [..., n], followed by the high halves, as int8 [..., 2 n]."""
    return torch.cat([quants & 15, quants >> 4], dim=-1).to(torch.int8)


def _q8_0(blocks: Tensor) -> Levels:
    return Levels(blocks[..., 2:].contiguous().view(torch.int8).flatten(1), _halfs(blocks, 0), None)


def _q4_0(blocks: Tensor) -> Levels:
    return Levels((_nibbles(blocks[..., 2:]) - 8).flatten(1), _halfs(blocks, 0), None)


def _q4_1(blocks: Tensor) -> Levels:
    levels = _nibbles(blocks[..., 4:]).flatten(1)
    return Levels(levels, _halfs(blocks, 0), _halfs(blocks, 2))


def _q4_k(blocks: Tensor) -> Levels:
    """Unpacks blocks of 8 groups of 32. Scales and minimums are 6-bit integers times a float16."""
    first, second, third = blocks[..., 4:16].unflatten(-1, (3, 4)).unbind(-2)
    scales = torch.cat([first & 63, (third & 15) | (first >> 6 << 4)], dim=-1)
    minimums = torch.cat([second & 63, (third >> 4) | (second >> 6 << 4)], dim=-1)
    quants = blocks[..., 16:].unflatten(-1, (4, 32))
    return Levels(
        _nibbles(quants).flatten(1),
        (_halfs(blocks, 0).unsqueeze(-1) * scales).flatten(1),
        (_halfs(blocks, 2).unsqueeze(-1) * minimums).flatten(1).neg(),
    )


def _q6_k(blocks: Tensor) -> Levels:
    """Unpacks blocks of sixteen groups of 16. A level has four bits in `low` and two in `high`."""
    low = _nibbles(blocks[..., :128].unflatten(-1, (2, 64))).unflatten(-1, (4, 32))
    shifts = torch.tensor([0, 2, 4, 6], dtype=torch.uint8).unsqueeze(-1)
    high = blocks[..., 128:192].unflatten(-1, (2, 1, 32)) >> shifts & 3
    scales = blocks[..., 192:208].contiguous().view(torch.int8)
    return Levels(
        ((low | high.to(torch.int8) << 4) - 32).flatten(1),
        (_halfs(blocks, 208).unsqueeze(-1) * scales).flatten(1),
        None,
    )


_UNPACK: dict[WeightFormat, Callable[[Tensor], Levels]] = {
    WeightFormat.Q8_0: _q8_0,
    WeightFormat.Q4_0: _q4_0,
    WeightFormat.Q4_1: _q4_1,
    WeightFormat.Q4_K: _q4_k,
    WeightFormat.Q6_K: _q6_k,
}
"""Functions that unpack blocks, uint8 [N, blocks per row, block_bytes], by format."""
