"""A step as data: what the scheduler decided, and what came of it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

from workers.scheduling.sequence import Sequence
from workers.wire.protocol import ErrorCode, TokenLogprobs


@dataclass(slots=True)
class ScheduledSequence:
    """`num_tokens` rows of a sequence; all base only or all adapted. What it says holds for this
    step, whatever becomes of the sequence while it is computed."""

    sequence: Sequence
    num_tokens: int
    start: int = field(init=False)
    end: int = field(init=False)
    """Position of the first row, and the one after the last: of the token that is drawn, if one
    is."""
    is_sampled: bool = field(init=False)
    """The rows reach the sequence's last token, so the next one is drawn."""
    is_prefill: bool = field(init=False)
    slot: int = field(init=False, default=-1)
    """Adapter slot, -1 for base only."""
    max_rank: int = field(init=False, default=0)
    """Of the adapter, over its projections; 0 for base only."""

    def __post_init__(self) -> None:
        sequence = self.sequence
        self.start = sequence.num_computed
        self.end = self.start + self.num_tokens
        self.is_sampled = self.end == sequence.length and sequence.params.max_tokens > 0
        self.is_prefill = sequence.is_prefilling
        lease = sequence.lease
        if lease is not None and sequence.is_activated:
            self.slot, self.max_rank = lease.slot, lease.max_rank


@dataclass(slots=True, eq=False)
class Schedule:
    """items: neighbours share an adapter slot; base-only sequences last. failed: dropped, with the
    reason."""

    items: list[ScheduledSequence] = field(default_factory=list)
    failed: list[tuple[Sequence, ErrorCode, str]] = field(default_factory=list)
    num_preempted: int = 0
    begin_s: float = 0.0
    """When its computation can begin."""

    @property
    def sampled(self) -> list[ScheduledSequence]:
        return [item for item in self.items if item.is_sampled]

    @property
    def last_rows(self) -> list[int]:
        """The batch row of each sampled sequence's last token."""
        rows: list[int] = []
        end = 0
        for item in self.items:
            end += item.num_tokens
            if item.is_sampled:
                rows.append(end - 1)
        return rows

    @property
    def num_tokens(self) -> int:
        return sum(item.num_tokens for item in self.items)

    @property
    def num_attended(self) -> int:
        """Positions computed before, read by all rows together."""
        return sum(item.num_tokens * item.start for item in self.items)


@dataclass(slots=True)
class StepResult:
    """tokens[i] is the token drawn for `schedule.sampled[i]`, -1 if its logits are not numbers;
    logprobs[i] its log-probability if asked for."""

    tokens: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs | None] = field(default_factory=list)
    prompt_logprobs: dict[tuple[int, int], list[TokenLogprobs]] = field(default_factory=dict)
    """By sequence key: of the prompt tokens whose predecessors were computed in this step."""
    build_us: int = 0
    forward_us: int = 0
    sample_us: int = 0


class PendingStep(Protocol):
    """A step on its way."""

    def result(self) -> StepResult:
        """Waits for the step's end. Raises what the device or its kernels did."""
        ...
