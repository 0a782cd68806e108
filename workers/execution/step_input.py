"""Input and output of one step on the device.

Both contain only plain data, without references to objects of the engine, so that another process,
a recording or a simulator can replace the engine or the device.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

from numpy.typing import NDArray

from ops.commands import Command
from workers.wire.protocol import ErrorCode, SamplingParams, TokenLogprobs

Array = NDArray[Any]


class SampleInput(NamedTuple):
    """Parameters for drawing a sequence's next token, in a step that computes the sequence's last
    token.

    sequence: index of the sequence in the step.
    position: position of the token to draw. All tokens before it are in the token buffer.
    num_prompt: number of prompt tokens. Penalties treat them differently from generated tokens.
    banned: tokens that must not be drawn.
    mask: int32 [ceil(V / 32)] from the sequence's constraint. Token t is allowed if bit t % 32 of
    word t // 32 is set. None allows all tokens.
    """

    sequence: int
    position: int
    num_prompt: int
    params: SamplingParams
    banned: frozenset[int]
    mask: Array | None = None


class ScoreInput(NamedTuple):
    """Request for log-probabilities of prompt tokens.

    sequence: index of the sequence in the step.
    targets: prompt tokens to score. targets[i] follows token i of the sequence in this step.
    num_top: number of likeliest tokens to return with each target.
    """

    sequence: int
    targets: list[int]
    num_top: int


class PoolInput(NamedTuple):
    """Request for the sum of hidden states (after the final norm) of some tokens of a sequence.

    sequence: index of the sequence in the step.
    first, end: range of tokens, end excluded, counted from the sequence's first token in the step.
    labels: token ids. If there are any, their logits after token `first` are requested instead.
    """

    sequence: int
    first: int
    end: int
    labels: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class StepInput:
    """Work of one step.

    The S sequences are grouped by adapter slot, with slot -1 last. Sequence s computes tokens
    at positions starts[s]..starts[s] + counts[s] - 1, which are in its slot of the token buffer.

    sequence_slots int64 [S]      slot of each sequence in the token buffer
    adapter_slots  int32 [S]      slot of the adapter used for the tokens, -1 without an adapter
    starts, counts int32 [S]
    block_tables   int64 [S, P]   byte offset in the arena of each page; entries past a sequence's
                                  last page are undefined
    max_rank       int            largest rank of the adapters, 0 without adapters

    A sequence has an entry in `samples` if the step draws its next token, an entry in `scores` if
    its prompt tokens are scored in this step, and an entry in `pools` if its vector (kind *embed*)
    needs tokens of this step. A sequence may have no entry. The commands are applied first.
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
    commands: Sequence[Command] = ()


@dataclass(slots=True)
class SequenceResult:
    """Results of a step for one sequence.

    tokens: zero or more new tokens. A sequence that is already in a later step gets exactly one,
    because that step reads the token on the device.
    logprobs: one entry per token, if requested.
    prompt_logprobs: one entry per target of its `ScoreInput`.
    vector: result of its `PoolInput`, float32 [hidden size], or one entry per label.
    error: reason why no token was drawn or no vector was computed, or None.
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
    """Raised if waiting for the device fails, for example after an illegal access on a GPU. The
    device may then still read or write the memory of any step in flight."""


class PendingStep(Protocol):
    """Step that was launched on the device."""

    def result(self) -> StepOutput:
        """Waits for the step. Raises DeviceFailed, or another error if only this step failed."""
        ...


class Runner(Protocol):
    """Runner of steps, implemented by `ModelRunner` and by a simulator."""

    def launch(self, step: StepInput) -> PendingStep:
        """Submits a step. Steps are computed in the order of their launch. The pages, sequence
        slots and adapter slots of a step must not change until `result` returns. If `launch` raises
        an error other than DeviceFailed, the device no longer uses the memory of the step."""
        ...
