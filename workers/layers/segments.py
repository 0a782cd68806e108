"""Builds the adapter segments of a step. A segment is a range of adjacent rows that share an
adapter."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]


def build_segments(
    groups: Sequence[tuple[int, int]],
) -> tuple[Array, Array]:
    """Returns two arrays in the form of `ops.base.LoRABatch`. The first array has the first row of
    each segment, followed by the end of the last segment, int32 [N + 1]. The second array has the
    adapter slot of each segment, int32 [N].

    groups: adapter slot and number of rows of each sequence, in row order. Sequences without an
    adapter (-1) are last. Adjacent groups of the same slot become one segment.
    """
    starts, slots = [0], list[int]()
    for slot, num_rows in groups:
        if slot < 0 or num_rows == 0:
            continue
        if slots and slots[-1] == slot:
            starts[-1] += num_rows
        else:
            slots.append(slot)
            starts.append(starts[-1] + num_rows)
    return np.array(starts, np.int32), np.array(slots, np.int32)
