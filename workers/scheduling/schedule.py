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
class Blocked:
    """Decision that a sequence waits and holds no resources. failure: why it can never run.
    lacks_memory: whether the failure applies only if no memory can be freed."""

    reason: BlockReason
    failure: Failure | None = None
    lacks_memory: bool = False


class ScheduledSequence:
    """Next `num_tokens` tokens of a sequence. Either all of them use the adapter or none does. Does
    not change during the step, even if the sequence ends.

    start, end: positions of the first token and after the last one. is_sampled: whether the step
    computes the sequence's last token, so that the next one is drawn. adapter_slot, max_rank: slot
    of the adapter and largest rank of its projections, or -1 and 0 if the tokens use no adapter.
    """

    def __init__(self, sequence: Sequence, num_tokens: int) -> None:
        self.sequence = sequence
        self.num_tokens = num_tokens
        self.start = sequence.num_computed
        self.end = self.start + num_tokens
        is_last = self.end == sequence.length
        self.is_sampled = is_last and sequence.request.kind is OutputKind.GENERATE
        self.is_prefill = sequence.is_prefilling
        self.adapter_slot, self.max_rank = -1, 0
        if sequence.lease is not None and sequence.is_activated:
            self.adapter_slot, self.max_rank = sequence.lease.slot, sequence.lease.max_rank


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
    computing: set[bytes | None] = field(default_factory=set[bytes | None])
    """Keys of the pages that running prompts compute next."""

    @property
    def num_tokens(self) -> int:
        return sum([item.num_tokens for item in self.items])

    @property
    def num_prefill_tokens(self) -> int:
        return sum([item.num_tokens for item in self.items if item.is_prefill])

    @property
    def num_attended(self) -> int:
        """Earlier positions that the step's tokens read, summed over the tokens."""
        return sum([item.num_tokens * item.start for item in self.items])
