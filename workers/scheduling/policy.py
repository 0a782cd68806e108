"""Interface of the policy by which a scheduler orders sequences, limits their tokens in a step, and
refuses those for which the queue is too long."""

from __future__ import annotations

import math
from bisect import insort
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from adapters.pool.source import Account, Charge
from workers.scheduling.schedule import BlockReason, Schedule
from workers.scheduling.sequence import Sequence


@dataclass(frozen=True, slots=True)
class Refusal:
    """Refusal of a sequence. retry_after_s: seconds until the queue may have room for the sequence.
    pace_s: seconds until the tenant's next place in the queue becomes free, or 0 if the queue has
    room for other requests of the tenant."""

    sequence: Sequence
    message: str
    retry_after_s: float
    pace_s: float = 0.0


class QueueStatus(NamedTuple):
    """State of a policy's queue.

    - num_tokens: number of tokens of waiting sequences, without tokens that are known to be cached.
    - prompt_tokens_per_s: number of prompt tokens that are computed per second; 0 if unknown.
    - weight: sum of the weights of all tenants with work.
    - answer_tokens: mean number of tokens of recent answers; 0 if unknown.
    """

    num_tokens: int
    prompt_tokens_per_s: float
    weight: int
    answer_tokens: float = 0.0


class SchedulingPolicy(Protocol):
    """Queue of pending sequences (whose prompt is not fully computed), and the budget of a step.

    The scheduler calls `add` for a sequence that waits, `start` when the sequence runs, and
    `remove` when it ends, in any state. A preempted sequence is added again. In each step the
    scheduler calls `in_turn`. While it iterates, it calls `block` for each sequence that lacks a
    resource, and `charge` for each sequence that gets prompt tokens. It also calls `charge` for
    each sequence of a finished step. The engine calls `refuse`.
    """

    @property
    def status(self) -> QueueStatus: ...

    def add(self, sequence: Sequence) -> None:
        """Queues a waiting sequence, which is new or was preempted."""
        ...

    def start(self, sequence: Sequence) -> None:
        """Records that the sequence runs. Charges the load of its adapter, and the tokens that were
        found in the prefix cache."""
        ...

    def remove(self, sequence: Sequence) -> None:
        """Removes a sequence that ends. Called before its status changes."""
        ...

    def refuse(self, newcomers: list[Sequence], now: float) -> list[Refusal]:
        """Returns refusals of newcomers, which are not queued yet, and of waiting sequences, so
        that the queue is not too long with the other newcomers. Without newcomers, returns refusals
        of waiting sequences whose first token is predicted to be late."""
        ...

    def in_turn(self, schedule: Schedule) -> Iterator[Sequence]:
        """Sets the step's prompt budget, and yields pending sequences in the order in which they
        get tokens. schedule: step with only its generating sequences."""
        ...

    def block(self, sequence: Sequence, reason: BlockReason) -> None:
        """Records which resource the sequence lacks. The policy may then keep later sequences from
        starting, so that they do not take the resource first."""
        ...

    def room(self, sequence: Sequence) -> int:
        """Returns the number of the sequence's prompt tokens that the step has room for."""
        ...

    def victim(self, sequence: Sequence, num_free_slots: int) -> Sequence | None:
        """Returns the running sequence that is preempted so that `sequence` gets its slot, None if
        `sequence` may have a free slot, or `sequence` itself if it must wait for a slot."""
        ...

    def account(self, sequence: Sequence) -> Account:
        """Returns the account that is charged for the sequence."""
        ...

    def charge(self, sequence: Sequence, end: int) -> None:
        """Charges the tokens before position `end` that were not charged before, and deducts those
        that the step computes from its budget."""
        ...

    def record_step(
        self, num_tokens: int, num_attended: int, seconds: float, wall_s: float
    ) -> None:
        """Records a finished step. num_attended: `Schedule.num_attended`. seconds: device time.
        wall_s: seconds from the end of the step before, without time in which no step was wanted,
        to the end of the step."""
        ...


class Uncharged:
    """Account of sequences that nobody is charged for, which therefore gives way first."""

    charge: Charge = (math.inf, math.inf)


UNCHARGED = Uncharged()


class FifoPolicy:
    """Implementation of `SchedulingPolicy` that serves sequences in the order of arrival, up to a
    maximum number of tokens in a step. All tenants are treated alike. It refuses no sequence."""

    def __init__(self, max_batched_tokens: int) -> None:
        self.max_batched_tokens = max_batched_tokens
        self._room = 0
        self._pending: list[Sequence] = []
        self._is_closed = False
        """Whether no more sequences may start in this step."""

    @property
    def status(self) -> QueueStatus:
        return QueueStatus(sum(s.num_uncomputed for s in self._pending if s.is_waiting), 0.0, 1)

    def add(self, sequence: Sequence) -> None:
        if sequence not in self._pending:
            insort(self._pending, sequence, key=_arrival)

    def start(self, sequence: Sequence) -> None:
        pass

    def remove(self, sequence: Sequence) -> None:
        if sequence in self._pending:
            self._pending.remove(sequence)

    def refuse(self, newcomers: list[Sequence], now: float) -> list[Refusal]:
        return []

    def in_turn(self, schedule: Schedule) -> Iterator[Sequence]:
        self._is_closed = schedule.is_held or schedule.lacks_pages
        self._room = self.max_batched_tokens - schedule.num_tokens
        for sequence in self._pending.copy():
            if not (sequence.is_waiting and self._is_closed):
                yield sequence

    def block(self, sequence: Sequence, reason: BlockReason) -> None:
        if reason not in (BlockReason.ADAPTER, BlockReason.PREFIX, BlockReason.CONSTRAINT):
            self._is_closed = True

    def room(self, sequence: Sequence) -> int:
        return self._room

    def victim(self, sequence: Sequence, num_free_slots: int) -> Sequence | None:
        return None if num_free_slots else sequence

    def account(self, sequence: Sequence) -> Account:
        return UNCHARGED

    def charge(self, sequence: Sequence, end: int) -> None:
        self._room -= max(end - sequence.num_computed, 0)
        if not sequence.is_pending:
            self.remove(sequence)

    def record_step(
        self, num_tokens: int, num_attended: int, seconds: float, wall_s: float
    ) -> None:
        pass


def _arrival(sequence: Sequence) -> float:
    return sequence.times.arrival_s
