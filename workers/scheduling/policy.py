"""Interface of the policy by which a scheduler orders sequences and limits their tokens in a
step."""

from __future__ import annotations

from bisect import insort
from collections.abc import Iterable, Iterator
from typing import Protocol

from adapters.pool.source import Account, Charge
from workers.scheduling.schedule import BlockReason, Schedule
from workers.scheduling.sequence import Sequence


class SchedulingPolicy(Protocol):
    """Queue of pending sequences (whose prompt is not fully computed), and the budget of a step.

    The scheduler calls `add` for a new sequence, `start` when the sequence runs, `put_back` when it
    is preempted, `leave` once its prompt is computed, and `remove` when it ends, in any state. In
    each step the scheduler calls `begin_step`, `begin_prompts` and `in_turn`. While it iterates
    over `in_turn`, it calls `block` for each sequence that lacks a resource, and `charge_prefill`
    for each sequence that gets tokens. It changes a sequence's status before it calls a method.
    """

    @property
    def max_batched_tokens(self) -> int:
        """Maximum number of tokens in a step."""
        ...

    @property
    def num_waiting(self) -> int: ...

    @property
    def num_waiting_tokens(self) -> int:
        """Number of tokens of waiting sequences, without tokens that are known to be cached."""
        ...

    @property
    def has_pending(self) -> bool: ...

    @property
    def weight(self) -> int:
        """Sum of the weights of all tenants with work."""
        ...

    @property
    def first_waiting(self) -> Sequence | None:
        """Waiting sequence whose turn is next, or None if no sequence waits."""
        ...

    @property
    def is_closed(self) -> bool:
        """Whether no waiting sequence may start in this step."""
        ...

    @property
    def is_backlogged(self) -> bool:
        """Whether sequences wait because the worker's slots, pages or step time are used up, and
        not because their adapter or model is not loaded."""
        ...

    def add(self, sequence: Sequence, num_live: int) -> None:
        """Queues a waiting sequence. num_live: maximum of other live sequences."""
        ...

    def start(self, sequence: Sequence) -> None:
        """Records that the sequence runs."""
        ...

    def put_back(self, sequence: Sequence) -> None:
        """Records that a running sequence waits again."""
        ...

    def leave(self, sequence: Sequence) -> None:
        """Removes a sequence whose prompt is computed, because it needs no more turns."""
        ...

    def remove(self, sequence: Sequence, *, is_waiting: bool) -> None:
        """Removes a sequence that has ended."""
        ...

    def pop_expired(self, now: float) -> list[Sequence]:
        """Returns waiting sequences whose deadline for the first token has passed."""
        ...

    def begin_step(self) -> None: ...

    def begin_prompts(
        self, schedule: Schedule, running: Iterable[Sequence], num_free_slots: int
    ) -> None:
        """Sets the step's prompt budget. schedule: step with only its generating sequences."""
        ...

    def in_turn(self) -> Iterator[Sequence]:
        """Yields pending sequences in the order in which they get tokens."""
        ...

    def block(self, sequence: Sequence | None, reason: BlockReason) -> None:
        """Records which resource the sequence lacks. The policy may then keep later sequences from
        starting, so that they do not take the resource first. If the sequence is None, no sequence
        may start in this step."""
        ...

    def room(self, sequence: Sequence) -> int:
        """Returns the number of the sequence's prompt tokens that the step has room for."""
        ...

    def may_have_slot(
        self, sequence: Sequence, running: Iterable[Sequence], num_free: int
    ) -> bool: ...

    def victim(self, sequence: Sequence, running: Iterable[Sequence]) -> Sequence | None:
        """Returns the running sequence that is preempted so that `sequence` gets its slot, or None
        if no sequence may be preempted for `sequence`."""
        ...

    def last_in_turn(self, sequences: Iterable[Sequence]) -> Sequence:
        """Returns which of the sequences is preempted when memory is short."""
        ...

    def account(self, sequence: Sequence) -> Account:
        """Returns the account that is charged for the sequence."""
        ...

    def charge_prefill(self, sequence: Sequence, num_tokens: int) -> None:
        """Deducts the sequence's next prompt tokens from the budget, and charges the tokens that
        were not charged before."""
        ...

    def charge_cached(self, sequence: Sequence) -> None:
        """Charges the sequence's prompt tokens that were found in the prefix cache."""
        ...

    def charge_generated(self, sequence: Sequence, num_known: int) -> None:
        """Charges the generated tokens that are among the sequence's first `num_known` tokens and
        have not been charged yet."""
        ...

    def charge_load(self, sequence: Sequence, num_tokens: float) -> None:
        """Charges the load of the sequence's adapter. num_tokens: number of prompt tokens that
        could be computed in the time of the load."""
        ...

    def predict_s(self, schedule: Schedule) -> float:
        """Returns the predicted duration of the step in seconds; 0 if unknown."""
        ...

    def record_step(self, num_tokens: int, num_attended: int, seconds: float) -> None:
        """Records the device time of a step. num_attended: `Schedule.num_attended`."""
        ...

    def forget_speed(self) -> None:
        """Forgets the recorded times of steps."""
        ...


