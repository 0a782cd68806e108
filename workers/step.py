"""A step as data: what the scheduler decided, and what came of it."""

from __future__ import annotations

from dataclasses import dataclass, field

from workers.protocol import ErrorCode, TokenLogprobs
from workers.sequence import Sequence


@dataclass(slots=True)
class ScheduledSequence:
    """`num_tokens` rows of a sequence, from its `num_computed` on; all base only or all adapted."""

    sequence: Sequence
    num_tokens: int
    slot: int = field(init=False, default=-1)
    """Adapter slot, -1 for base only."""
    max_rank: int = field(init=False, default=0)
    """Of the adapter, over its projections; 0 for base only."""

    def __post_init__(self) -> None:
        lease = self.sequence.lease
        if lease is not None and self.sequence.is_activated:
            self.slot, self.max_rank = lease.slot, lease.max_rank

    @property
    def is_sampled(self) -> bool:
        """The rows reach the sequence's last token, so the next one is drawn."""
        sequence = self.sequence
        reaches_end = sequence.num_computed + self.num_tokens == len(sequence.tokens)
        return reaches_end and sequence.params.max_tokens > 0


@dataclass(slots=True)
class Schedule:
    """items: neighbours share an adapter slot; base-only sequences last. failed: dropped, with the
    reason."""

    items: list[ScheduledSequence] = field(default_factory=list)
    failed: list[tuple[Sequence, ErrorCode, str]] = field(default_factory=list)
    num_preempted: int = 0

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
        return sum(item.num_tokens * item.sequence.num_computed for item in self.items)


@dataclass(slots=True)
class StepResult:
    """tokens[i] is the token drawn for `schedule.sampled[i]`, logprobs[i] its log-probability if
    asked for."""

    tokens: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs | None] = field(default_factory=list)
    prompt_logprobs: dict[tuple[int, int], list[TokenLogprobs]] = field(default_factory=dict)
    """By sequence key: of the prompt tokens whose predecessors were computed in this step."""
    build_us: int = 0
    forward_us: int = 0
    sample_us: int = 0
