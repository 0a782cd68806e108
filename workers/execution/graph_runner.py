"""Decode steps as captured graphs (CUDA graphs), one per number of tokens, number of adapters and
rank bound.

A graph reads its inputs at fixed addresses. A step is padded to the next available number of tokens
and of adapters. A padding token is a sequence of its own on a scratch page, after all real ones and
in no segment, so it has no adapter. A padding segment is empty. The adapters of the tokens are read
on the device.

All graphs share their inputs, block tables and logits, because they run one after the other. They
are captured before the first request, the largest first, so that the others reuse its memory for
intermediate results. A step whose graph cannot be captured is computed op by op.
"""

from __future__ import annotations

import logging
from bisect import bisect_left
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from ops.base import PAGE_TOKENS, Ops
from workers.execution.batch_builder import BatchInputs, StepShape, rank_bounds
from workers.execution.step_input import Array
from workers.execution.upload import ALIGNMENT, Packing, new_host_buffer

log = logging.getLogger(__name__)

NUM_TOKENS = (1, 2, 4, 8, 16, 24, *range(32, 257, 16))
"""Numbers of tokens that graphs are captured for. Larger steps are computed op by op."""
NUM_SEGMENTS = (4, 16, 64)
"""Numbers of adapters that graphs are captured for (see `segment_sizes`). Each padding segment
costs programs that end at once."""
SCRATCH_PAGE = 0
"""Byte offset of the padding tokens' page, before the arena. No sequence uses it."""


