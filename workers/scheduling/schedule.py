"""Decisions of the scheduler for a step, and for one waiting sequence."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import Enum

from workers.scheduling.sequence import Sequence
from workers.wire.protocol import ErrorCode, OutputKind

Failure = tuple[ErrorCode, str]


class BlockReason(Enum):
    """Reason why a sequence cannot start or continue in this step."""

    BUDGET = "budget"
    """No tokens or no time are left in the step."""
    SLOT = "slot"
    ADAPTER = "adapter"
    PREFIX = "prefix"
    """A page of the sequence's prompt is being computed for another sequence."""
    PAGES = "pages"
    CONSTRAINT = "constraint"
    """The sequence's constraint is not ready, or allows no token."""
    MODEL = "model"
    """No sequence of the base model may start in this step."""


@dataclass(frozen=True, slots=True)
class Blocked:
    """Reason why a sequence cannot start. failure: error to end the sequence with, or None if it
    waits. lacks_memory: whether the failure applies only if no memory can be freed."""

    reason: BlockReason
    failure: Failure | None = None
    lacks_memory: bool = False


class ScheduledSequence:
    """Next `num_tokens` tokens of a sequence, all with its adapter or all without it. The object
    does not change during the step, even if the sequence ends.

    start: position of the first token. end: position after the last token. is_sampled: whether the
    step draws the token at `end`. adapter_slot: slot of the adapter, or -1 if the tokens use none.
    max_rank: largest rank of the adapter's projections, or 0 without an adapter.
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
    """Work of a step. items: scheduled tokens, sorted by adapter slot, items without an adapter
    last. failed: sequences that were removed, with error code and message."""

    items: list[ScheduledSequence] = field(default_factory=list)
    failed: list[tuple[Sequence, ErrorCode, str]] = field(default_factory=list)
    num_preempted: int = 0
    now: float = 0.0
    """Time when the step is scheduled."""
    begin_s: float = 0.0
    """Predicted time when the device can begin the step. Set by the policy."""
    in_flight: Iterable[Schedule] = ()
    """Schedules of the steps in flight, the oldest first."""
    num_free_slots: int = 0
    """Number of free slots before the step's prompts are scheduled."""
    is_held: bool = False
    """Whether no waiting sequence may start, because the base model is unavailable."""
    lacks_pages: bool = False
    """Whether a running sequence lacked pages, so that no waiting sequence may start."""
    needs_drain: bool = False
    """Whether the next step can be scheduled only after all steps in flight have ended."""
    computing: dict[bytes | None, Sequence] = field(default_factory=dict[bytes | None, Sequence])
    """Started prompts by the key of the page that they compute next."""
    lists_all: bool = False
    """Whether a running sequence lists the vocabulary (see `SamplingParams.lists_vocabulary`)."""

    @property
    def num_tokens(self) -> int:
        return sum([item.num_tokens for item in self.items])

    @property
    def num_prefill_tokens(self) -> int:
        return sum([item.num_tokens for item in self.items if item.is_prefill])

    @property
    def num_attended(self) -> int:
        """Number of positions before the step that a token attends to, summed over all tokens."""
        return sum([item.num_tokens * item.start for item in self.items])
