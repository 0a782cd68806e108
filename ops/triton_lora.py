"""Segmented LoRA (SGMV, Chen et al. 2023; S-LoRA, Sheng et al. 2023): two launches per linear.

Shrink multiplies rows by their adapter's A and writes float32 planes, one for each part of the sum.
Expand adds the planes in a fixed order, multiplies the sum by B, and adds the product to the base
model's output. No atomics are used, and no memory is zeroed, because only written values are read.
Every segment's rank, offsets and slot are read on the device, so one captured launch serves any
adapters.

On Hopper and later devices (`overlaps`), expand starts before shrink has ended. It loads its part
of B and then waits for the planes (programmatic dependent launch, CUDA C++ Programming Guide). No
other kernel may be launched between shrink and expand.
"""

# pyright knows neither Triton's launch options nor that jitted functions return tensors.
# pyright: reportCallIssue=false, reportGeneralTypeIssues=false

from __future__ import annotations

import torch
from torch import Tensor

from ops.base import EMBEDDING, FusedLinear, LoRABatch
from ops.triton_bgmv import expand_rows, expand_tokens, shrink_rows
from ops.triton_sgmv import expand_segments, shrink_segments
from ops.triton_table import ALIGNMENT, Blocks, blocks_of

MAX_PROJECTIONS = 3


def shrink(
    x: Tensor, fused: FusedLinear, layer: int, lora: LoRABatch, blocks: Blocks, overlaps: bool
) -> Tensor:
    """Semantics: planes.sum(0)[t, i, :rank] = x[t] A^T for projection i of the fused linear. Planes
    are undefined past the rank of a row's adapter and in rows without an adapter.
    Shape: x [T, K]; A [rank, K] -> planes float32 [split, T, P, R], R a power of two.
    DType: x any float, A in the adapter's dtype, converted to the dtype of x; sums float32.

    Bytes: each A once per segment, `P * rank * K * itemsize`, and x once per projection. 32
    adapters of rank 16 at gate_up of Llama 3 8B read 8.4 MB, which takes 2 us at 4.3 TB/s. With one
    adapter, the launch dominates.
    """
    num_rows, depth = x.shape
    num_segments = len(lora.segment_slot)
    rank_tiles = blocks_of(lora.max_rank, blocks.columns)
    ranks = rank_tiles * blocks.columns
    planes = x.new_empty(blocks.split, num_rows, len(fused.projections), ranks, dtype=torch.float32)
    kernel = shrink_rows if blocks.rows == 1 else shrink_segments
    places = _places(num_rows, num_segments, blocks)
    kernel[(places, len(fused.projections) * rank_tiles, blocks.split)](
        *(x, lora.arena.view(lora.dtype), planes, *_where(fused, layer, lora)),
        *(lora.tables.a_offset, num_rows, depth),
        PROJECTIONS=len(fused.projections),
        RANKS=ranks,
        ROWS=blocks.rows,
        COLUMNS=blocks.columns,
        DEPTH=blocks.depth,
        SPLIT=blocks.split,
        STEP=ALIGNMENT // lora.dtype.itemsize,
        ALIGN=ALIGNMENT,
        OVERLAPS=overlaps,
        num_warps=blocks.warps,
        num_stages=blocks.stages,
    )
    return planes


def expand_add(
    y: Tensor,
    planes: Tensor,
    fused: FusedLinear,
    layer: int,
    lora: LoRABatch,
    blocks: Blocks,
    overlaps: bool,
) -> None:
    """Semantics: y[t, columns of i] += planes.sum(0)[t, i, :rank] B^T, in place.
    Shape: y [T, sum(fused.widths)]; B [N, rank], scaled.
    DType: the sum over planes is float32. The matrix form rounds it to y's dtype, and the row form
    does not. The product is float32, and is rounded once after it is added to y.

    Bytes: each B once per segment, `sum(N) * rank * itemsize`, and y twice. 32 adapters of rank 16
    at gate_up of Llama 3 8B take 29.4 MB + 3.7 MB, 7.7 us at 4.3 TB/s.
    """
    num_rows, num_segments = len(y), len(lora.segment_slot)
    widths = (*fused.widths, *(0,) * (MAX_PROJECTIONS - len(fused.widths)))
    kernel = expand_rows if blocks.rows == 1 else expand_segments
    tiles = sum(blocks_of(width, blocks.columns) for width in fused.widths)
    kernel[(_places(num_rows, num_segments, blocks), tiles)](
        *(y, lora.arena.view(lora.dtype), planes, *_where(fused, layer, lora)),
        *(lora.tables.b_offset, num_rows, *widths),
        PROJECTIONS=len(fused.projections),
        RANKS=planes.shape[-1],
        ROWS=blocks.rows,
        COLUMNS=blocks.columns,
        DEPTH=blocks.depth,
        SPLIT=planes.shape[0],
        STEP=ALIGNMENT // lora.dtype.itemsize,
        ALIGN=ALIGNMENT,
        OVERLAPS=overlaps,
        num_warps=blocks.warps,
        num_stages=blocks.stages,
        **({"launch_pdl": True} if overlaps else {}),
    )


def add_tokens(y: Tensor, ids: Tensor, lora: LoRABatch, scale: float, blocks: Blocks) -> None:
    """Semantics: y[t] += A[ids[t]] B^T * scale of the embedding, in place.
    Shape: ids [T], y [T, K]; A [V, rank], B [K, rank], scaled.
    DType: A and B the adapter's dtype; sums float32, rounded once after they are added to y.

    Bytes: each B once per row, `K * rank * itemsize`. 64 rows of rank 16 at K = 4096 in bf16 read
    8.4 MB, which takes 2 us at 4.3 TB/s. If no adapter changes the embedding, the launch dominates.
    """
    num_rows, width = y.shape
    entries = lora.tables.rank.shape[2]
    expand_tokens[(num_rows, blocks_of(width, blocks.columns))](
        *(y, ids, lora.arena.view(lora.dtype), lora.segment_start, lora.segment_slot),
        *(len(lora.segment_slot), lora.tables.rank, lora.outer_layer * entries + EMBEDDING),
        *((lora.outer_layer + 1) * entries, lora.tables.a_offset, lora.tables.b_offset),
        *(width, scale),
        COLUMNS=blocks.columns,
        DEPTH=blocks.depth,
        STEP=ALIGNMENT // lora.dtype.itemsize,
        ALIGN=ALIGNMENT,
        num_warps=blocks.warps,
        num_stages=blocks.stages,
    )


def _places(num_rows: int, num_segments: int, blocks: Blocks) -> int:
    """Returns the number of programs that covers any division of the rows into segments (see
    `ops.triton_blocks`). The row form has one program per row."""
    return num_rows if blocks.rows == 1 else num_rows // blocks.rows + num_segments


def _where(fused: FusedLinear, layer: int, lora: LoRABatch) -> tuple[Tensor | int, ...]:
    """Returns the kernel arguments that locate a segment's entry in the adapter tables."""
    first = fused.projections[0]
    assert len(fused.projections) <= MAX_PROJECTIONS
    assert fused.projections == tuple(range(first, first + len(fused.projections)))
    _, num_layers, num_projections = lora.tables.rank.shape
    return (
        *(lora.segment_start, lora.segment_slot, len(lora.segment_slot), lora.tables.rank),
        *(layer * num_projections + first, num_layers * num_projections),
    )
