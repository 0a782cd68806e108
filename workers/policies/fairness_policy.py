"""Decides in which order sequences get tokens in a step, and limits each tenant. The scheduler
decides which sequences have enough memory to run.

Three rules are applied:

- turns: the class and the tenant charged least are next (`FairQueue`);
- deadlines: the prompt tokens of a step are limited, so that generated tokens are not late and gaps
  between two tokens are not too long (`StepBudget`), and requests whose timeout passes before they
  start are dropped;
- shares: slots, room and time are kept for tenants within their share (`OverShare`).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from heapq import heapify, heappop, heappush

from adapters.pool.source import Account
from workers.policies.fair_queue import FairQueue, TenantQueue, last_in_turn
from workers.policies.over_share import OverShare
from workers.policies.step_budget import StepBudget
from workers.policies.step_cost import StepTime
from workers.scheduling.schedule import BlockReason, Schedule, ScheduledSequence
from workers.scheduling.sequence import Sequence

MAX_TOKEN_GAP_S = 0.25
PREFILL_COST = 1.0
"""Charge for a computed prompt token."""
DECODE_COST = 2.0
"""Charge for a generated token."""
LISTED_COST = 256.0
"""Additional charge for a generated token with the log-probabilities of the whole vocabulary.
Measured: 12 to 37 ms of the host for 131,072 tokens."""
CACHED_COST = 0.1
"""Charge for a prompt token that is found in the prefix cache."""
MIN_KEPT = 64
"""Number of entries that `Deadlines` may have, in addition to twice the number of unfinished
sequences, before it removes sequences that have ended."""


class FairnessPolicy:
    """Implementation of `SchedulingPolicy` with tenants, service classes and deadlines."""

    def __init__(
        self,
        *,
        max_num_seqs: int,
        max_batched_tokens: int,
        max_token_gap_s: float = MAX_TOKEN_GAP_S,
    ) -> None:
        """max_token_gap_s: maximum seconds of a step that has generating sequences. It is
        multiplied by the `gap_factor` of the class of each sequence."""
        self.queue = queue = FairQueue()
        self.over_share = OverShare(queue, max_num_seqs)
        self.max_batched_tokens = max_batched_tokens
        self._max_token_gap_s = max_token_gap_s
        self.step_time = StepTime()
        self.put_back, self.leave, self.remove = queue.put_back, queue.leave, queue.remove
        self.may_have_slot, self.victim = self.over_share.may_have_slot, self.over_share.victim
        self.record_step, self.forget_speed = self.step_time.record, self.step_time.forget
        self.last_in_turn = last_in_turn
        self._deadlines = Deadlines()
        self._budget = self._new_budget(Schedule(), frozenset())
        self._closed_by: BlockReason | None = None
        """Reason why no more sequences may start in this step; None if sequences may start."""
        self._is_spent = False
        """Whether the budget had no tokens for the sequence whose turn it was, so that no other
        sequence gets tokens in this step."""

    @property
    def num_waiting(self) -> int:
        return self.queue.num_waiting

    @property
    def num_waiting_tokens(self) -> int:
        return self.queue.num_waiting_tokens

    @property
    def has_pending(self) -> bool:
        return self.queue.has_pending

    @property
    def weight(self) -> int:
        return self.queue.weight

    @property
    def first_waiting(self) -> Sequence | None:
        return next((s for s in self.queue.in_turn(lambda _: False) if s.is_waiting), None)

    def add(self, sequence: Sequence, num_live: int) -> None:
        self._deadlines.add(sequence, num_live)
        self.queue.add(sequence)

    def start(self, sequence: Sequence) -> None:
        """Records that the sequence runs. Charges the list of the vocabulary of its next token."""
        self.queue.start(sequence)
        if sequence.request.params.lists_vocabulary:
            self._charge(sequence, LISTED_COST)

    def pop_expired(self, now: float) -> list[Sequence]:
        return self._deadlines.pop_passed(now)

    def predict_s(self, schedule: Schedule) -> float:
        return self.step_time.predict(schedule.num_tokens, schedule.num_attended)

    def account(self, sequence: Sequence) -> Account:
        return sequence.place.tenant_queue

    def begin_step(self) -> None:
        self._closed_by = None
        self.over_share.is_closed = self._is_spent = False

    def begin_prompts(
        self, schedule: Schedule, running: Iterable[Sequence], num_free_slots: int
    ) -> None:
        over_share = frozenset(
            tenant
            for tenant in {sequence.place.tenant_queue for sequence in running}
            if self.over_share.includes(tenant)
        )
        self._budget = self._new_budget(schedule, over_share)
        if not num_free_slots and not over_share and self._closed_by is None:
            self._closed_by = BlockReason.SLOT

    def in_turn(self) -> Iterator[Sequence]:
        """Yields pending sequences in the order in which they get tokens, until the budget has no
        tokens for a sequence. Omits the waiting sequences of tenants that may start no more
        sequences in this step."""
        for sequence in self.queue.in_turn(self._is_closed_to):
            yield sequence
            if self._is_spent:
                return

    def block(self, sequence: Sequence | None, reason: BlockReason) -> None:
        """Keeps later sequences from starting, so that they do not use the resource that the
        sequence lacks. A waiting sequence of an over-share tenant holds up only over-share tenants.
        If `sequence` is None, no sequence may start."""
        if reason is BlockReason.BUDGET:
            self._is_spent = True
        elif reason in (BlockReason.ADAPTER, BlockReason.PREFIX, BlockReason.CONSTRAINT):
            # An adapter, prefix or constraint that is not ready blocks only its sequence.
            if sequence is not None:
                sequence.place.tenant_queue.num_passed += 1
        elif reason is not BlockReason.MODEL and self._waits_over_share(sequence):
            self.over_share.is_closed = True
        else:
            self._closed_by = reason

    @property
    def is_closed(self) -> bool:
        """Whether no waiting sequence may start."""
        return self._closed_by is not None

    @property
    def is_backlogged(self) -> bool:
        """Whether sequences wait because the worker's slots, pages or step time are used up, and
        not because their adapter or model is not loaded."""
        if not self.num_waiting or self._closed_by is BlockReason.MODEL:
            return False
        return self.is_closed or self.over_share.is_closed or self._is_spent

    def room(self, sequence: Sequence) -> int:
        """Returns the number of the sequence's prompt tokens that the step has room for."""
        is_over_share = self.over_share.includes(sequence.place.tenant_queue)
        if self._budget.is_spent(is_over_share=is_over_share):
            return 0
        return self._budget.room(sequence.num_computed, is_over_share=is_over_share)

    def charge_prefill(self, sequence: Sequence, num_tokens: int) -> None:
        """Deducts prompt tokens from the budget, and charges them at once, because the charges
        decide which sequence is next. Tokens computed again after a preemption are not charged."""
        self._budget.deduct(num_tokens, sequence.num_computed)
        end = sequence.num_computed + num_tokens
        num_new = end - max(sequence.place.num_charged, sequence.num_computed)
        if num_new > 0:
            self._charge(sequence, PREFILL_COST * num_new)
            sequence.place.num_charged = end

    def charge_cached(self, sequence: Sequence) -> None:
        """Charges the prompt tokens found in the prefix cache."""
        num_cached = sequence.num_computed - sequence.place.num_charged
        if num_cached > 0:
            self._charge(sequence, CACHED_COST * num_cached)

    def charge_generated(self, sequence: Sequence, num_known: int) -> None:
        """Charges the generated tokens among the first `num_known` tokens of the sequence, except
        tokens that were charged before."""
        if num_known > sequence.place.num_charged:
            cost = DECODE_COST + LISTED_COST * sequence.request.params.lists_vocabulary
            self._charge(sequence, cost * (num_known - sequence.place.num_charged))
            sequence.place.num_charged = num_known

    def charge_load(self, sequence: Sequence, num_tokens: float) -> None:
        """Charges the load of the sequence's adapter. num_tokens: number of prompt tokens that
        could be computed in the time of the load."""
        self._charge(sequence, PREFILL_COST * num_tokens)

    def _charge(self, sequence: Sequence, cost: float) -> None:
        self.queue.charge(sequence, cost)
        self.over_share.record(sequence.place.tenant_queue, cost)

    def _is_closed_to(self, tenant: TenantQueue) -> bool:
        return self.is_closed or self.over_share.is_closed_to(tenant)

    def _waits_over_share(self, sequence: Sequence | None) -> bool:
        return (
            sequence is not None
            and sequence.is_waiting
            and self.over_share.includes(sequence.place.tenant_queue)
        )

    def _new_budget(self, schedule: Schedule, over_share: frozenset[TenantQueue]) -> StepBudget:
        items = schedule.items
        within_share = [
            item for item in items if item.sequence.place.tenant_queue not in over_share
        ]
        return StepBudget(
            self.step_time,
            num_tokens=self.max_batched_tokens - schedule.num_tokens,
            decode_s=self.predict_s(schedule),
            over_share_s=self.over_share.max_step_s(self.predict_s(Schedule(within_share)))
            if items
            else math.inf,
            seconds=min((due_s(item.sequence) for item in items), default=math.inf)
            - schedule.begin_s,
            max_gap_s=min(map(self._max_gap_s, items), default=math.inf),
        )

    def _max_gap_s(self, item: ScheduledSequence) -> float:
        """Returns the maximum seconds of a step that includes this generating sequence."""
        return self._max_token_gap_s * item.sequence.terms.gap_factor


