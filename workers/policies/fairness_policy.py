"""Decides in which order sequences get tokens in a step, and limits each tenant. The scheduler
decides which sequences have enough memory to run.

Three rules are applied:

- turns: the class and the tenant charged least are next (`FairQueue`);
- deadlines: the prompt tokens of a step are limited, so that generated tokens are not late and gaps
  between two tokens are not too long (`StepBudget`, `GapLimit`), and requests whose timeout passes
  before they start are dropped;
- shares: slots, room and time are kept for tenants within their share (`OverShare`).
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterator

from adapters.pool.source import Account
from workers.policies.fair_queue import FairQueue
from workers.policies.gap_limit import MAX_GAP_RATIO, GapLimit
from workers.policies.over_share import ADDED_PART, OverShare
from workers.policies.queue_forecast import QueueForecast
from workers.policies.queue_limits import QueueBounds, QueueLimits
from workers.policies.step_budget import StepBudget
from workers.policies.step_cost import StepTime
from workers.policies.tenant_queue import TenantQueue
from workers.scheduling.policy import QueueStatus, Refusal
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
HURRY_PART = 0.5
"""Part of the promised time to the first token. Once no more of it is left to a prompt that gets no
tokens, prompts may make gaps longer (see `GapLimit.hurry`)."""
CACHED_COST = 0.1
"""Charge for a prompt token that is found in the prefix cache."""


class FairnessPolicy:
    """Implementation of `SchedulingPolicy` with tenants, service classes and deadlines."""

    def __init__(
        self,
        *,
        max_num_seqs: int,
        max_batched_tokens: int,
        max_token_gap_s: float = MAX_TOKEN_GAP_S,
        max_gap_ratio: float = MAX_GAP_RATIO,
        bounds: QueueBounds = QueueBounds(),  # noqa: B008
        memory_tokens: Callable[[], int] = lambda: sys.maxsize,
    ) -> None:
        """max_token_gap_s: maximum seconds of a step that has generating sequences. max_gap_ratio:
        `max_ratio` of the `GapLimit`. The resulting maximum of a step's seconds is multiplied by
        the smallest `gap_factor` of its sequences. memory_tokens: function that
        returns the number of tokens whose KV fits into memory."""
        self.queue = queue = FairQueue()
        self.over_share = OverShare(queue, max_num_seqs)
        self._max_batched_tokens = max_batched_tokens
        self._running: dict[Sequence, None] = {}
        """Running sequences, in the order in which they started."""
        self.step_time = StepTime()
        self._gap_limit = GapLimit(
            self.step_time, max_gap_s=max_token_gap_s, max_ratio=max_gap_ratio
        )
        self._forecast = QueueForecast(
            self.step_time, max_num_seqs=max_num_seqs, max_batched_tokens=max_batched_tokens
        )
        self._limits = QueueLimits(queue, self._forecast, bounds, memory_tokens, self._running)
        self._budget = self._new_budget(Schedule(), [], frozenset())
        self._begin_s = 0.0
        """Predicted time when the device can begin the step that is being scheduled."""
        self._closed_by: BlockReason | None = None
        """Reason why no more sequences may start in this step; None if sequences may start."""
        self._is_spent = False
        """Whether the budget had no tokens for the sequence whose turn it was, so that no other
        sequence gets tokens in this step."""

    @property
    def status(self) -> QueueStatus:
        queue, forecast = self.queue, self._forecast
        return QueueStatus(
            queue.num_waiting_tokens,
            forecast.prompt_tokens_per_s,
            queue.weight,
            forecast.answer_tokens,
        )

    @property
    def is_backlogged(self) -> bool:
        """Whether sequences wait because the worker's slots, pages or step time are used up, and
        not because their adapter or model is not loaded."""
        if not self.queue.num_waiting or self._closed_by is BlockReason.MODEL:
            return False
        return self._closed_by is not None or self.over_share.is_closed or self._is_spent

    def add(self, sequence: Sequence) -> None:
        self._running.pop(sequence, None)
        self.queue.add(sequence)

    def start(self, sequence: Sequence) -> None:
        """Implements `SchedulingPolicy.start`. Also charges the list of the vocabulary of the
        sequence's next token."""
        place = self.queue.places[sequence]
        cost = CACHED_COST * max(sequence.num_computed - place.num_charged, 0)
        place.num_charged = max(place.num_charged, sequence.num_computed)
        if sequence.lease is not None and (load_s := sequence.lease.pay()):
            num_tokens = self.step_time.tokens_within(load_s, 0)
            cost += PREFILL_COST * (num_tokens if num_tokens < math.inf else 0.0)
        cost += LISTED_COST * sequence.request.params.lists_vocabulary
        self._charge(place.tenant, cost)
        self._forecast.record_start(
            self.queue.load_of(sequence).num_tokens, sequence.num_uncomputed
        )
        self.queue.start(sequence)
        self._running[sequence] = None

    def remove(self, sequence: Sequence) -> None:
        if sequence in self._running:
            del self._running[sequence]
            if sequence.is_begun and sequence.connection >= 0:
                self._forecast.record_answer(sequence.num_generated)
        self.queue.remove(sequence)

    def refuse(self, newcomers: list[Sequence], now: float) -> list[Refusal]:
        if newcomers or not self.is_backlogged:
            return [r for each in newcomers for r in self._limits.refuse_for(each, now)]
        return self._limits.refuse_late(now)

    def account(self, sequence: Sequence) -> Account:
        return self.queue.tenant_of(sequence)

    def in_turn(self, schedule: Schedule) -> Iterator[Sequence]:
        """Yields pending sequences in the order in which they get tokens, until the budget has no
        tokens for a sequence. Omits the waiting sequences of tenants that may start no more
        sequences in this step."""
        self._begin_s = schedule.begin_s = self._predict_begin_s(schedule)
        self.over_share.is_closed = self._is_spent = False
        self._closed_by = None
        if not self.queue.has_pending:
            if schedule.items:
                self._gap_limit.record(1.0)
            return
        tenants = {self.queue.tenant_of(sequence) for sequence in self._running}
        over_share = frozenset(each for each in tenants if self.over_share.includes(each))
        # Streams that this step leaves out wait for its end as well.
        awaiting = [ScheduledSequence(each, 1) for each in self._running if each.awaits_token]
        streams = schedule.items + awaiting
        self._budget = self._new_budget(schedule, streams, over_share)
        if schedule.is_held:
            self._closed_by = BlockReason.MODEL
            self._limits.hold(schedule.now)
        elif schedule.lacks_pages:
            self._closed_by = BlockReason.PAGES
        elif not schedule.num_free_slots and not over_share:
            self._closed_by = BlockReason.SLOT
        for sequence in self.queue.in_turn(self._is_closed_to):
            yield sequence
            if self._is_spent:
                break
        if streams:
            self._gap_limit.record(self._budget.stretch)

    def block(self, sequence: Sequence, reason: BlockReason) -> None:
        """Keeps later sequences from starting, so that they do not use the resource that the
        sequence lacks. A waiting sequence of an over-share tenant holds up only over-share
        tenants."""
        tenant = self.queue.tenant_of(sequence)
        if reason is BlockReason.BUDGET:
            self._is_spent = True
            hurry_s = due_s(sequence) - HURRY_PART * sequence.terms.ttft_s
            if self._begin_s > hurry_s:
                self._gap_limit.hurry()
        elif reason in (BlockReason.ADAPTER, BlockReason.PREFIX, BlockReason.CONSTRAINT):
            # An adapter, prefix or constraint that is not ready blocks only its sequence.
            tenant.num_passed += 1
        elif reason is BlockReason.MODEL or not sequence.is_waiting:
            self._closed_by = reason
        elif self.over_share.includes(tenant):
            self.over_share.is_closed = True
        else:
            self._closed_by = reason

    def room(self, sequence: Sequence) -> int:
        is_over_share = self.over_share.includes(self.queue.tenant_of(sequence))
        if self._budget.is_spent(is_over_share=is_over_share):
            return 0
        return self._budget.room(sequence.num_computed, is_over_share=is_over_share)

    def victim(self, sequence: Sequence, num_free_slots: int) -> Sequence | None:
        tenant = self.queue.tenant_of(sequence)
        if self.over_share.may_have_slot(tenant, num_free_slots):
            return None
        victim = self.over_share.victim(tenant, self._running)
        return sequence if victim is None else None if num_free_slots else victim

    def charge(self, sequence: Sequence, end: int) -> None:
        """Charges tokens at once when they are scheduled, because the charges decide which sequence
        is next. Tokens computed again after a preemption are not charged."""
        place = self.queue.places[sequence]
        if end > sequence.num_computed:
            self._budget.deduct(end - sequence.num_computed, sequence.num_computed)
        num_prompt = max(min(end, sequence.num_queued) - place.num_charged, 0)
        num_generated = max(end - place.num_charged, 0) - num_prompt
        listed_cost = LISTED_COST * sequence.request.params.lists_vocabulary
        cost = PREFILL_COST * num_prompt + (DECODE_COST + listed_cost) * num_generated
        self._charge(place.tenant, cost)
        place.num_charged = max(place.num_charged, end)
        if place.is_pending and not sequence.is_pending:
            self.queue.leave(sequence)

    def record_step(
        self, num_tokens: int, num_attended: int, seconds: float, wall_s: float
    ) -> None:
        self.step_time.record(num_tokens, num_attended, seconds)
        self._forecast.record_step(
            wall_s, num_tokens, num_attended, is_backlogged=self.is_backlogged
        )

    def _charge(self, tenant: TenantQueue, cost: float) -> None:
        self.queue.charge(tenant, cost)
        self.over_share.record(tenant, cost)

    def _is_closed_to(self, tenant: TenantQueue) -> bool:
        return self._closed_by is not None or self.over_share.is_closed_to(tenant)

    def _new_budget(
        self,
        schedule: Schedule,
        streams: list[ScheduledSequence],
        over_share: frozenset[TenantQueue],
    ) -> StepBudget:
        decoding = Schedule(streams)
        decode_s = self._predict_s(decoding)
        gap_factor = min((item.sequence.terms.gap_factor for item in streams), default=math.inf)
        within_share = [
            item for item in streams if self.queue.tenant_of(item.sequence) not in over_share
        ]
        return StepBudget(
            self.step_time,
            num_tokens=self._max_batched_tokens - schedule.num_tokens,
            decode_s=decode_s,
            over_share_s=(1 + ADDED_PART) * self._predict_s(Schedule(within_share))
            if streams
            else math.inf,
            seconds=min((due_s(item.sequence) for item in streams), default=math.inf)
            - schedule.begin_s,
            max_gap_s=gap_factor * self._gap_limit.seconds(decode_s, decoding.num_tokens)
            if streams
            else math.inf,
        )

    def _predict_s(self, schedule: Schedule) -> float:
        return self.step_time.predict(schedule.num_tokens, schedule.num_attended)

    def _predict_begin_s(self, schedule: Schedule) -> float:
        """Returns the predicted time when the device can begin the step."""
        ends_s = [each.begin_s + self._predict_s(each) for each in schedule.in_flight]
        return max([schedule.now, *ends_s])


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
