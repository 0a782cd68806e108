"""Runner of steps as captured graphs (CUDA graphs). Each graph serves steps up to certain numbers
of tokens, sequences and adapters.

A graph reads its inputs at fixed addresses. A step is padded to the sizes of the smallest graph
that fits. If every sequence has one token, each padding token is a sequence of its own. In a step
with prompts, all padding tokens form one sequence. Padding tokens use a scratch page. They come
after all real tokens and are in no segment, so they have no adapter. A padding segment is empty.
The lengths of the sequences and the adapters of the tokens are read on the device.

Graphs are also captured for steps with few prompt tokens, because the host needs longer to launch
the kernels of such a step one by one than the device needs to compute it. Larger steps with prompts
have no graph.

All graphs share their inputs, block tables and logits, because they run one after the other. They
are captured one by one: before the first request, or between two steps if the model is loaded
later. The largest is captured first, so that the others reuse its memory for intermediate results.
A step whose graph is not captured is computed op by op, and its graph is captured next.

Graphs with adapters are captured for one bound of ranks, because a kernel launches programs for all
ranks up to the bound. It begins with the smallest, and rises when a step has larger ranks. Then the
graphs are captured again, and each serves steps with smaller ranks until it is replaced.
"""

from __future__ import annotations

import logging
from bisect import bisect_left
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from memory.page_key import pages_of
from ops.base import Ops
from ops.copies import ALIGNMENT, Packing, new_host_buffer
from workers.execution.batch import RANK_BOUNDS, BatchInputs, ModelBuffers, StepShape
from workers.execution.step_input import Array
from workers.models.loading import LoadedModel

log = logging.getLogger(__name__)

NUM_TOKENS = (1, 2, 4, 8, 16, 24, *range(32, 257, 16))
"""Token counts for which a graph of a step without prompts is captured."""
NUM_TOKENS_WITH_PROMPTS = (128, 256, 512)
"""Token counts for which a graph of a step with prompts is captured."""
FEW_SEQUENCES = 16
"""Maximum number of sequences in the smaller graphs with prompts. Each size of
`NUM_TOKENS_WITH_PROMPTS` has such graphs, and also graphs for the largest number of sequences."""
NUM_PAUSED = 2048
"""Number of steps without a graph after a failed capture before a capture is tried again."""
SCRATCH_PAGE = 0
"""Byte offset in the arena of the page that padding tokens use. No sequence uses this page."""


@dataclass(frozen=True, slots=True)
class Limits:
    """Maximum sizes of a model's steps, adapter slots and sequences (`max_context` tokens).

    max_tokens: maximum number of tokens in a step with prompts. max_rank: rank bound of the steps
    that are to run as graphs.
    """

    max_num_seqs: int
    max_tokens: int
    max_context: int
    num_slots: int
    max_rank: int
    vocab_size: int

    @property
    def num_sequences(self) -> int:
        """Maximum number of sequences in a step without prompts that has a graph."""
        return _least(NUM_TOKENS, self.max_num_seqs)

    @property
    def num_tokens(self) -> int:
        """Maximum number of tokens in a step with prompts that has a graph."""
        return _least(NUM_TOKENS_WITH_PROMPTS, self.max_tokens)

    @property
    def num_pages(self) -> int:
        """Number of pages of the longest sequence."""
        return pages_of(self.max_context)

    @property
    def num_rows(self) -> int:
        """Number of sequences of the largest graph, including one for padding tokens."""
        return self.num_sequences + 1

    @property
    def input_bytes(self) -> int:
        """Number of bytes that are uploaded for the largest step, with its block tables."""
        num_segments = min(self.num_rows, self.num_slots)
        inputs = Packing(_inputs(self.num_tokens, self.num_rows, num_segments))
        return inputs.num_bytes + 8 * self.num_rows * self.num_pages + ALIGNMENT

    @property
    def num_bytes(self) -> int:
        """Number of bytes that `GraphBuffers` allocates."""
        tables, logits = 8 * self.num_pages, 4 * self.vocab_size
        return self.input_bytes + self.num_rows * (tables + logits)


class GraphKey(NamedTuple):
    """Key of a graph: the maximum numbers of tokens, sequences and adapters of the steps that it
    serves. In steps without prompts, each sequence has one token and is sampled."""

    num_tokens: int
    has_prompts: bool
    num_sequences: int
    num_segments: int


Compute = Callable[[BatchInputs[Tensor], StepShape, Tensor], Tensor]
"""Function that computes logits. Arguments: inputs on the device, sizes, and the output tensor for
the logits of the last tokens, float32 [N, V]. Returns the output tensor."""


class GraphBuffers:
    """Device memory shared by all graphs of a model."""

    def __init__(self, limits: Limits, device: torch.device) -> None:
        rows = limits.num_rows
        self.inputs = torch.empty(limits.input_bytes, dtype=torch.uint8, device=device)
        self.tables = torch.empty((rows, limits.num_pages), dtype=torch.int64, device=device)
        """Block tables as wide as the longest sequence needs."""
        self.logits = torch.empty((rows, limits.vocab_size), dtype=torch.float32, device=device)


