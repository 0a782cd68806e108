"""Block sizes of the Triton kernels. The host chooses them by shape, without autotuning.

The sizes are the result of measurements on an H200 with shapes of an 8B model, see
docs/understand/gpu.md; `benchmarks/gpu_tuning.py` compares some with their alternatives. In vLLM,
tiles of 128 columns gave NaN in the LoRA expand on sm_90 (vllm#48590). `tests/ops/test_cuda.py`
tests this case, and passed on sm_90 with Triton 3.6.

Sizes that select a compiled kernel are powers of two, so that few kernels are compiled. Float32
uses no tensor cores (tf32 would not give float32's results), so its tiles are small.
"""

from __future__ import annotations

from dataclasses import dataclass

ALIGNMENT = 64
"""Alignment in bytes of every page, layer and adapter offset. Kernels multiply by it, so that the
compiler may load 16 bytes per thread from an address read from a table."""

PROCESSORS = 132
"""Number of multiprocessors of an H100 or H200."""

SMALLEST_DOT = 16
"""Smallest size of a tl.dot along each axis. Smaller operands are padded and masked."""

EXPAND_COLUMNS = 128

MAX_PARTS = 16
"""Maximum number of parts that a context is split into."""

PART_TOKENS = 256
"""Minimum number of tokens in a part of a context. A shorter context is not split, so that its
parts need not be combined."""


@dataclass(frozen=True, slots=True)
class Blocks:
    """Tile sizes of a LoRA kernel. rows x columns: tile of the result. depth: step along the sum.

    split: number of programs that share one sum, each writing its own plane.
    """

    rows: int
    columns: int
    depth: int
    split: int
    warps: int
    stages: int


@dataclass(frozen=True, slots=True)
class AttentionBlocks:
    """Tile sizes of an attention kernel. rows: query tokens times heads of a group. tile: keys per
    step. part_tokens: minimum length of a part of a context, a multiple of the tile. programs:
    number of programs that share the parts of a sequence."""

    rows: int
    tile: int
    part_tokens: int
    programs: int
    warps: int
    stages: int


def power_of_two(number: int) -> int:
    """Returns the smallest power of two >= `number`."""
    return 1 << max(number - 1, 0).bit_length()


def blocks_of(number: int, size: int) -> int:
    """Returns the number of blocks of `size` that hold `number` elements."""
    return -(-number // size)


def reads_by_row(num_rows: int, num_segments: int) -> bool:
    """Returns whether LoRA kernels use their row form. It is faster for steps with at most two rows
    per adapter, which would not fill a matrix tile."""
    return num_rows <= 2 * num_segments


def shrink(num_rows: int, num_segments: int, depth: int, ranks: int, itemsize: int) -> Blocks:
    """Returns the tile sizes of the LoRA shrink. depth: input features. ranks: largest rank of the
    step. itemsize: bytes of an activation. The split depends on the number of rows only through the
    kernel's form and the tile's height, so that steps with equal tiles add in the same order."""
    columns = min(max(power_of_two(ranks), SMALLEST_DOT), 64)
    warps = 4
    if reads_by_row(num_rows, num_segments):
        rows, step, split, warps = 1, 256 if columns <= 32 else 128, 16, 8
    elif itemsize > 2:
        rows, columns, step, split = 16, min(columns, 32), 32, 8
    else:
        rows, step = _rows(num_rows, num_segments), 128
        # Tall tiles use a smaller split, because expand reads all planes for each column tile.
        split = 4 if rows > 16 else 16 if depth > 8192 else 8
    return Blocks(rows, columns, step, min(split, _floor(depth // step)), warps, stages=3)


def expand(num_rows: int, num_segments: int, ranks: int, itemsize: int) -> Blocks:
    if reads_by_row(num_rows, num_segments):
        return expand_by_row(ranks)
    depth = _expand_depth(ranks)
    if itemsize > 2:
        return Blocks(16, 32, min(depth, 32), 1, warps=4, stages=1)
    rows = _rows(num_rows, num_segments)
    # A tile of 64 rows and EXPAND_COLUMNS columns would not fit the registers.
    columns = EXPAND_COLUMNS if rows == 16 else EXPAND_COLUMNS // 2
    return Blocks(rows, columns, depth, 1, warps=4, stages=1)


def expand_by_row(ranks: int) -> Blocks:
    """Returns the tile sizes of the LoRA expand's row form. ranks: largest rank of the step."""
    depth = _expand_depth(ranks)
    return Blocks(1, 8192 // depth, depth, 1, warps=4, stages=1)


def _expand_depth(ranks: int) -> int:
    return min(max(power_of_two(ranks), SMALLEST_DOT), 64)


def short_attention(
    num_seqs: int, num_kv_heads: int, group: int, max_context: int, itemsize: int
) -> AttentionBlocks:
    """Returns the tile sizes for sequences of a few tokens. group: query heads per KV head.
    itemsize: bytes of an activation. If there are enough parts, at least 4 programs share a
    sequence's parts even in a large batch, because a batch waits for its longest context."""
    rows = max(SMALLEST_DOT, power_of_two(group))
    wanted = power_of_two(blocks_of(16 * PROCESSORS, num_seqs * num_kv_heads))
    most = min(MAX_PARTS, power_of_two(blocks_of(max_context, PART_TOKENS)))
    programs = min(max(wanted, 4), most)
    # The loads of a page's address and of its keys take two pipeline stages. With 3 stages, no load
    # of keys or values overlaps the arithmetic on the previous keys, but a multiprocessor can run
    # more programs at once. If there are many programs, this hides the time of the loads.
    stages = 1 if itemsize > 2 else 5 if num_seqs * num_kv_heads < PROCESSORS else 3
    return AttentionBlocks(rows, 32, PART_TOKENS, programs, warps=4, stages=stages)


def long_attention(group: int, dim: int, itemsize: int, shared_bytes: int) -> AttentionBlocks:
    """Returns the tile sizes for sequences of many tokens, such as a prefill. dim: size of a head.
    shared_bytes: shared memory that a program may have."""
    smallest = max(SMALLEST_DOT, power_of_two(group))
    if itemsize > 2:
        return AttentionBlocks(smallest, 32, PART_TOKENS, 1, warps=4, stages=1)
    # With heads of size 128, a program needs 98 KB of shared memory for 2 stages, 133 KB for 5.
    stages = 5 if dim <= 128 and shared_bytes >= 160 << 10 else 2
    return AttentionBlocks(max(128, smallest), 64, PART_TOKENS, 1, warps=8, stages=stages)


def _rows(num_rows: int, num_segments: int) -> int:
    """Returns the number of rows of a matrix tile, which is higher for long segments."""
    return 16 if num_rows <= 64 * num_segments else 64


def _floor(number: int) -> int:
    """Returns the largest power of two <= `number`, at least 1."""
    return 1 << (max(number, 1).bit_length() - 1)
