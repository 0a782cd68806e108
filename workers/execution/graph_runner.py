"""Decode steps as captured graphs (CUDA graphs): one for a number of tokens, run for any such step.

A graph reads its inputs at fixed addresses. A step is padded to the next of a few numbers of
tokens. A padding token is a sequence of its own on a scratch page, after all real ones and in no
segment, so that it has no adapter; a padding segment is empty. The adapters of the tokens, and how
many there are, are read on the device.
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
from workers.execution.batch_builder import BatchInputs, StepShape
from workers.execution.step_input import Array
from workers.execution.upload import Packing, new_host_buffer

NUM_TOKENS = (1, 2, 4, 8, 16, 24, *range(32, 257, 16))
"""Sizes of graphs. Steps with more tokens are computed op by op."""
SCRATCH_PAGE = 0
"""Byte offset of the padding tokens' page, in front of the arena: no sequence uses it."""
MIN_RANK = 16
"""Smallest rank of a graph; lower ranks cost the same."""


@dataclass(frozen=True, slots=True)
class Limits:
    """num_pages: of the longest sequence. num_slots: of adapters."""

    num_pages: int
    max_context: int
    num_slots: int


Compute = Callable[[BatchInputs[Tensor], StepShape], Tensor]
"""Inputs on the device -> logits float32 [tokens, V]."""


class GraphInputs:
    """The inputs of up to `num_tokens` sequences with one token each, and of as many segments, in
    device memory at fixed addresses. Block tables are as wide there as the longest sequence could
    need; what is uploaded is as wide as the step needs."""

    def __init__(
        self, num_tokens: int, num_segments: int, limits: Limits, device: torch.device
    ) -> None:
        self._device = device
        self._num_tokens = num_tokens
        many, few = np.zeros(num_tokens, np.int64), np.zeros(num_tokens, np.int32)
        template = BatchInputs[Array](
            buffer_slots=many,
            buffer_positions=many,
            query_start=np.zeros(num_tokens + 1, np.int32),
            token_seq=few,
            positions=few,
            context_lens=few,
            block_tables=np.zeros((num_tokens, 0), np.int64),
            last_tokens=many,
            segment_start=np.zeros(num_segments + 1, np.int32),
            segment_slot=np.zeros(num_segments, np.int32),
        )
        self._packing = Packing(template)
        tables = torch.empty((num_tokens, limits.num_pages), dtype=torch.int64, device=device)
        num_bytes = self._packing.num_bytes + tables.nbytes
        self._memory = torch.empty(num_bytes, dtype=torch.uint8, device=device)
        self.tensors = BatchInputs[Tensor](*self._packing.tensors(self._memory))._replace(
            block_tables=tables
        )

    def fill(self, inputs: BatchInputs[Array]) -> None:
        """Replaces all inputs, behind what the device has to do by now."""
        count, num_pages = inputs.block_tables.shape
        wide = Packing([np.zeros((self._num_tokens, num_pages), np.int64)])
        first = self._packing.num_bytes
        end = first + wide.num_bytes
        host = new_host_buffer(end, self._device)
        to = BatchInputs[Array](*self._packing.arrays(host))
        to.query_start[:] = np.arange(len(to.query_start))
        to.token_seq[:] = to.last_tokens[:] = np.arange(len(to.token_seq))
        _pad(to.buffer_slots, inputs.buffer_slots, 0)
        _pad(to.buffer_positions, inputs.buffer_positions, 0)
        _pad(to.positions, inputs.positions, 0)
        _pad(to.context_lens, inputs.context_lens, 1)
        (tables,) = wide.arrays(host[first:])
        tables[:count] = inputs.block_tables
        tables[count:, 0] = SCRATCH_PAGE
        _pad(to.segment_start, inputs.segment_start, inputs.segment_start[-1])
        _pad(to.segment_slot, inputs.segment_slot, 0)
        self._memory[:end].copy_(host, non_blocking=True)
        (uploaded,) = wide.tensors(self._memory[first:end])
        self.tensors.block_tables[:, :num_pages].copy_(uploaded)


class StepGraph:
    """A captured step. num_tokens: at most. max_rank: the largest rank of adapters; 0 for none."""

    def __init__(
        self, num_tokens: int, max_rank: int, limits: Limits, ops: Ops, compute: Compute
    ) -> None:
        num_segments = min(num_tokens, limits.num_slots) if max_rank else 0
        self._inputs = GraphInputs(num_tokens, num_segments, limits, ops.device)
        shape = StepShape(max_query=1, max_context=limits.max_context, max_rank=max_rank)
        self._compute = partial(compute, self._inputs.tensors, shape)
        self._ops = ops
        self._run: Callable[[], Tensor] | None = None

    def prepare(self, inputs: BatchInputs[Array]) -> Callable[[], Tensor]:
        """What computes the inputs: logits float32 [tokens, V], valid until the next run."""
        self._inputs.fill(inputs)
        if self._run is None:
            self._run = self._ops.capture(self._compute)
        run, count = self._run, len(inputs.positions)
        return lambda: run()[:count]


class GraphRunner:
    """Runs decode steps by graphs: one for each number of tokens and largest rank, captured when it
    is first needed."""

    def __init__(self, limits: Limits, ops: Ops, compute: Compute) -> None:
        self._limits = limits
        self._ops = ops
        self._compute = compute
        self._graphs: dict[tuple[int, int], StepGraph] = {}

    def prepare(self, inputs: BatchInputs[Array], shape: StepShape) -> Callable[[], Tensor] | None:
        """As `StepGraph.prepare`; None if a sequence has several tokens or the step is too big."""
        count = len(inputs.positions)
        if shape.max_query > 1 or count > NUM_TOKENS[-1]:
            return None
        num_tokens = NUM_TOKENS[bisect_left(NUM_TOKENS, count)]
        max_rank = _power_of_two(max(shape.max_rank, MIN_RANK)) if shape.max_rank else 0
        graph = self._graphs.get((num_tokens, max_rank))
        if graph is None:
            graph = StepGraph(num_tokens, max_rank, self._limits, self._ops, self._compute)
            self._graphs[num_tokens, max_rank] = graph
        return graph.prepare(inputs)


def _pad(to: Array, values: Array, value: int) -> None:
    to[: len(values)] = values
    to[len(values) :] = value


def _power_of_two(number: int) -> int:
    """The smallest one that is not below."""
    return 1 << (number - 1).bit_length()