class StepGraph:
    """Captured graph of the steps that its key describes, with inputs in device memory at fixed
    addresses. The block tables on the device are as wide as the longest sequence needs, but only
    the columns that the step needs are uploaded."""

    def __init__(
        self, key: GraphKey, limits: Limits, buffers: GraphBuffers, ops: Ops, compute: Compute
    ) -> None:
        """Captures the graph. Raises any error of the backend."""
        self.max_rank = limits.max_rank
        self._key = key
        self._packing = Packing(_inputs(key.num_tokens, key.num_sequences, key.num_segments))
        self._memory = buffers.inputs
        self.inputs = BatchInputs[Tensor](*self._packing.tensors(self._memory))._replace(
            block_tables=buffers.tables[: key.num_sequences]
        )
        # `capture` first runs the work once, which computes only padding with these inputs.
        self._fill(_inputs(0, 0, 0)._replace(block_tables=np.zeros((0, 1), np.int64)))
        max_query = key.num_tokens if key.has_prompts else 1
        shape = StepShape(max_query, limits.max_context, limits.max_rank)
        logits = buffers.logits[: key.num_sequences]
        self._run = ops.capture(partial(compute, self.inputs, shape, logits))

    def _fill(self, inputs: BatchInputs[Array]) -> None:
        """Replaces all inputs with `inputs` and padding. Does not block; the device replaces them
        after the work that was already submitted to it."""
        count, num_pages = inputs.block_tables.shape
        num_tokens, has_prompts, num_sequences, _ = self._key
        wide = Packing([np.zeros((num_sequences, num_pages), np.int64)])
        first = self._packing.num_bytes
        end = first + wide.num_bytes
        host = new_host_buffer(end, self._memory.device)
        to = BatchInputs[Array](*self._packing.arrays(host))
        if has_prompts:
            _pad(to.query_start, inputs.query_start, num_tokens)
            _pad(to.token_seq, inputs.token_seq, count)
            _pad(to.last_tokens, inputs.last_tokens, 0)
        else:
            to.query_start[:] = np.arange(num_sequences + 1)
            to.token_seq[:] = to.last_tokens[:] = np.arange(num_tokens)
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
        self.inputs.block_tables[:, :num_pages].copy_(uploaded)

    def prepare(self, inputs: BatchInputs[Array]) -> Callable[[], Tensor]:
        """Uploads the inputs. Returns a function that computes the logits of the last tokens,
        float32 [N, V], which are valid until any graph runs again."""
        self._fill(inputs)
        run, count = self._run, len(inputs.last_tokens)
        return lambda: run()[:count]


class GraphRunner:
    """Implementation of `Graphs` for one model."""

    def __init__(
        self,
        limits: Limits,
        ops: Ops,
        compute: Compute,
        on_failure: Callable[[], object] = lambda: None,
    ) -> None:
        """compute: must not refer to the `ModelRunner`, so that the graphs are freed as soon as the
        `ModelRunner` is dropped. on_failure: called after each failed capture."""
        self._limits = replace(limits, max_rank=RANK_BOUNDS[0])
        """Limits of the graphs that are captured next."""
        self._largest_rank = limits.max_rank
        self._ops = ops
        self._compute = compute
        self._on_failure = on_failure
        self._buffers = GraphBuffers(limits, ops.device)
        self._graphs: dict[GraphKey, StepGraph] = {}
        self._missing = sorted(_keys(limits))
        """Keys of the graphs that are not captured yet, or for a smaller rank bound. The last is
        captured next."""
        self._num_paused = 0
        """Number of steps without a graph until captures are tried again; 0 if none failed."""

    @property
    def can_capture(self) -> bool:
        return bool(self._missing) and not self._num_paused

    def capture_all(self) -> int:
        while self.can_capture:
            self.capture_next()
        return len(self._graphs)

    def prepare(self, inputs: BatchInputs[Array], shape: StepShape) -> Callable[[], Tensor] | None:
        """Implements `Graphs.prepare`. The graph of a step that has none is captured next."""
        if (key := self._key(inputs, shape)) is None:
            return None
        graph = self._graphs.get(key)
        if graph is not None and graph.max_rank >= shape.max_rank:
            return graph.prepare(inputs)
        if shape.max_rank > self._limits.max_rank:
            self._limits = replace(self._limits, max_rank=shape.max_rank)
            outgrown = {each for each in self._graphs if each.num_segments}
            self._missing[:0] = sorted(outgrown.difference(self._missing))
        self._num_paused = max(self._num_paused - 1, 0)
        self._missing.remove(key)
        self._missing.append(key)
        return None

    @torch.inference_mode()
    def capture_next(self) -> None:
        key = self._missing[-1]
        try:
            graph = StepGraph(key, self._limits, self._buffers, self._ops, self._compute)
        except Exception as error:
            self._num_paused = NUM_PAUSED
            self._on_failure()
            log.warning(
                "capturing a graph of %d tokens and %d adapters failed, the next %d steps without a"
                " graph run op by op: %s: %s",
                *(key.num_tokens, key.num_segments, NUM_PAUSED, type(error).__name__, error),
            )
            return
        self._graphs[self._missing.pop()] = graph

    def _key(self, inputs: BatchInputs[Array], shape: StepShape) -> GraphKey | None:
        """Returns the key of the smallest graph that serves the step, or None if the step is larger
        than every graph."""
        limits, num_sequences = self._limits, len(inputs.context_lens)
        num_tokens, num_segments = len(inputs.positions), len(inputs.segment_slot)
        if num_segments and shape.max_rank > self._largest_rank:
            return None
        if shape.max_query == 1 and len(inputs.last_tokens) == num_tokens:
            if num_tokens > limits.num_sequences:
                return None
            keys = generating_keys(NUM_TOKENS[bisect_left(NUM_TOKENS, num_tokens)], limits)
        else:
            # Padding tokens form one more sequence.
            num_sequences += 1
            keys = _prompt_keys(limits)
        least = num_tokens, num_sequences, num_segments
        for key in keys:
            sizes = key.num_tokens, key.num_sequences, key.num_segments
            if all(size >= wanted for size, wanted in zip(sizes, least, strict=True)):
                return key
        return None


