"""Block sizes of the Triton kernels, chosen by shape on the host: no autotuning on the hot path.

The numbers come from public tunings on Hopper and from arithmetic, not from a sweep of ours;
`benchmarks/gpu_tuning.py` compares the forms. BLOCK_N of the LoRA expand stays at 64 or less: 128
gave NaN on sm_90 elsewhere (vllm#48590), and `tests/ops/test_cuda.py` is what may raise it.

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

MAX_PARTS = 16
"""Most parts that a context of any length is cut into."""

PART_TOKENS = 256
"""A part is at least so long, so that short contexts have one part and need no sum."""


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
    """rows: query rows x heads of a group; tile: keys a step. part_tokens: the shortest part of a
    context, a multiple of the tile; programs: how many share the parts of a sequence."""

    rows: int
    tile: int
    part_tokens: int
    programs: int
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


def shrink(num_rows: int, num_segments: int, depth: int, ranks: int, itemsize: int) -> Blocks:
    """ranks: the largest rank of the step. itemsize: bytes of an activation. The parts of a sum
    follow from the form and the depth alone, so that steps of one form sum alike."""
    columns = min(max(power_of_two(ranks), SMALLEST_DOT), 64)
    if reads_by_row(num_rows, num_segments):
        rows, step, split = 1, 256 if columns <= 32 else 128, 8
    elif itemsize > 2:
        rows, columns, step, split = 16, min(columns, 32), 32, 8
    else:
        rows, step = _rows(num_rows, num_segments), 128
        split = 8 if rows == 16 else 2
    # Each part has two steps of the sum at least.
    return Blocks(rows, columns, step, min(split, _floor(depth // (2 * step))), warps=4, stages=3)


def expand(num_rows: int, num_segments: int, ranks: int, itemsize: int) -> Blocks:
    depth = min(max(power_of_two(ranks), SMALLEST_DOT), 64)
    if reads_by_row(num_rows, num_segments):
        return Blocks(1, 4096 // depth, depth, 1, warps=4, stages=1)
    if itemsize > 2:
        return Blocks(16, 32, min(depth, 32), 1, warps=4, stages=1)
    return Blocks(_rows(num_rows, num_segments), MAX_EXPAND_COLUMNS, depth, 1, warps=4, stages=1)


def short_attention(
    num_seqs: int, num_kv_heads: int, group: int, max_context: int, itemsize: int
) -> AttentionBlocks:
    """For sequences of a few tokens. group: query heads of a KV head. itemsize: bytes of an
    activation. At least 4 programs share a sequence's parts, however many sequences there are: a
    batch waits for its longest context."""
    rows = max(SMALLEST_DOT, power_of_two(group))
    wanted = power_of_two(blocks_of(16 * PROCESSORS, num_seqs * num_kv_heads))
    most = min(MAX_PARTS, power_of_two(blocks_of(max_context, PART_TOKENS)))
    programs = min(max(wanted, 4), most)
    # The address of a page is loaded before its keys, which takes two stages: with 3 no load of
    # keys or values would overlap the arithmetic on those before.
    stages = 1 if itemsize > 2 else 5
    return AttentionBlocks(rows, 32, PART_TOKENS, programs, warps=4, stages=stages)


def long_attention(group: int, itemsize: int) -> AttentionBlocks:
    """For the others."""
    smallest = max(SMALLEST_DOT, power_of_two(group))
    if itemsize > 2:
        return AttentionBlocks(smallest, 32, PART_TOKENS, 1, warps=4, stages=1)
    return AttentionBlocks(max(128, smallest), 64, PART_TOKENS, 1, warps=8, stages=2)


def _rows(num_rows: int, num_segments: int) -> int:
    """Rows of a matrix tile: tall ones where segments are long."""
    return 16 if num_rows <= 64 * num_segments else 64


def _floor(number: int) -> int:
    """The largest power of two that is not above, and at least 1."""
    return 1 << (max(number, 1).bit_length() - 1)
