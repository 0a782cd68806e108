"""Decode steps at fixed addresses: captured once for a number of rows, replayed for any such step.

A step is padded to the next of a few numbers of rows. A padded row is a sequence of one token on a
scratch page. It comes after all real ones and lies in no segment, so it has no adapter; a padded
segment has no rows. Which adapters the rows have, and how many, is read on the device.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from torch import Tensor

from ops.base import Ops
from workers.execution.batch_builder import Extent, RowInputs
from workers.execution.upload import Array, Packing, new_host_buffer

NUM_ROWS = (1, 2, 4, 8, 16, 24, *range(32, 257, 16))
"""Steps with more are computed as they come."""
SCRATCH_PAGE = 0
"""Byte offset of the page of padded rows, in front of the arena: no sequence has it."""
MIN_RANK = 16
"""Those below cost the same."""


@dataclass(frozen=True, slots=True)
class Limits:
    """num_pages: of the longest sequence. num_slots: of adapters."""

    num_pages: int
    max_context: int
    num_slots: int


Compute = Callable[[RowInputs[Tensor], Extent], Tensor]
"""Rows of inputs on the device -> logits float32 [rows, V]."""


class StaticRows:
    """The inputs of up to `num_rows` sequences with one row each, and of as many segments, in
    device memory that stays where it is. Block tables are as wide there as the longest sequence
    could need; what is uploaded is as wide as the step's need."""

    def __init__(
        self, num_rows: int, num_segments: int, limits: Limits, device: torch.device
    ) -> None:
        self._device = device
        self._num_rows = num_rows
        many, few = np.zeros(num_rows, np.int64), np.zeros(num_rows, np.int32)
        template = RowInputs[Array](
            buffer_rows=many,
            buffer_positions=many,
            query_start=np.zeros(num_rows + 1, np.int32),
            row_seq=few,
            positions=few,
            context_lens=few,
            block_tables=np.zeros((num_rows, 0), np.int64),
            last_rows=many,
            segment_start=np.zeros(num_segments + 1, np.int32),
            segment_slot=np.zeros(num_segments, np.int32),
        )
        self._packing = Packing(template)
        tables = torch.empty((num_rows, limits.num_pages), dtype=torch.int64, device=device)
        num_bytes = self._packing.num_bytes + tables.nbytes
        self._memory = torch.empty(num_bytes, dtype=torch.uint8, device=device)
        self.tensors = RowInputs[Tensor](*self._packing.tensors(self._memory))._replace(
            block_tables=tables
        )

    def fill(self, rows: RowInputs[Array]) -> None:
        """Replaces all inputs, behind what the device has to do by now."""
        count, num_pages = rows.block_tables.shape
        wide = Packing([np.zeros((self._num_rows, num_pages), np.int64)])
        first = self._packing.num_bytes
        end = first + wide.num_bytes
        host = new_host_buffer(end, self._device)
        to = RowInputs[Array](*self._packing.arrays(host))
        to.query_start[:] = np.arange(len(to.query_start))
        to.row_seq[:] = to.last_rows[:] = np.arange(len(to.row_seq))
        _pad(to.buffer_rows, rows.buffer_rows, 0)
        _pad(to.buffer_positions, rows.buffer_positions, 0)
        _pad(to.positions, rows.positions, 0)
        _pad(to.context_lens, rows.context_lens, 1)
        (tables,) = wide.arrays(host[first:])
        tables[:count] = rows.block_tables
        tables[count:, 0] = SCRATCH_PAGE
        _pad(to.segment_start, rows.segment_start, rows.segment_start[-1])
        _pad(to.segment_slot, rows.segment_slot, 0)
        self._memory[:end].copy_(host, non_blocking=True)
        (landed,) = wide.tensors(self._memory[first:end])
        self.tensors.block_tables[:, :num_pages].copy_(landed)


class StaticStep:
    """num_rows: sequences at most. max_rank: of their adapters at most; 0: none has one."""

    def __init__(
        self, num_rows: int, max_rank: int, limits: Limits, ops: Ops, compute: Compute
    ) -> None:
        num_segments = min(num_rows, limits.num_slots) if max_rank else 0
        self._rows = StaticRows(num_rows, num_segments, limits, ops.device)
        extent = Extent(max_query=1, max_context=limits.max_context, max_rank=max_rank)
        self._compute = partial(compute, self._rows.tensors, extent)
        self._ops = ops
        self._replay: Callable[[], Tensor] | None = None

    def prepare(self, rows: RowInputs[Array]) -> Callable[[], Tensor]:
        """What computes these: logits float32 [rows, V], to be read before the next replay."""
        self._rows.fill(rows)
        if self._replay is None:
            self._replay = self._ops.capture(self._compute)
        replay, count = self._replay, len(rows.positions)
        return lambda: replay()[:count]


class StaticSteps:
    """One for each number of rows and greatest rank, made when it is first needed."""

    def __init__(self, limits: Limits, ops: Ops, compute: Compute) -> None:
        self._limits = limits
        self._ops = ops
        self._compute = compute
        self._steps: dict[tuple[int, int], StaticStep] = {}

    def prepare(self, rows: RowInputs[Array], extent: Extent) -> Callable[[], Tensor] | None:
        """As `StaticStep.prepare`; None if the step is none of one row a sequence, or too large."""
        count = len(rows.positions)
        if extent.max_query > 1 or count > NUM_ROWS[-1]:
            return None
        num_rows = NUM_ROWS[bisect_left(NUM_ROWS, count)]
        max_rank = _power_of_two(max(extent.max_rank, MIN_RANK)) if extent.max_rank else 0
        step = self._steps.get((num_rows, max_rank))
        if step is None:
            step = StaticStep(num_rows, max_rank, self._limits, self._ops, self._compute)
            self._steps[num_rows, max_rank] = step
        return step.prepare(rows)


def _pad(to: Array, values: Array, value: int) -> None:
    to[: len(values)] = values
    to[len(values) :] = value


def _power_of_two(number: int) -> int:
    """The smallest one that is not below."""
    return 1 << (number - 1).bit_length()