class Deadlines:
    """Heap of the deadlines of sequences. A sequence that has started or ended stays in the heap
    until its deadline, unless there are many entries."""

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, Sequence]] = []
        self._num_added = 0

    def add(self, sequence: Sequence, num_live: int) -> None:
        """Adds the deadline of the sequence if it has a timeout. num_live: upper bound of the
        number of unfinished sequences. If the heap has more than about twice this number of
        entries, ended sequences are removed."""
        if sequence.request.timeout_s is None:
            return
        self._num_added += 1
        heappush(self._heap, (sequence.expires_s, self._num_added, sequence))
        if len(self._heap) > 2 * num_live + MIN_KEPT:
            self._heap = [each for each in self._heap if not each[2].is_finished]
            heapify(self._heap)

    def pop_passed(self, now: float) -> list[Sequence]:
        """Removes the entries whose deadline has passed. Returns their sequences, except sequences
        that are not waiting or have generated a token."""
        passed: list[Sequence] = []
        while self._heap and self._heap[0][0] <= now:
            sequence = heappop(self._heap)[2]
            if sequence.is_waiting and sequence.num_generated == 0:
                passed.append(sequence)
        return passed


def due_s(sequence: Sequence) -> float:
    """Returns the time when the sequence's next token is due that no launched step computes. The
    first token is due `ttft_s` after the arrival, and each later one `tpot_s` after the one before.
    If the first token was late, later tokens are due relative to the time when it was generated."""
    times, terms = sequence.times, sequence.terms
    num_ahead = sequence.num_inflight_tokens
    first_s = times.arrival_s + terms.ttft_s
    if times.first_token_s is not None:
        first_s = max(first_s, times.first_token_s)
        num_ahead += len(sequence.tokens) - len(sequence.request.tokens)
    return first_s + num_ahead * terms.tpot_s
