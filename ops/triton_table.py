"""Block sizes of the Triton kernels, chosen by shape on the host: no autotuning on the hot path.

The numbers come from public tunings on Hopper and from arithmetic, not from a sweep of ours;
`benchmarks/gpu.py` sweeps them. BLOCK_N of the LoRA expand stays at 64 or less: 128 gave NaN on
sm_90 elsewhere (vllm#48590), and `tests/ops/test_triton_poison.py` is what may raise it.

Everything that selects a compiled kernel here is a power of two, so that few are compiled. Float32
has no tensor cores here (tf32 would not give float32's answers), so its tiles are small.
"""

from __future__ import annotations

from dataclasses import dataclass

ALIGNMENT = 64
"""Bytes that every page, layer and adapter offset is a multiple of. A kernel that multiplies by it
lets the compiler load 16 bytes a thread from an address that was read out of a table."""

PROCESSORS = 132
"""Multiprocessors of an H100 or H200; work is split until each has two programs."""

SMALLEST_DOT = 16
"""tl.dot takes no side below 16: smaller ones are masked."""

MAX_EXPAND_COLUMNS = 64


@dataclass(frozen=True, slots=True)
class Blocks:
    """rows x columns is the tile of the result, depth the step along the sum.

    split: programs that share one sum, each with a plane of its own.
    """

    rows: int
    columns: int
    depth: int
    split: int
    warps: int
    stages: int


@dataclass(frozen=True, slots=True)
class AttentionBlocks:
    """rows: query rows x heads of a group; tile: keys a step; splits: programs a context."""

    rows: int
    tile: int
    splits: int
    warps: int
    stages: int


def power_of_two(number: int) -> int:
    """The smallest one that is not below."""
    return 1 << max(number - 1, 0).bit_length()


def blocks_of(number: int, size: int) -> int:
    """Blocks of that size that hold so many."""
    return -(-number // size)


def reads_by_row(num_rows: int, num_segments: int) -> bool:
    """Whether each row fetches its own adapter: one or two rows of each fill no matrix tile."""
    return num_rows <= 2 * num_segments


def shrink(
    num_rows: int, num_segments: int, depth: int, ranks: int, projections: int, itemsize: int
) -> Blocks:
    """ranks: the largest rank of the step. itemsize: bytes of an activation."""
    columns = min(max(power_of_two(ranks), SMALLEST_DOT), 64)
    if reads_by_row(num_rows, num_segments):
        rows, step = 1, 256 if columns <= 32 else 128
    elif itemsize > 2:
        rows, columns, step = 16, min(columns, 32), 32
    else:
        rows, step = _rows(num_rows, num_segments), 128
    places = num_rows if rows == 1 else num_rows // rows + num_segments
    programs = places * projections * blocks_of(ranks, columns)
    split = min(_split(programs, depth, step), 8 if rows <= 16 else 4)
    return Blocks(rows, columns, step, split, warps=4, stages=3)


def expand(num_rows: int, num_segments: int, ranks: int, itemsize: int) -> Blocks:
    depth = min(max(power_of_two(ranks), SMALLEST_DOT), 64)
    if reads_by_row(num_rows, num_segments):
        return Blocks(1, 4096 // depth, depth, 1, warps=4, stages=1)
    if itemsize > 2:
        return Blocks(16, 32, min(depth, 32), 1, warps=4, stages=1)
    return Blocks(_rows(num_rows, num_segments), MAX_EXPAND_COLUMNS, depth, 1, warps=4, stages=1)


def attention(
    num_rows: int,
    num_seqs: int,
    num_kv_heads: int,
    group: int,
    max_query: int,
    max_context: int,
    itemsize: int,
) -> AttentionBlocks:
    """group: query heads of a KV head. itemsize: bytes of an activation."""
    smallest = max(SMALLEST_DOT, power_of_two(group))
    if itemsize > 2:
        rows, tile, warps, stages = smallest, 32, 4, 1
    elif max_query * group <= 64:
        rows, tile, warps, stages = smallest, 32, 4, 3
    else:
        rows, tile, warps, stages = max(128, smallest), 64, 8, 2
    programs = max((num_rows // (rows // group) + num_seqs) * num_kv_heads, 1)
    wanted = min(blocks_of(2 * PROCESSORS, programs), blocks_of(max_context, 4 * tile), 32)
    return AttentionBlocks(rows, tile, power_of_two(wanted), warps, stages)


def _rows(num_rows: int, num_segments: int) -> int:
    """Of a matrix tile: tall ones where segments are long."""
    return 16 if num_rows <= 64 * num_segments else 64


def _split(programs: int, depth: int, block: int) -> int:
    """Enough for two programs a processor, while each has two blocks of the sum."""
    wanted = blocks_of(2 * PROCESSORS, max(programs, 1))
    return power_of_two(max(min(wanted, depth // (2 * block)), 1))
