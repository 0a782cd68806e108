"""Data of one step: what the device computes and what it returns.

Both are numbers, arrays and frozen records, without references to objects of the engine, so that
another process, a recording or a simulator can replace either side.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from memory.page_key import PAGE_TOKENS
from workers.execution.block_tables import BlockTables
from workers.scheduling.constraint import effective_bans
from workers.scheduling.schedule import Schedule, ScheduledSequence
from workers.wire.protocol import ErrorCode, OutputKind, Pooling, SamplingParams, TokenLogprobs

Array = NDArray[Any]


class SampleInput(NamedTuple):
    """Parameters for drawing the next token of a sequence whose last token is computed in this
    step.

    sequence: its index in the step.
    position: of the token to draw. All tokens before it are in the token buffer.
    num_prompt: how many of those belong to the prompt; penalties treat them differently.
    banned: tokens that must not be drawn.
    mask: int32 [ceil(V / 32)], by the sequence's constraint: token t is allowed if bit t % 32 of
    word t // 32 is set. None allows all.
    """

    sequence: int
    position: int
    num_prompt: int
    params: SamplingParams
    banned: frozenset[int]
    mask: Array | None = None


class ScoreInput(NamedTuple):
    """Request for log-probabilities of prompt tokens.

    sequence: its index in the step.
    targets: the prompt tokens that follow the first `len(targets)` tokens computed in this step.
    num_top: number of alternatives returned with each.
    """

    sequence: int
    targets: list[int]
    num_top: int


class PoolInput(NamedTuple):
    """Request for the sum of the hidden states of some tokens of a sequence, after the final norm.

    sequence: its index in the step.
    first, end: range of the tokens computed in this step, counted from its first; end is exclusive.
    labels: unless empty, requests the logits of these tokens after the token at `first` instead.
    """

    sequence: int
    first: int
    end: int
    labels: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class StepInput:
    """Work of one step.

    S sequences, those of one adapter side by side, base-only ones last. Each computes the tokens at
    positions starts[s]..starts[s] + counts[s] - 1, which are in its slot of the token buffer.

    sequence_slots int64 [S]      slot of each sequence in the token buffer
    adapter_slots  int32 [S]      adapter that acts on the tokens, -1 for the base model alone
    starts, counts int32 [S]
    block_tables   int64 [S, P]   byte offset in the arena of each page; entries past a sequence's
                                  last page are undefined
    max_rank       int            largest rank of the adapters, 0 without any

    A sequence's results are requested by the lists with its index: `samples` (kind *generate*, its
    last token is computed), `scores` (its prompt's log-probabilities), `pools` (kind *embed*, some
    of the tokens of its vector), or none.
    """

    sequence_slots: Array
    adapter_slots: Array
    starts: Array
    counts: Array
    block_tables: Array
    max_rank: int
    samples: list[SampleInput]
    scores: list[ScoreInput]
    pools: list[PoolInput] = field(default_factory=list[PoolInput])


@dataclass(slots=True)
class SequenceResult:
    """Results of a step for one sequence.

    tokens: zero or more new ones. Exactly one for a sequence that is already in a later step,
    because that step reads it on the device.
    logprobs: one entry per token, if requested.
    prompt_logprobs: one entry per target of its `ScoreInput`.
    vector: float32, the result of its `PoolInput`: hidden size, or one entry per label.
    error: why no token could be drawn, or no vector computed.
    """

    tokens: list[int] = field(default_factory=list[int])
    logprobs: list[TokenLogprobs] | None = None
    prompt_logprobs: list[TokenLogprobs] | None = None
    vector: Array | None = None
    error: ErrorCode | None = None


@dataclass(slots=True)
class StepOutput:
    """Results of the sequences in the order of the `StepInput`; times in microseconds."""

    sequences: list[SequenceResult]
    build_us: int = 0
    forward_us: int = 0
    sample_us: int = 0


class DeviceFailed(Exception):
    """Raised when waiting for the device fails, as after an illegal access on a GPU. The memory
    that the device still reads and writes is unknown then."""


class PendingStep(Protocol):
    """Step that was launched."""

    def result(self) -> StepOutput:
        """Waits for the step. Raises DeviceFailed, or another error after the step ended."""
        ...


class Runner(Protocol):
    """Protocol for computing steps, implemented by `ModelRunner` and by a simulator."""

    def launch(self, step: StepInput) -> PendingStep:
        """Submits a step. Steps are computed in the order of their launch. The pages, sequence
        slots and adapter slots of a step must not change until its result is taken. If this raises
        another error than DeviceFailed, the device has ended the work submitted for the step."""
        ...


def build_step_input(schedule: Schedule, tables: BlockTables) -> StepInput:
    """Converts the scheduled sequences to plain data, in schedule order."""
    items = schedule.items
    num_sequences = len(items)
    sequences = [item.sequence for item in items]
    counts = np.fromiter((item.num_tokens for item in items), np.int32, num_sequences)
    starts = np.fromiter((item.start for item in items), np.int32, num_sequences)
    num_pages = -(-(starts + counts) // PAGE_TOKENS)
    slots = np.fromiter((s.slot for s in sequences), np.int64, num_sequences)
    lists = [sequence.block_table.pages for sequence in sequences]
    return StepInput(
        sequence_slots=slots,
        adapter_slots=np.fromiter((item.adapter_slot for item in items), np.int32, num_sequences),
        starts=starts,
        counts=counts,
        block_tables=tables.rows(slots, lists, int(num_pages.max())),
        max_rank=max(item.max_rank for item in items),
        samples=[_sample(i, item) for i, item in enumerate(items) if item.is_sampled],
        scores=[score for i, item in enumerate(items) if (score := _score(i, item)) is not None],
        pools=[pool for i, item in enumerate(items) if (pool := _pool(i, item)) is not None],
    )


def _sample(index: int, item: ScheduledSequence) -> SampleInput:
    """Returns how to draw the sequence's next token. Until `min_tokens` are generated, the tokens
    that end the sequence are banned. Bans are dropped if they would leave no token."""
    sequence, params = item.sequence, item.sequence.params
    banned, mask = sequence.constraint.banned, sequence.constraint.mask
    if item.end - sequence.num_prompt < params.min_tokens:
        banned |= sequence.end_tokens
    if banned:
        banned = effective_bans(banned, mask)
    return SampleInput(index, item.end, sequence.num_prompt, params, banned, mask)


def _score(index: int, item: ScheduledSequence) -> ScoreInput | None:
    """Returns the prompt tokens to score, which follow those of this step, or None."""
    num_top = item.sequence.params.prompt_logprobs
    if num_top is None:
        return None
    first = item.start + 1
    last = min(first + item.num_tokens, item.sequence.num_prompt)
    targets = item.sequence.tokens[first:last]
    return ScoreInput(index, targets, num_top) if targets else None


def _pool(index: int, item: ScheduledSequence) -> PoolInput | None:
    """Returns this step's tokens that the sequence's vector needs, or None if none."""
    request, num_tokens = item.sequence.request, item.num_tokens
    if request.kind is not OutputKind.EMBED:
        return None
    match request.pooling:
        case Pooling.MEAN:
            return PoolInput(index, 0, num_tokens)
        case Pooling.CLS:
            return PoolInput(index, 0, 1) if item.start == 0 else None
        case Pooling.LAST:
            is_last = item.end == len(item.sequence.tokens)
            return PoolInput(index, num_tokens - 1, num_tokens, request.labels) if is_last else None