@dataclass(frozen=True, slots=True)
class Limits:
    """Sizes that a model's graphs are captured for.

    num_tokens: of the largest step. max_context: tokens of the longest sequence. num_slots: number
    of adapter slots.
    """

    num_tokens: int
    max_context: int
    num_slots: int
    vocab_size: int

    @classmethod
    def of(cls, max_num_seqs: int, max_context: int, num_slots: int, vocab_size: int) -> Limits:
        """Returns limits for steps of `max_num_seqs` sequences, bounded by the largest graph."""
        place = bisect_left(NUM_TOKENS, max_num_seqs)
        num_tokens = NUM_TOKENS[min(place, len(NUM_TOKENS) - 1)]
        return cls(num_tokens, max_context, num_slots, vocab_size)

    @property
    def num_pages(self) -> int:
        """Number of pages of the longest sequence."""
        return -(-self.max_context // PAGE_TOKENS)

    @property
    def input_bytes(self) -> int:
        """Bytes uploaded for the largest step: its inputs, then its block tables."""
        inputs = Packing(_inputs(self.num_tokens, min(self.num_tokens, self.num_slots)))
        return inputs.num_bytes + 8 * self.num_tokens * self.num_pages + ALIGNMENT

    @property
    def num_bytes(self) -> int:
        """Bytes of `GraphBuffers`."""
        tables, logits = 8 * self.num_pages, 4 * self.vocab_size
        return self.input_bytes + self.num_tokens * (tables + logits)


class GraphKey(NamedTuple):
    """Steps that a graph serves: up to this many tokens and adapters, of ranks up to `max_rank`.
    Rank 0 if there are no adapters."""

    num_tokens: int
    num_segments: int
    max_rank: int


Compute = Callable[[BatchInputs[Tensor], StepShape, Tensor], Tensor]
"""Function of inputs on the device and the output tensor for the logits, float32 [tokens, V].
Returns the output tensor."""


class GraphBuffers:
    """Device memory shared by all graphs of a model."""

    def __init__(self, limits: Limits, device: torch.device) -> None:
        size = limits.num_tokens
        self.inputs = torch.empty(limits.input_bytes, dtype=torch.uint8, device=device)
        self.tables = torch.empty((size, limits.num_pages), dtype=torch.int64, device=device)
        """As wide as the longest sequence needs."""
        self.logits = torch.empty((size, limits.vocab_size), dtype=torch.float32, device=device)


class GraphInputs:
    """Inputs of up to `num_tokens` sequences with one token each, and of up to `num_segments`
    segments, in device memory at fixed addresses. The block tables there are as wide as the longest
    sequence needs, but only the width that the step needs is uploaded."""

    def __init__(self, num_tokens: int, num_segments: int, buffers: GraphBuffers) -> None:
        self._num_tokens = num_tokens
        self._packing = Packing(_inputs(num_tokens, num_segments))
        self._memory = buffers.inputs
        self.tensors = BatchInputs[Tensor](*self._packing.tensors(self._memory))._replace(
            block_tables=buffers.tables[:num_tokens]
        )

    def fill(self, inputs: BatchInputs[Array]) -> None:
        """Replaces all inputs, after the work already submitted to the device."""
        count, num_pages = inputs.block_tables.shape
        wide = Packing([np.zeros((self._num_tokens, num_pages), np.int64)])
        first = self._packing.num_bytes
        end = first + wide.num_bytes
        host = new_host_buffer(end, self._memory.device)
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
        _pad(to.sampled_start, inputs.sampled_start, inputs.sampled_start[-1])
        self._memory[:end].copy_(host, non_blocking=True)
        (uploaded,) = wide.tensors(self._memory[first:end])
        self.tensors.block_tables[:, :num_pages].copy_(uploaded)


class StepGraph:
    """Captured graph of a step."""

    def __init__(
        self, key: GraphKey, limits: Limits, buffers: GraphBuffers, ops: Ops, compute: Compute
    ) -> None:
        """Captures the graph. Raises what the backend raises."""
        self._inputs = GraphInputs(key.num_tokens, key.num_segments, buffers)
        # `capture` computes the work once before; here it computes padding only.
        self._inputs.fill(_inputs(0, 0)._replace(block_tables=np.zeros((0, 1), np.int64)))
        shape = StepShape(max_query=1, max_context=limits.max_context, max_rank=key.max_rank)
        logits = buffers.logits[: key.num_tokens]
        self._run = ops.capture(partial(compute, self._inputs.tensors, shape, logits))

    def prepare(self, inputs: BatchInputs[Array]) -> Callable[[], Tensor]:
        """Returns a function that computes the logits of the inputs, float32 [tokens, V]. They are
        valid until any graph runs again."""
        self._inputs.fill(inputs)
        run, count = self._run, len(inputs.positions)
        return lambda: run()[:count]


class GraphRunner:
    """Runner of decode steps by graphs, captured by `capture_all` or at first use."""

    def __init__(self, limits: Limits, ops: Ops, compute: Compute) -> None:
        self._limits = limits
        self._ops = ops
        self._compute = compute
        self._buffers = GraphBuffers(limits, ops.device)
        self._graphs: dict[GraphKey, StepGraph] = {}
        self._captures = True
        """Whether no capture has failed."""

    def capture_all(self, max_rank: int) -> int:
        """Captures the graphs of all steps with adapters up to that rank. Returns their number."""
        for key in sorted(self._keys(max_rank), reverse=True):
            self._graph(key)
        return len(self._graphs)

    def prepare(self, inputs: BatchInputs[Array], shape: StepShape) -> Callable[[], Tensor] | None:
        """Returns a function that computes the logits (see `StepGraph.prepare`), or None if a
        sequence has several tokens, the step is too large or its graph cannot be captured."""
        if shape.max_query > 1 or len(inputs.positions) > self._limits.num_tokens:
            return None
        graph = self._graph(self._key(inputs, shape))
        return None if graph is None else graph.prepare(inputs)

    def _graph(self, key: GraphKey) -> StepGraph | None:
        graph = self._graphs.get(key)
        if graph is None and self._captures:
            try:
                graph = StepGraph(key, self._limits, self._buffers, self._ops, self._compute)
            except Exception as error:
                self._captures = False
                log.warning(
                    "capturing a graph of %d tokens, %d adapters and rank %d failed, all steps"
                    " without a graph run op by op from now on: %s: %s",
                    *(*key, type(error).__name__, error),
                )
                return None
            self._graphs[key] = graph
        return graph

    def _key(self, inputs: BatchInputs[Array], shape: StepShape) -> GraphKey:
        num_tokens = NUM_TOKENS[bisect_left(NUM_TOKENS, len(inputs.positions))]
        num_segments = len(inputs.segment_slot)
        if not num_segments:
            return GraphKey(num_tokens, 0, 0)
        sizes = segment_sizes(num_tokens, self._limits.num_slots)
        return GraphKey(num_tokens, sizes[bisect_left(sizes, num_segments)], shape.max_rank)

    def _keys(self, max_rank: int) -> Iterator[GraphKey]:
        for num_tokens in NUM_TOKENS[: NUM_TOKENS.index(self._limits.num_tokens) + 1]:
            yield GraphKey(num_tokens, 0, 0)
            for num_segments in segment_sizes(num_tokens, self._limits.num_slots):
                for rank in rank_bounds(max_rank):
                    yield GraphKey(num_tokens, num_segments, rank)


def segment_sizes(num_tokens: int, num_slots: int) -> list[int]:
    """Returns the numbers of adapters, ascending, that graphs of `num_tokens` tokens are captured
    for.

    The second largest is the largest for which LoRA kernels work by adapter. With at least half as
    many adapters as tokens they work by token (`ops.triton_table.reads_by_row`), and padding must
    not switch a step of few adapters to that form.
    """
    most = min(num_tokens, num_slots)
    by_adapter = (num_tokens - 1) // 2
    sizes = {*(size for size in NUM_SEGMENTS if size < by_adapter), by_adapter, most}
    return sorted({min(size, most) for size in sizes if size})


def _inputs(num_tokens: int, num_segments: int) -> BatchInputs[Array]:
    """Returns zeros in the shapes of such a step, without block tables."""
    many, few = np.zeros(num_tokens, np.int64), np.zeros(num_tokens, np.int32)
    return BatchInputs[Array](
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
        sampled_start=np.zeros(num_segments + 1, np.int32),
    )


def _pad(to: Array, values: Array, value: int) -> None:
    to[: len(values)] = values
    to[len(values) :] = value
