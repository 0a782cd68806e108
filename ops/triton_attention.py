"""Paged attention in Triton: prefill and decode in one kernel, and a sum over parts of a context.

Online softmax (Milakov and Gimelshein 2018; Dao et al. 2022) over tiles of keys. A program has one
block of query rows of one sequence and one KV head; its tile's rows are tokens x the query heads
that share the head, so that each key is read once for all of them.
"""

# Launch options are no parameters of a kernel, and a jitted function's results are tensors.
# pyright: reportCallIssue=false, reportGeneralTypeIssues=false

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ops.base import PAGE_TOKENS, AttentionBatch, KVCacheView
from ops.triton_blocks import group_of_block
from ops.triton_table import ALIGNMENT, SMALLEST_DOT, AttentionBlocks, power_of_two

COUNTS = ("num_seqs", "table_stride")
"""They change from step to step. A kernel made for one that is 1 or a multiple of 16 would be
compiled again for others, in the middle of a request."""
LOG2_E = tl.constexpr(1.4426950408889634)


def paged_attention(
    qkv: Tensor,
    batch: AttentionBatch,
    kv: KVCacheView,
    layer: int,
    num_heads: int,
    scale: float,
    window: int | None,
    softcap: float | None,
    blocks: AttentionBlocks,
) -> Tensor:
    """Semantics: as Ops.paged_attention.  Shape: qkv [T, (H + 2G) * D] -> [T, H * D].
    DType: qkv any float; keys are raised to its dtype, products and sums are float32.

    Bytes of a decode step: the context's K and V, `context * 2 * G * D * itemsize` a layer; queries
    and results are nothing beside them. Llama 3 8B at 1024 tokens: 4.2 MB a sequence and layer.
    Splitting writes and reads `T * H * splits * (D + 2)` floats more, which stay in the L2.
    Flops of a prefill: `4 * D * H * rows * context / 2`.
    """
    layout = kv.layout
    num_kv, dim = layout.num_kv_heads, layout.head_dim
    group, num_seqs = num_heads // num_kv, len(batch.context_lens)
    num_rows = len(qkv)
    out = qkv.new_empty(num_rows, num_heads * dim)
    if num_rows == 0:
        return out
    parts = maxima = sums = out
    if blocks.splits > 1:
        shape = (num_rows, num_heads, blocks.splits)
        parts = qkv.new_empty(*shape, dim, dtype=torch.float32)
        maxima, sums = parts.new_empty(shape), parts.new_empty(shape)
    capacity = num_rows // (blocks.rows // group) + num_seqs
    _attend[(capacity, num_kv, blocks.splits)](
        *(qkv, kv.arena.view(layout.dtype), out, parts, maxima, sums),
        *(batch.query_start, num_seqs, batch.positions),
        *(batch.block_tables, batch.block_tables.stride(0)),
        layer * layout.layer_bytes // layout.dtype.itemsize,
        *(scale, softcap or 0.0, window or 0),
        HAS_CAP=softcap is not None,
        HAS_WINDOW=window is not None,
        KV_HEADS=num_kv,
        GROUP=group,
        DIM=dim,
        WIDTH=max(power_of_two(dim), SMALLEST_DOT),
        ROWS=blocks.rows,
        TILE=blocks.tile,
        SPLITS=blocks.splits,
        PAGE=PAGE_TOKENS,
        STEP=ALIGNMENT // layout.dtype.itemsize,
        ALIGN=ALIGNMENT,
        num_warps=blocks.warps,
        num_stages=blocks.stages,
    )
    if blocks.splits > 1:
        _combine[(num_rows, num_heads)](
            *(parts, maxima, sums, out),
            HEADS=num_heads,
            DIM=dim,
            WIDTH=power_of_two(dim),
            SPLITS=blocks.splits,
            num_warps=2,
        )
    return out


@triton.jit
def _tanh(x):
    small = tl.exp(-2 * tl.abs(x))
    value = (1 - small) / (1 + small)
    return tl.where(x >= 0, value, -value)


