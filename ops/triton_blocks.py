"""Assignment of work to programs when only the device knows how the rows are divided.

The rows of a step are divided into groups (sequences, segments), and groups into blocks of B rows.
A grid of `T // B + N` blocks covers any division of T rows into N groups. The blocks of group n
begin at `start[n] // B + n`. There are at least as many as the group needs, and a block past the
end of its group does nothing. Therefore a captured graph can be replayed with any number of groups
up to its capacity, and no table of blocks has to be built or uploaded.
"""

from __future__ import annotations

import triton
import triton.language as tl

COUNTS = ("num_segments", "first_entry", "num_rows")
"""Arguments of the LoRA kernels that change between steps or layers. They are not specialised,
because Triton would compile another kernel, while a request waits, if the value is 1 or a multiple
of 16."""


@triton.jit
def group_of_block(start, num_groups, block, ROWS: tl.constexpr):
    """Returns the group n that a block belongs to: the last group with `start[n] // ROWS + n` <=
    block.

    Loads and counts 128 groups at a time, which costs less than the dependent loads of a binary
    search.
    """
    count = 0
    for first in range(0, num_groups, 128):
        group = first + tl.arange(0, 128)
        known = group < num_groups
        begin = tl.load(start + group, mask=known, other=0)
        count += tl.sum((known & (begin // ROWS + group <= block)).to(tl.int32), axis=0)
    return count - 1


@triton.jit
def group_of_row(start, num_groups, row):
    """Returns the last group that begins at or before the row. Groups without rows are skipped."""
    count = 0
    for first in range(0, num_groups, 128):
        group = first + tl.arange(0, 128)
        known = group < num_groups
        begin = tl.load(start + group, mask=known, other=0)
        count += tl.sum((known & (begin <= row)).to(tl.int32), axis=0)
    return count - 1
