"""Row form of segmented LoRA, for steps with one or two rows per adapter.

In such steps, 15/16 of a matrix tile would be padding. These kernels multiply and add elements
without tl.dot. The reading of A and B limits the speed of this form and of the matrix form
(`ops.triton_sgmv`). The kernels of both forms have the same signatures.
"""

# pyright does not know that jitted functions return tensors.
# pyright: reportGeneralTypeIssues=false

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from ops.triton_blocks import COUNTS, group_of_row
from ops.triton_sgmv import column_tile, load_b, load_planes


@triton.jit(do_not_specialize=COUNTS)
def shrink_rows(
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
    """Computes planes[split][row, projection, ranks] = A x over this split's part of the sum."""
    if OVERLAPS:
        gdc_launch_dependents()
    RANK_TILES: tl.constexpr = RANKS // COLUMNS
    row, split = tl.program_id(0), tl.program_id(2)
    projection, rank_tile = tl.program_id(1) // RANK_TILES, tl.program_id(1) % RANK_TILES
    segment = group_of_row(segment_start, num_segments, row)
    slot = tl.load(segment_slot + segment)
    if (row >= tl.load(segment_start + segment + 1)) | (slot < 0):
        return
    entry = slot.to(tl.int64) * slot_entries + first_entry + projection
    rank = tl.load(ranks + entry)
    if rank_tile * COLUMNS >= rank:
        return

    column = rank_tile * COLUMNS + tl.arange(0, COLUMNS)
    in_rank = column < rank
    a = arena + tl.load(a_offset + entry) // ALIGN * STEP + column.to(tl.int64) * depth
    result = tl.zeros((COLUMNS,), tl.float32)
    share = tl.cdiv(tl.cdiv(depth, DEPTH), SPLIT) * DEPTH
    for at in range(split * share, tl.minimum((split + 1) * share, depth), DEPTH):
        lane = at + tl.arange(0, DEPTH)
        known = lane < depth
        value = tl.load(x + row.to(tl.int64) * depth + lane, mask=known, other=0).to(tl.float32)
        wanted = in_rank[:, None] & known[None, :]
        factor = tl.load(a[:, None] + lane[None, :], mask=wanted, other=0)
        factor = tl.where(wanted, factor, 0).to(tl.float32)
        result += tl.sum(factor * value[None, :], axis=1)
    at_row = (split * num_rows + row.to(tl.int64)) * PROJECTIONS + projection
    tl.store(planes + at_row * RANKS + column, result, mask=in_rank)


@triton.jit(do_not_specialize=COUNTS)
def expand_rows(
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
    """Computes y[row, columns] += B (sum of planes) for one tile of one projection's columns."""
    row = tl.program_id(0)
    projection, width, first_column, tile = column_tile(
        tl.program_id(1), width0, width1, width2, COLUMNS
    )
    segment = group_of_row(segment_start, num_segments, row)
    slot = tl.load(segment_slot + segment)
    if (row >= tl.load(segment_start + segment + 1)) | (slot < 0):
        return
    entry = slot.to(tl.int64) * slot_entries + first_entry + projection
    rank = tl.load(ranks + entry)
    if rank == 0:
        return

    column = tile * COLUMNS + tl.arange(0, COLUMNS)
    in_width = column < width
    b = arena + tl.load(b_offset + entry) // ALIGN * STEP
    to = y + row.to(tl.int64) * (width0 + width1 + width2) + first_column + column
    base = tl.load(to, mask=in_width, other=0)
    stride = num_rows * PROJECTIONS * RANKS
    plane = planes + (row.to(tl.int64) * PROJECTIONS + projection) * RANKS
    result = tl.zeros((COLUMNS,), tl.float32)
    lane = tl.arange(0, DEPTH)
    factor = load_b(b, column[:, None], lane[None, :], in_width[:, None], rank)
    if OVERLAPS:
        gdc_wait()
    for _ in range(0, rank, DEPTH):
        value = load_planes(plane, lane, lane >= 0, rank, stride, SPLIT)
        result += tl.sum(factor.to(tl.float32) * value[None, :], axis=1)
        lane += DEPTH
        factor = load_b(b, column[:, None], lane[None, :], in_width[:, None], rank)
    tl.store(to, (base.to(tl.float32) + result).to(base.dtype), mask=in_width)


@triton.jit(do_not_specialize=COUNTS)
def expand_tokens(
    y,
    ids,
    arena,
    segment_start,
    segment_slot,
    num_segments,
    ranks,
    first_entry,
    slot_entries,
    a_offset,
    b_offset,
    width,
    scale,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
    STEP: tl.constexpr,
    ALIGN: tl.constexpr,
):
    """Adds A[token id] @ B of the row's adapter to y, for one tile of columns."""
    row = tl.program_id(0)
    segment = group_of_row(segment_start, num_segments, row)
    slot = tl.load(segment_slot + segment)
    if (row >= tl.load(segment_start + segment + 1)) | (slot < 0):
        return
    entry = slot.to(tl.int64) * slot_entries + first_entry
    rank = tl.load(ranks + entry)
    if rank == 0:
        return

    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    in_width = column < width
    a = arena + tl.load(a_offset + entry) // ALIGN * STEP + tl.load(ids + row).to(tl.int64) * rank
    b = arena + tl.load(b_offset + entry) // ALIGN * STEP
    to = y + row.to(tl.int64) * width + column
    base = tl.load(to, mask=in_width, other=0)
    result = tl.zeros((COLUMNS,), tl.float32)
    for at in range(0, rank, DEPTH):
        lane = at + tl.arange(0, DEPTH)
        value = tl.load(a + lane, mask=lane < rank, other=0)
        value = tl.where(lane < rank, value, 0).to(tl.float32)
        factor = load_b(b, column[:, None], lane[None, :], in_width[:, None], rank)
        result += tl.sum(factor.to(tl.float32) * value[None, :], axis=1)
    tl.store(to, (base.to(tl.float32) + result * scale).to(base.dtype), mask=in_width)
