"""Paged attention in Triton, with one kernel launched separately for short and long sequences.

Computes an online softmax (Milakov and Gimelshein 2018; Dao et al. 2022) over tiles of keys. A
program computes one block of query tokens of one sequence for one KV head. Its tile has a row for
each token and query head of the KV head, so that each key is read once for all of them.

Sequences with few tokens (decode, drafts to verify) use a small tile, and their contexts are split
into parts that are combined afterwards. The split depends on the sequence's own context only, so
that a token's bits depend neither on the rest of the batch nor on the number of programs that share
the parts. Sequences with more tokens (prefill) use a large tile and the whole context.
"""

# pyright knows neither Triton's launch options nor that jitted functions return tensors.
# pyright: reportCallIssue=false, reportGeneralTypeIssues=false

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ops.base import PAGE_TOKENS, LayerAttention
from ops.triton_blocks import group_of_block
from ops.triton_table import ALIGNMENT, MAX_PARTS, SMALLEST_DOT, AttentionBlocks, power_of_two

COUNTS = ("num_seqs", "table_stride", "part_rows")
"""Arguments that change from step to step. They are not specialised, because Triton would compile
another kernel, while a request waits, if the value is 1 or a multiple of 16."""
LOG2_E = tl.constexpr(1.4426950408889634)


def paged_attention(
    qkv: Tensor, at: LayerAttention, short: AttentionBlocks, long: AttentionBlocks
) -> Tensor:
    """Semantics: as Ops.paged_attention.  Shape: qkv [T, (H + 2G) * D] -> [T, H * D].
    DType: qkv any float; cached keys are converted to it; products and sums are float32.

    Bytes of a decode step: the context's K and V, `context * 2 * G * D * itemsize` per layer;
    queries and results are negligible. Llama 3 8B at 1024 tokens: 4.2 MB per sequence and layer.
    Sequences of at most `short_tokens` rows divide their context into parts, whose results take
    `S * min(max_query, short_tokens) * H * MAX_PARTS * (D + 2)` floats. Only the parts that a
    context needs are used, in the L2 cache. Flops of a prefill: `4 * D * H * T * context / 2`.
    """
    batch, layout, num_heads = at.batch, at.kv.layout, at.num_heads
    num_kv, dim = layout.num_kv_heads, layout.head_dim
    window, sinks = at.window or 0, qkv if at.sinks is None else at.sinks
    group, num_seqs = num_heads // num_kv, len(batch.context_lens)
    num_rows, short_tokens = len(qkv), short.rows // group
    out = qkv.new_empty(num_rows, num_heads * dim)
    if num_rows == 0:
        return out
    has_parts = batch.max_context > short.part_tokens
    part_rows = min(batch.max_query, short_tokens)
    parts = maxima = sums = out
    if has_parts:
        shape = (num_seqs * part_rows, num_heads, MAX_PARTS)
        parts = qkv.new_empty(*shape, dim, dtype=torch.float32)
        maxima, sums = parts.new_empty(shape), parts.new_empty(shape)
    launches = [(short, num_seqs)]
    if batch.max_query > short_tokens:
        capacity = num_rows // (long.rows // group) + num_seqs
        launches = [(long, capacity)] if num_seqs == 1 else [*launches, (long, capacity)]
    for blocks, capacity in launches:
        _attend[(capacity, num_kv, blocks.programs)](
            *(qkv, at.kv.arena.view(layout.dtype), out, parts, maxima, sums, part_rows),
            *(batch.query_start, num_seqs, batch.positions),
            *(batch.block_tables, batch.block_tables.stride(0)),
            at.layer * layout.layer_bytes // layout.dtype.itemsize,
            *(at.scale, at.softcap or 0.0, window, sinks),
            HAS_CAP=at.softcap is not None,
            HAS_SINKS=at.sinks is not None,
            HAS_WINDOW=at.window is not None,
            IS_SHORT=blocks is short,
            SHORT_TOKENS=short_tokens,
            KV_HEADS=num_kv,
            GROUP=group,
            DIM=dim,
            WIDTH=max(power_of_two(dim), SMALLEST_DOT),
            ROWS=blocks.rows,
            TILE=blocks.tile,
            PARTS=MAX_PARTS,
            PART_TOKENS=short.part_tokens,
            PAGE=PAGE_TOKENS,
            STEP=ALIGNMENT // layout.dtype.itemsize,
            ALIGN=ALIGNMENT,
            num_warps=blocks.warps,
            num_stages=blocks.stages,
        )
    if has_parts:
        _combine[(num_rows, num_heads)](
            *(parts, maxima, sums, part_rows, out),
            *(batch.query_start, batch.token_seq, batch.context_lens, window, sinks),
            HAS_SINKS=at.sinks is not None,
            HAS_WINDOW=at.window is not None,
            SHORT_TOKENS=short_tokens,
            HEADS=num_heads,
            DIM=dim,
            WIDTH=power_of_two(dim),
            TILE=short.tile,
            PARTS=MAX_PARTS,
            PART_TOKENS=short.part_tokens,
            num_warps=2,
        )
    return out


