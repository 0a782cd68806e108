"""Decisions of the scheduler for a step, and for one waiting sequence."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum

from workers.scheduling.sequence import Sequence
from workers.wire.protocol import ErrorCode, OutputKind

Failure = tuple[ErrorCode, str]


class BlockReason(Enum):
    """Resource that a sequence lacks in this step."""

    BUDGET = "budget"
    """Tokens or time: the step is full."""
    SLOT = "slot"
    ADAPTER = "adapter"
    PREFIX = "prefix"
    """Page that another sequence is computing now."""
    PAGES = "pages"
    CONSTRAINT = "constraint"
    """Readiness of its constraint."""
    MODEL = "model"
    """Base model, which admits no sequence in this step."""


@dataclass(frozen=True, slots=True)
class Admitted:
    """Decision that the sequence runs. num_tokens: of its prompt, in this step."""

    num_tokens: int


@dataclass(frozen=True, slots=True)
class Blocked:
    """Decision that the sequence waits, holding nothing. failure: why it can never run."""

    reason: BlockReason
    failure: Failure | None = None


@dataclass(slots=True)
class ScheduledSequence:
    """Next `num_tokens` tokens of a sequence, all base only or all adapted. Does not change during
    the step, whatever happens to the sequence."""

    sequence: Sequence
    num_tokens: int
    start: int = field(init=False)
    end: int = field(init=False)
    """Positions of the first token, and of the token after the last."""
    is_sampled: bool = field(init=False)
    """Whether the step computes the sequence's last token, so that the next one is drawn."""
    is_prefill: bool = field(init=False)
    adapter_slot: int = field(init=False, default=-1)
    """-1 for base only."""
    max_rank: int = field(init=False, default=0)
    """Largest rank of the adapter's projections; 0 for base only."""

    def __post_init__(self) -> None:
        sequence = self.sequence
        self.start = sequence.num_computed
        self.end = self.start + self.num_tokens
        self.is_sampled = (
            self.end == sequence.length and sequence.request.kind is OutputKind.GENERATE
        )
        self.is_prefill = sequence.is_prefilling
        lease = sequence.lease
        if lease is not None and sequence.is_activated:
            self.adapter_slot, self.max_rank = lease.slot, lease.max_rank


@dataclass(slots=True, eq=False)
class Schedule:
    """Work of a step. items: neighbours share an adapter slot; base-only sequences last. failed:
    dropped sequences with the reason."""

    items: list[ScheduledSequence] = field(default_factory=list)
    failed: list[tuple[Sequence, ErrorCode, str]] = field(default_factory=list)
    num_preempted: int = 0
    begin_s: float = 0.0
    """Time at which its computation can begin."""
    needs_drain: bool = False
    """Whether the next step can be scheduled only after those in flight have ended."""
    is_short: bool = False
    """Whether the first waiting sequence lacks memory that other models hold."""

    @property
    def num_tokens(self) -> int:
        return sum(item.num_tokens for item in self.items)

    @property
    def num_prefill_tokens(self) -> int:
        return sum(item.num_tokens for item in self.items if item.is_prefill)

    @property
    def num_attended(self) -> int:
        """Earlier positions that the step's tokens read, summed over the tokens."""
        return sum(item.num_tokens * item.start for item in self.items)


@dataclass(frozen=True, slots=True)
class Demand:
    """Work of a model's engine, by which models are loaded. num_extents: of KV, for its first
    waiting sequence. is_short: whether the model is loaded but that sequence finds no room."""

    num_running: int = 0
    num_waiting: int = 0
    num_extents: int = 0
    is_short: bool = False