class Uncharged:
    """Account of all sequences of a policy that charges nothing."""

    charge: Charge = (0.0, 0.0)


UNCHARGED = Uncharged()


class FifoPolicy:
    """Implementation of `SchedulingPolicy` that serves sequences in the order of arrival, up to a
    maximum number of tokens in a step. All tenants are treated alike."""

    weight = 1

    def __init__(self, max_batched_tokens: int) -> None:
        self.max_batched_tokens = max_batched_tokens
        self._room = 0
        self._pending: list[Sequence] = []
        self._closed_by: BlockReason | None = None

    @property
    def num_waiting(self) -> int:
        return sum(sequence.is_waiting for sequence in self._pending)

    @property
    def num_waiting_tokens(self) -> int:
        return sum(s.num_uncomputed for s in self._pending if s.is_waiting)

    @property
    def has_pending(self) -> bool:
        return bool(self._pending)

    @property
    def first_waiting(self) -> Sequence | None:
        return next((sequence for sequence in self._pending if sequence.is_waiting), None)

    @property
    def is_closed(self) -> bool:
        return self._closed_by is not None

    @property
    def is_backlogged(self) -> bool:
        return self.num_waiting > 0 and self._closed_by not in (None, BlockReason.MODEL)

    def add(self, sequence: Sequence, num_live: int) -> None:
        insort(self._pending, sequence, key=_arrival)
        sequence.place.is_pending = True

    def start(self, sequence: Sequence) -> None:
        pass

    def put_back(self, sequence: Sequence) -> None:
        if not sequence.place.is_pending:
            self.add(sequence, 0)

    def leave(self, sequence: Sequence) -> None:
        self._pending.remove(sequence)
        sequence.place.is_pending = False

    def remove(self, sequence: Sequence, *, is_waiting: bool) -> None:
        if sequence.place.is_pending:
            self.leave(sequence)

    def pop_expired(self, now: float) -> list[Sequence]:
        return [
            sequence
            for sequence in self._pending
            if sequence.is_waiting and not sequence.num_generated and sequence.expires_s <= now
        ]

    def begin_step(self) -> None:
        self._closed_by = None

    def begin_prompts(
        self, schedule: Schedule, running: Iterable[Sequence], num_free_slots: int
    ) -> None:
        self._room = self.max_batched_tokens - schedule.num_tokens

    def in_turn(self) -> Iterator[Sequence]:
        for sequence in self._pending.copy():
            if not (sequence.is_waiting and self.is_closed):
                yield sequence

    def block(self, sequence: Sequence | None, reason: BlockReason) -> None:
        if reason not in (BlockReason.ADAPTER, BlockReason.PREFIX, BlockReason.CONSTRAINT):
            self._closed_by = reason

    def room(self, sequence: Sequence) -> int:
        return self._room

    def may_have_slot(self, sequence: Sequence, running: Iterable[Sequence], num_free: int) -> bool:
        return num_free > 0

    def victim(self, sequence: Sequence, running: Iterable[Sequence]) -> Sequence | None:
        return None

    def last_in_turn(self, sequences: Iterable[Sequence]) -> Sequence:
        return max(sequences, key=_arrival)

    def account(self, sequence: Sequence) -> Account:
        return UNCHARGED

    def charge_prefill(self, sequence: Sequence, num_tokens: int) -> None:
        self._room -= num_tokens

    def charge_cached(self, sequence: Sequence) -> None:
        pass

    def charge_generated(self, sequence: Sequence, num_known: int) -> None:
        pass

    def charge_load(self, sequence: Sequence, num_tokens: float) -> None:
        pass

    def predict_s(self, schedule: Schedule) -> float:
        return 0.0

    def record_step(self, num_tokens: int, num_attended: int, seconds: float) -> None:
        pass

    def forget_speed(self) -> None:
        pass


def _arrival(sequence: Sequence) -> float:
    return sequence.times.arrival_s
