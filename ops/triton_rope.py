"""Rotary embedding fused with the write of keys and values into their pages."""

# pyright knows neither Triton's launch options nor that jitted functions return tensors.
# pyright: reportCallIssue=false, reportGeneralTypeIssues=false

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from ops.base import PAGE_TOKENS, LayerAttention, QKNorm
from ops.triton_table import ALIGNMENT, blocks_of, power_of_two

HEADS_A_PROGRAM = 8


def rope_write_kv(
    qkv: Tensor, rope: Tensor | None, at: LayerAttention, qk_norm: QKNorm | None
) -> None:
    """Semantics: norms q and k per head if `qk_norm` is given, rotates both if `rope` is given,
    writes k and v to pages.
    Shape: qkv [T, (H + 2G) * D]; pages [L][K then V][G][PAGE_TOKENS][D].
    DType: qkv any float, pages the layout's dtype, arithmetic float32.
    Bytes: T * D * (2H + 4G) * itemsize, because q, k and v are read and written. 256 rows of 32 +
    2 x 8 heads of 128 in bf16 take 6.3 MB, 1.5 us. With fewer bytes the launch dominates."""
    batch, layout = at.batch, at.kv.layout
    heads = at.num_heads + 2 * layout.num_kv_heads
    norm = qk_norm or QKNorm(qkv, qkv, 0.0)
    angles = qkv if rope is None else rope
    arena = at.kv.arena.view(layout.dtype)
    if len(qkv):
        _rope_write_kv[(len(qkv), blocks_of(heads, HEADS_A_PROGRAM))](
            *(qkv, angles, norm.q_weight, norm.k_weight, norm.eps, arena),
            *(batch.token_seq, batch.positions, batch.block_tables, batch.block_tables.stride(0)),
            at.layer * layout.layer_bytes // layout.dtype.itemsize,
            HAS_NORM=qk_norm is not None,
            HAS_ROPE=rope is not None,
            Q_HEADS=at.num_heads,
            KV_HEADS=layout.num_kv_heads,
            DIM=layout.head_dim,
            HALF=power_of_two(layout.head_dim // 2),
            HEADS=HEADS_A_PROGRAM,
            PAGE=PAGE_TOKENS,
            STEP=ALIGNMENT // layout.dtype.itemsize,
            ALIGN=ALIGNMENT,
            num_warps=4,
        )


@triton.jit(do_not_specialize=("table_stride",))
def _rope_write_kv(
    qkv,
    rope,
    q_weight,
    k_weight,
    eps,
    arena,
    token_seq,
    positions,
    block_tables,
    table_stride,
    layer_start,
    HAS_NORM: tl.constexpr,
    HAS_ROPE: tl.constexpr,
    Q_HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    DIM: tl.constexpr,
    HALF: tl.constexpr,
    HEADS: tl.constexpr,
    PAGE: tl.constexpr,
    STEP: tl.constexpr,
    ALIGN: tl.constexpr,
):
    """Processes a few heads of one row per program, as one tile of the first halves of the heads
    and one tile of the second halves."""
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    lane = tl.arange(0, HALF)
    inside = (head < Q_HEADS + 2 * KV_HEADS)[:, None] & (lane < DIM // 2)[None, :]
    at = (row * (Q_HEADS + 2 * KV_HEADS) + head[:, None]) * DIM + lane[None, :]
    first = tl.load(qkv + at, mask=inside, other=0).to(tl.float32)
    second = tl.load(qkv + at + DIM // 2, mask=inside, other=0).to(tl.float32)

    turns = (head < Q_HEADS + KV_HEADS)[:, None]
    is_query = (head < Q_HEADS)[:, None]
    known = lane < DIM // 2
    new_first, new_second = first, second
    if HAS_NORM:
        squares = tl.sum(first * first, axis=1) + tl.sum(second * second, axis=1)
        scale = tl.rsqrt(squares / DIM + eps)[:, None]
        q_first = tl.load(q_weight + lane, mask=known, other=0)[None, :]
        k_first = tl.load(k_weight + lane, mask=known, other=0)[None, :]
        q_second = tl.load(q_weight + lane + DIM // 2, mask=known, other=0)[None, :]
        k_second = tl.load(k_weight + lane + DIM // 2, mask=known, other=0)[None, :]
        new_first = first * scale * tl.where(is_query, q_first, k_first)
        new_second = second * scale * tl.where(is_query, q_second, k_second)
    position = tl.load(positions + row)
    if HAS_ROPE:
        angles = rope + position.to(tl.int64) * DIM + lane
        cos = tl.load(angles, mask=known, other=0)[None, :]
        sin = tl.load(angles + DIM // 2, mask=known, other=0)[None, :]
        turned = new_first * cos - new_second * sin
        new_second = new_second * cos + new_first * sin
        new_first = turned
    new_first = tl.where(turns, new_first, first)
    new_second = tl.where(turns, new_second, second)

    tl.store(qkv + at, new_first.to(qkv.dtype.element_ty), mask=inside & is_query)
    tl.store(qkv + at + DIM // 2, new_second.to(qkv.dtype.element_ty), mask=inside & is_query)

    # K and V of a layer are adjacent, so V's heads follow K's.
    seq = tl.load(token_seq + row).to(tl.int64)
    page = tl.load(block_tables + seq * table_stride + position // PAGE) // ALIGN * STEP
    cell = (head - Q_HEADS)[:, None] * PAGE + position % PAGE
    to = arena + page + layer_start + cell * DIM + lane[None, :]
    written = inside & (head >= Q_HEADS)[:, None]
    tl.store(to, new_first.to(arena.dtype.element_ty), mask=written)
    tl.store(to + DIM // 2, new_second.to(arena.dtype.element_ty), mask=written)
