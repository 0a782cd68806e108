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
    """Tokens or time left in the step."""
    SLOT = "slot"
    ADAPTER = "adapter"
    PREFIX = "prefix"
    """Page of its prompt that another sequence is computing."""
    PAGES = "pages"
    CONSTRAINT = "constraint"
    """Constraint that is ready and allows a token."""
    MODEL = "model"
    """Base model, which admits no sequence in this step."""


@dataclass(frozen=True, slots=True)
class Admitted:
    """Decision that the sequence runs. num_tokens: number of its prompt tokens in this step."""

    num_tokens: int


@dataclass(frozen=True, slots=True)
class Blocked:
    """Decision that the sequence waits and holds no resources. failure: why it can never run."""

    reason: BlockReason
    failure: Failure | None = None


@dataclass(slots=True)
class ScheduledSequence:
    """Next `num_tokens` tokens of a sequence. Either all of them use the adapter or none does. Does
    not change during the step, even if the sequence ends."""

    sequence: Sequence
    num_tokens: int
    start: int = field(init=False)
    end: int = field(init=False)
    """Position after the last token; `start` is the position of the first."""
    is_sampled: bool = field(init=False)
    """Whether the step computes the sequence's last token, so that the next one is drawn."""
    is_prefill: bool = field(init=False)
    adapter_slot: int = field(init=False, default=-1)
    """Slot of the adapter in its table, or -1 if the tokens use no adapter."""
    max_rank: int = field(init=False, default=0)
    """Largest rank of the adapter's projections, or 0 if the tokens use no adapter."""

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
    """Work of a step. items: sorted by adapter slot, with items that use no adapter last. failed:
    sequences that were removed, with error code and message."""

    items: list[ScheduledSequence] = field(default_factory=list)
    failed: list[tuple[Sequence, ErrorCode, str]] = field(default_factory=list)
    num_preempted: int = 0
    begin_s: float = 0.0
    """Predicted time when the device can begin the step."""
    needs_drain: bool = False
    """Whether the next step can be scheduled only after all steps in flight have ended."""
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
    """Work of a model's engine, from which the models to load are chosen. num_extents: KV extents
    that its first waiting sequence needs. is_short: `is_short` of the last `Schedule`."""

    num_running: int = 0
    num_waiting: int = 0
    num_extents: int = 0
    is_short: bool = False