@triton.jit(do_not_specialize=COUNTS)
def _attend(
    qkv,
    arena,
    out,
    parts,
    maxima,
    sums,
    query_start,
    num_seqs,
    positions,
    block_tables,
    table_stride,
    layer_start,
    scale,
    cap,
    window,
    HAS_CAP: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    DIM: tl.constexpr,
    WIDTH: tl.constexpr,
    ROWS: tl.constexpr,
    TILE: tl.constexpr,
    SPLITS: tl.constexpr,
    PAGE: tl.constexpr,
    STEP: tl.constexpr,
    ALIGN: tl.constexpr,
):
    TOKENS: tl.constexpr = ROWS // GROUP
    HEADS: tl.constexpr = KV_HEADS * GROUP
    block, kv_head, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    seq = group_of_block(query_start, num_seqs, block, TOKENS)
    begin = tl.load(query_start + seq)
    end = tl.load(query_start + seq + 1)
    first_row = begin + (block - begin // TOKENS - seq) * TOKENS
    if first_row >= end:
        return

    line = tl.arange(0, ROWS)
    row = (first_row + line // GROUP).to(tl.int64)
    head = kv_head * GROUP + line % GROUP
    valid = (line < TOKENS * GROUP) & (row < end)
    lane = tl.arange(0, WIDTH)
    known = lane < DIM
    # A row that is not there stands before every key and so sees none.
    position = tl.load(positions + row, mask=valid, other=-1)
    query_at = (row * (HEADS + 2 * KV_HEADS) + head) * DIM
    shown = valid[:, None] & known[None, :]
    query = tl.load(qkv + query_at[:, None] + lane[None, :], mask=shown, other=0)

    last = tl.max(position, axis=0) + 1
    first_tile = 0
    if HAS_WINDOW:
        lowest = tl.min(tl.where(valid, position, last), axis=0)
        first_tile = tl.maximum(lowest - window + 1, 0) // TILE
    num_tiles = tl.cdiv(last, TILE) - first_tile
    share = tl.cdiv(num_tiles, SPLITS)
    from_tile = first_tile + split * share
    to_tile = first_tile + tl.minimum((split + 1) * share, num_tiles)

    result = tl.zeros((ROWS, WIDTH), tl.float32)
    total = tl.zeros((ROWS,), tl.float32)
    largest = tl.full((ROWS,), float("-inf"), tl.float32)
    pages = block_tables + seq.to(tl.int64) * table_stride
    for tile in range(from_tile, to_tile):
        token = tile * TILE + tl.arange(0, TILE)
        cached = token < last
        page = tl.load(pages + token // PAGE, mask=cached, other=0) // ALIGN * STEP
        key_at = page + layer_start + (kv_head * PAGE + token % PAGE) * DIM
        key = tl.load(
            arena + key_at[None, :] + lane[:, None],
            mask=cached[None, :] & known[:, None],
            other=0,
        )
        score = tl.dot(query, key.to(query.dtype), input_precision="ieee") * scale
        if HAS_CAP:
            score = cap * _tanh(score / cap)
        seen = token[None, :] <= position[:, None]
        if HAS_WINDOW:
            seen &= token[None, :] > position[:, None] - window
        score = tl.where(seen, score * LOG2_E, float("-inf"))

        highest = tl.maximum(largest, tl.max(score, axis=1))
        # A row that has seen no key yet must not subtract infinity from infinity.
        origin = tl.where(highest == float("-inf"), 0.0, highest)
        weight = tl.exp2(score - origin[:, None])
        decay = tl.exp2(largest - origin)
        total = total * decay + tl.sum(weight, axis=1)
        value = tl.load(
            arena + KV_HEADS * PAGE * DIM + key_at[:, None] + lane[None, :],
            mask=cached[:, None] & known[None, :],
            other=0,
        )
        result = result * decay[:, None]
        result = tl.dot(
            weight.to(query.dtype), value.to(query.dtype), result, input_precision="ieee"
        )
        largest = highest

    at = row * HEADS + head
    if SPLITS == 1:
        result = result / tl.where(total > 0, total, 1.0)[:, None]
        to = out + at[:, None] * DIM + lane[None, :]
        tl.store(to, result.to(out.dtype.element_ty), mask=shown)
    else:
        part = at * SPLITS + split
        tl.store(parts + part[:, None] * DIM + lane[None, :], result, mask=shown)
        tl.store(maxima + part, largest, mask=valid)
        tl.store(sums + part, total, mask=valid)


@triton.jit
def _combine(
    parts,
    maxima,
    sums,
    out,
    HEADS: tl.constexpr,
    DIM: tl.constexpr,
    WIDTH: tl.constexpr,
    SPLITS: tl.constexpr,
):
    """One row and head from its parts, summed in one order whatever finished first."""
    at = tl.program_id(0).to(tl.int64) * HEADS + tl.program_id(1)
    split, lane = tl.arange(0, SPLITS), tl.arange(0, WIDTH)
    known = lane < DIM
    largest = tl.load(maxima + at * SPLITS + split)
    total = tl.load(sums + at * SPLITS + split)
    # The row sees itself, so one part has seen something: the maximum is finite.
    decay = tl.exp2(largest - tl.max(largest, axis=0))
    part = tl.load(
        parts + (at * SPLITS + split[:, None]) * DIM + lane[None, :],
        mask=known[None, :],
        other=0,
    )
    result = tl.sum(part * decay[:, None], axis=0) / tl.sum(total * decay, axis=0)
    tl.store(out + at * DIM + lane, result.to(out.dtype.element_ty), mask=known)