@triton.jit
def _tiles(num_rows, context, window, HAS_WINDOW: tl.constexpr, TILE: tl.constexpr):
    """Returns the first tile that the last `num_rows` rows of a context see, and the number of
    tiles from there to the end of the context."""
    first = 0
    if HAS_WINDOW:
        first = tl.maximum(context - num_rows - window + 1, 0) // TILE
    return first, tl.cdiv(context, TILE) - first


@triton.jit
def _tiles_a_part(num_tiles, TILE: tl.constexpr, PARTS: tl.constexpr, PART_TOKENS: tl.constexpr):
    return tl.maximum(tl.cdiv(num_tiles, PARTS), PART_TOKENS // TILE)


@triton.jit
def _tanh(x):
    small = tl.exp(-2 * tl.abs(x))
    value = (1 - small) / (1 + small)
    return tl.where(x >= 0, value, -value)


@triton.jit
def _sum_tiles(
    query,
    keys,
    pages,
    position,
    last,
    from_tile,
    to_tile,
    scale,
    cap,
    window,
    HAS_CAP: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    VALUES: tl.constexpr,
    DIM: tl.constexpr,
    WIDTH: tl.constexpr,
    ROWS: tl.constexpr,
    TILE: tl.constexpr,
    PAGE: tl.constexpr,
    STEP: tl.constexpr,
    ALIGN: tl.constexpr,
):
    """Returns the sum of the weighted values [ROWS, WIDTH], the sum of the weights [ROWS] and the
    largest score [ROWS] over a span of keys. keys: pointer to the head's keys in a page at offset
    0. The head's values are VALUES elements after its keys."""
    lane = tl.arange(0, WIDTH)
    known = lane < DIM
    result = tl.zeros((ROWS, WIDTH), tl.float32)
    total = tl.zeros((ROWS,), tl.float32)
    largest = tl.full((ROWS,), float("-inf"), tl.float32)
    for tile in range(from_tile, to_tile):
        token = tile * TILE + tl.arange(0, TILE)
        cached = token < last
        page = tl.load(pages + token // PAGE, mask=cached, other=0) // ALIGN * STEP
        key_at = page + token % PAGE * DIM
        key = tl.load(
            keys + key_at[None, :] + lane[:, None],
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
            keys + VALUES + key_at[:, None] + lane[None, :],
            mask=cached[:, None] & known[None, :],
            other=0,
        )
        result = result * decay[:, None]
        result = tl.dot(
            weight.to(query.dtype), value.to(query.dtype), result, input_precision="ieee"
        )
        largest = highest
    return result, total, largest


@triton.jit(do_not_specialize=COUNTS)
def _attend(
    qkv,
    arena,
    out,
    parts,
    maxima,
    sums,
    part_rows,
    query_start,
    num_seqs,
    positions,
    block_tables,
    table_stride,
    layer_start,
    scale,
    cap,
    window,
    sinks,
    HAS_CAP: tl.constexpr,
    HAS_SINKS: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    IS_SHORT: tl.constexpr,
    SHORT_TOKENS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    DIM: tl.constexpr,
    WIDTH: tl.constexpr,
    ROWS: tl.constexpr,
    TILE: tl.constexpr,
    PARTS: tl.constexpr,
    PART_TOKENS: tl.constexpr,
    PAGE: tl.constexpr,
    STEP: tl.constexpr,
    ALIGN: tl.constexpr,
):
    TOKENS: tl.constexpr = ROWS // GROUP
    HEADS: tl.constexpr = KV_HEADS * GROUP
    block, kv_head = tl.program_id(0), tl.program_id(1)
    seq = block
    if not IS_SHORT:
        seq = group_of_block(query_start, num_seqs, block, TOKENS)
    begin = tl.load(query_start + seq)
    end = tl.load(query_start + seq + 1)
    if IS_SHORT:
        first_row = begin
        if (begin == end) | (end - begin > SHORT_TOKENS):
            return
    else:
        first_row = begin + (block - begin // TOKENS - seq) * TOKENS
        if (first_row >= end) | (end - begin <= SHORT_TOKENS):
            return

    line = tl.arange(0, ROWS)
    row = (first_row + line // GROUP).to(tl.int64)
    head = kv_head * GROUP + line % GROUP
    valid = (line < TOKENS * GROUP) & (row < end)
    lane = tl.arange(0, WIDTH)
    known = lane < DIM
    # A row past the end gets position -1, before every key, so that it sees no key.
    position = tl.load(positions + row, mask=valid, other=-1)
    query_at = (row * (HEADS + 2 * KV_HEADS) + head) * DIM
    shown = valid[:, None] & known[None, :]
    query = tl.load(qkv + query_at[:, None] + lane[None, :], mask=shown, other=0)

    last = tl.max(position, axis=0) + 1
    lowest = tl.min(tl.where(valid, position, last), axis=0)
    first_tile, num_tiles = _tiles(last - lowest, last, window, HAS_WINDOW, TILE)
    share = num_tiles
    num_parts = 1
    if IS_SHORT:
        share = _tiles_a_part(num_tiles, TILE, PARTS, PART_TOKENS)
        num_parts = tl.cdiv(num_tiles, share)
    pages = block_tables + seq.to(tl.int64) * table_stride
    at = row * HEADS + head
    part_at = (seq.to(tl.int64) * part_rows + row - begin) * HEADS + head
    for part in range(tl.program_id(2), num_parts, tl.num_programs(2)):
        to_tile = first_tile + tl.minimum((part + 1) * share, num_tiles)
        result, total, largest = _sum_tiles(
            *(query, arena + layer_start + kv_head * PAGE * DIM, pages, position, last),
            *(first_tile + part * share, to_tile, scale, cap, window),
            HAS_CAP=HAS_CAP,
            HAS_WINDOW=HAS_WINDOW,
            VALUES=KV_HEADS * PAGE * DIM,
            DIM=DIM,
            WIDTH=WIDTH,
            ROWS=ROWS,
            TILE=TILE,
            PAGE=PAGE,
            STEP=STEP,
            ALIGN=ALIGN,
        )
        if num_parts == 1:
            if HAS_SINKS:
                sink = tl.load(sinks + head) * LOG2_E
                peak = tl.maximum(largest, sink)
                decay = tl.exp2(largest - peak)
                result = result * decay[:, None]
                total = total * decay + tl.exp2(sink - peak)
            result = result / tl.where(total > 0, total, 1.0)[:, None]
            to = out + at[:, None] * DIM + lane[None, :]
            tl.store(to, result.to(out.dtype.element_ty), mask=shown)
        else:
            to_part = part_at * PARTS + part
            tl.store(parts + to_part[:, None] * DIM + lane[None, :], result, mask=shown)
            tl.store(maxima + to_part, largest, mask=valid)
            tl.store(sums + to_part, total, mask=valid)


@triton.jit(do_not_specialize=COUNTS)
def _combine(
    parts,
    maxima,
    sums,
    part_rows,
    out,
    query_start,
    token_seq,
    context_lens,
    window,
    sinks,
    HAS_SINKS: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    SHORT_TOKENS: tl.constexpr,
    HEADS: tl.constexpr,
    DIM: tl.constexpr,
    WIDTH: tl.constexpr,
    TILE: tl.constexpr,
    PARTS: tl.constexpr,
    PART_TOKENS: tl.constexpr,
):
    """Combines the parts of one row and head, in a fixed order."""
    row = tl.program_id(0)
    seq = tl.load(token_seq + row)
    begin = tl.load(query_start + seq)
    num_rows = tl.load(query_start + seq + 1) - begin
    _, num_tiles = _tiles(num_rows, tl.load(context_lens + seq), window, HAS_WINDOW, TILE)
    num_parts = tl.cdiv(num_tiles, _tiles_a_part(num_tiles, TILE, PARTS, PART_TOKENS))
    if (num_rows > SHORT_TOKENS) | (num_parts == 1):
        return
    at = row.to(tl.int64) * HEADS + tl.program_id(1)
    part_at = (seq.to(tl.int64) * part_rows + row - begin) * HEADS + tl.program_id(1)
    part, lane = tl.arange(0, PARTS), tl.arange(0, WIDTH)
    written, known = part < num_parts, lane < DIM
    largest = tl.load(maxima + part_at * PARTS + part, mask=written, other=float("-inf"))
    total = tl.load(sums + part_at * PARTS + part, mask=written, other=0)
    # The row sees itself, so at least one part's maximum is finite.
    peak = tl.max(largest, axis=0)
    sink_weight = 0.0
    if HAS_SINKS:
        sink = tl.load(sinks + tl.program_id(1)) * LOG2_E
        peak = tl.maximum(peak, sink)
        sink_weight = tl.exp2(sink - peak)
    decay = tl.exp2(largest - peak)
    values = tl.load(
        parts + (part_at * PARTS + part[:, None]) * DIM + lane[None, :],
        mask=written[:, None] & known[None, :],
        other=0,
    )
    total = tl.sum(total * decay, axis=0) + sink_weight
    result = tl.sum(values * decay[:, None], axis=0) / total
    tl.store(out + at * DIM + lane, result.to(out.dtype.element_ty), mask=known)