def _keys(limits: Limits) -> Iterator[GraphKey]:
    for size in NUM_TOKENS[: NUM_TOKENS.index(limits.num_sequences) + 1]:
        yield from generating_keys(size, limits)
    yield from _prompt_keys(limits)


def generating_keys(num_tokens: int, limits: Limits) -> Iterator[GraphKey]:
    """Yields keys of graphs for `num_tokens` tokens without prompts, the smallest first: without
    adapters, with the largest number with which LoRA kernels work adapter by adapter, and with the
    largest number.

    With at least half as many adapters as tokens, the kernels work token by token
    (`ops.triton_table.reads_by_row`). Padding must not make a step of few adapters do so.
    """
    most = min(num_tokens, limits.num_slots)
    for num_segments in sorted({0, min((num_tokens - 1) // 2, most), most}):
        yield GraphKey(num_tokens, False, num_tokens, num_segments)


def _prompt_keys(limits: Limits) -> Iterator[GraphKey]:
    """Yields keys of graphs for steps with prompts, the smallest first."""
    last = NUM_TOKENS_WITH_PROMPTS.index(limits.num_tokens)
    few = min(FEW_SEQUENCES, limits.num_sequences) + 1
    for num_tokens in NUM_TOKENS_WITH_PROMPTS[: last + 1]:
        for most in sorted({few, limits.num_rows}):
            num_sequences = min(most, num_tokens)
            yield GraphKey(num_tokens, True, num_sequences, 0)
            # With more adapters, LoRA kernels would work token by token (see `generating_keys`).
            num_segments = min(num_sequences, limits.num_slots, (num_tokens - 1) // 2)
            yield GraphKey(num_tokens, True, num_sequences, num_segments)


def _least(sizes: tuple[int, ...], number: int) -> int:
    """Returns the smallest size that is at least `number`, or the largest size."""
    return sizes[min(bisect_left(sizes, number), len(sizes) - 1)]


def _inputs(num_tokens: int, num_sequences: int, num_segments: int) -> BatchInputs[Array]:
    """Returns inputs, all zeros, of a step of these sizes, without block tables."""
    many, few = np.zeros(num_tokens, np.int64), np.zeros(num_tokens, np.int32)
    return BatchInputs[Array](
        buffer_slots=many,
        buffer_positions=many,
        query_start=np.zeros(num_sequences + 1, np.int32),
        token_seq=few,
        positions=few,
        context_lens=np.zeros(num_sequences, np.int32),
        block_tables=np.zeros((num_sequences, 0), np.int64),
        last_tokens=np.zeros(num_sequences, np.int64),
        segment_start=np.zeros(num_segments + 1, np.int32),
        segment_slot=np.zeros(num_segments, np.int32),
        sampled_start=np.zeros(num_segments + 1, np.int32),
    )


def _pad(to: Array, values: Array, value: int) -> None:
    to[: len(values)] = values
    to[len(values) :] = value


def compute_logits(
    model: LoadedModel,
    buffers: ModelBuffers,
    inputs: BatchInputs[Tensor],
    shape: StepShape,
    out: Tensor,
) -> Tensor:
    """Computes the logits of the last tokens of a step into `out`."""
    batch = buffers.forward_batch(inputs, shape, model.plan.kv_layout)
    hidden = model.forward(batch)
    is_decode = shape.max_query == 1
    return model.logits(hidden if is_decode else hidden[inputs.last_tokens], out, batch.sample_lora)
