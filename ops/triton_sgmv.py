"""Matrix form of segmented LoRA, in which a program computes a block of rows of one adapter.

Factors are loaded with a mask, and then set to zero once more outside the mask. A lane past the
rank may hold a NaN, and a product of NaN and zero is NaN. In vllm#48590, loading with `other=0`
alone did not prevent this.
"""

# pyright knows neither Triton's launch options nor that jitted functions return tensors.
# pyright: reportCallIssue=false, reportGeneralTypeIssues=false

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from ops.triton_blocks import COUNTS, group_of_block


@triton.jit(do_not_specialize=COUNTS)
def shrink_segments(
    x,
    arena,
    planes,
    segment_start,
    segment_slot,
    num_segments,
    ranks,
    first_entry,
    slot_entries,
    a_offset,
    num_rows,
    depth,
    PROJECTIONS: tl.constexpr,
    RANKS: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
    SPLIT: tl.constexpr,
    STEP: tl.constexpr,
    ALIGN: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    """Computes planes[split][rows, projection, ranks] = x A^T over this split's part of the sum."""
    if OVERLAPS:
        gdc_launch_dependents()
    RANK_TILES: tl.constexpr = RANKS // COLUMNS
    block, split = tl.program_id(0), tl.program_id(2)
    projection, rank_tile = tl.program_id(1) // RANK_TILES, tl.program_id(1) % RANK_TILES
    segment = group_of_block(segment_start, num_segments, block, ROWS)
    begin = tl.load(segment_start + segment)
    end = tl.load(segment_start + segment + 1)
    slot = tl.load(segment_slot + segment)
    first_row = begin + (block - begin // ROWS - segment) * ROWS
    if (first_row >= end) | (slot < 0):
        return
    entry = slot.to(tl.int64) * slot_entries + first_entry + projection
    rank = tl.load(ranks + entry)
    if rank_tile * COLUMNS >= rank:
        return

    row = (first_row + tl.arange(0, ROWS)).to(tl.int64)
    column = rank_tile * COLUMNS + tl.arange(0, COLUMNS)
    in_rows, in_rank = row < end, column < rank
    a = arena + tl.load(a_offset + entry) // ALIGN * STEP + column.to(tl.int64) * depth
    result = tl.zeros((ROWS, COLUMNS), tl.float32)
    share = tl.cdiv(tl.cdiv(depth, DEPTH), SPLIT) * DEPTH
    for at in range(split * share, tl.minimum((split + 1) * share, depth), DEPTH):
        lane = at + tl.arange(0, DEPTH)
        known = lane < depth
        shown = in_rows[:, None] & known[None, :]
        left = tl.load(x + row[:, None] * depth + lane[None, :], mask=shown, other=0)
        wanted = in_rank[None, :] & known[:, None]
        right = tl.load(a[None, :] + lane[:, None], mask=wanted, other=0)
        right = tl.where(wanted, right, 0).to(left.dtype)
        result = tl.dot(left, right, result, input_precision="ieee")
    at_row = (split * num_rows + row) * PROJECTIONS + projection
    to = planes + at_row[:, None] * RANKS + column[None, :]
    tl.store(to, result, mask=in_rows[:, None] & in_rank[None, :])


@triton.jit
def column_tile(tile, width0, width1, width2, COLUMNS: tl.constexpr):
    """Returns the projection of a tile, the projection's width and first column in y, and the index
    of the tile within the projection. tile: index of the tile over all projections."""
    tiles0, tiles1 = tl.cdiv(width0, COLUMNS), tl.cdiv(width1, COLUMNS)
    projection = (tile >= tiles0).to(tl.int32) + (tile >= tiles0 + tiles1).to(tl.int32)
    width = tl.where(projection == 0, width0, tl.where(projection == 1, width1, width2))
    before = tl.where(projection == 0, 0, tl.where(projection == 1, tiles0, tiles0 + tiles1))
    column = tl.where(projection == 0, 0, tl.where(projection == 1, width0, width0 + width1))
    return projection, width, column, tile - before


@triton.jit
def load_b(b, column, lane, in_width, rank):
    """Loads elements [columns, lanes] of B [N, rank], and 0 outside B. If the rank is a multiple of
    8, the index shows the compiler that rows begin and the mask changes only at multiples of 16
    bytes, so that it may load 16 bytes at once."""
    if rank % 8 == 0:
        whole = rank // 8 * 8
        values = tl.load(b + column * whole + lane, mask=in_width & (lane < whole), other=0)
    else:
        values = tl.load(b + column * rank + lane, mask=in_width & (lane < rank), other=0)
    return tl.where(in_width & (lane < rank), values, 0)


@triton.jit
def load_planes(planes, lane, shown, rank, stride, SPLIT: tl.constexpr):
    """Returns the sum of the SPLIT partial results (planes), added in a fixed order. Reads groups
    of 8 lanes, so that loads are wide. Lanes that are not `shown` or are past the rank are 0."""
    offered = shown & (lane < (rank + 7) // 8 * 8)
    total = tl.load(planes + lane, mask=offered, other=0)
    for split in tl.static_range(1, SPLIT):
        total += tl.load(planes + split * stride + lane, mask=offered, other=0)
    return tl.where(shown & (lane < rank), total, 0.0)


@triton.jit(do_not_specialize=COUNTS)
def expand_segments(
    y,
    arena,
    planes,
    segment_start,
    segment_slot,
    num_segments,
    ranks,
    first_entry,
    slot_entries,
    b_offset,
    num_rows,
    width0,
    width1,
    width2,
    PROJECTIONS: tl.constexpr,
    RANKS: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
    SPLIT: tl.constexpr,
    STEP: tl.constexpr,
    ALIGN: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    """Computes y[rows, columns] += (sum of planes) B^T for one tile of one projection's columns."""
    block = tl.program_id(0)
    projection, width, first_column, tile = column_tile(
        tl.program_id(1), width0, width1, width2, COLUMNS
    )
    segment = group_of_block(segment_start, num_segments, block, ROWS)
    begin = tl.load(segment_start + segment)
    end = tl.load(segment_start + segment + 1)
    slot = tl.load(segment_slot + segment)
    first_row = begin + (block - begin // ROWS - segment) * ROWS
    if (first_row >= end) | (slot < 0):
        return
    entry = slot.to(tl.int64) * slot_entries + first_entry + projection
    rank = tl.load(ranks + entry)
    if rank == 0:
        return

    row = (first_row + tl.arange(0, ROWS)).to(tl.int64)
    column = tile * COLUMNS + tl.arange(0, COLUMNS)
    in_rows, in_width = row < end, column < width
    b = arena + tl.load(b_offset + entry) // ALIGN * STEP
    to = y + row[:, None] * (width0 + width1 + width2) + first_column + column[None, :]
    changed = in_rows[:, None] & in_width[None, :]
    # The output of the base model is loaded while the product is computed.
    base = tl.load(to, mask=changed, other=0)
    stride = num_rows * PROJECTIONS * RANKS
    plane = planes + (row * PROJECTIONS + projection)[:, None] * RANKS
    result = tl.zeros((ROWS, COLUMNS), tl.float32)
    lane = tl.arange(0, DEPTH)
    right = load_b(b, column[None, :], lane[:, None], in_width[None, :], rank)
    if OVERLAPS:
        gdc_wait()
    for _ in range(0, rank, DEPTH):
        left = load_planes(plane, lane[None, :], in_rows[:, None], rank, stride, SPLIT)
        result = tl.dot(left.to(base.dtype), right.to(base.dtype), result, input_precision="ieee")
        lane += DEPTH
        right = load_b(b, column[None, :], lane[:, None], in_width[None, :], rank)
    tl.store(to, (base.to(tl.float32) + result).to(base.dtype), mask=changed)
