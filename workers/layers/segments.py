"""Segments of a step: neighbouring rows that share an adapter."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]


def build_segments(
    groups: Sequence[tuple[int, int]],
) -> tuple[Array, Array]:
    """Returns the first rows int32 [N + 1] and adapter slots int32 [N] of N segments, as in
    `ops.base.LoRABatch`.

    groups: (slot, number of rows) of each sequence in row order, with base-only sequences (-1)
    last. Adjacent groups of one slot become one segment.
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
