"""Order of sequences in a step, and the limits of each tenant in it. The scheduler decides what
fits.

Four rules are applied:

- turns: the class and the tenant charged least are next (`FairQueue`);
- deadlines: prompts use the time that generating sequences can spare (`StepBudget`), at most up to
  the maximum gap between two tokens of a stream, and requests whose timeout passes before they
  start are dropped;
- slots: some sequence slots are kept for tenants within their share;
- over-share tenants lengthen a step only by a fraction of its time, and give up slots to others.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator

from workers.policies.deadlines import Deadlines
from workers.policies.fair_queue import FairQueue, TenantQueue, last_in_turn, with_leeway
from workers.policies.step_budget import StepBudget
from workers.policies.step_cost import StepTime
from workers.scheduling.schedule import BlockReason, Schedule, ScheduledSequence
from workers.scheduling.sequence import Sequence

MAX_TOKEN_GAP_S = 0.25
PREFILL_COST = 1.0
DECODE_COST = 2.0
CACHED_COST = 0.1
"""Charge per token: computed in the prompt, generated, or taken from the prefix cache."""
LEAST_KEPT, MOST_KEPT = 1 / 16, 1 / 8
"""Bounds of the fraction of slots that is kept for tenants with few of them."""


class FairnessPolicy:
    """Policy for one step at a time: `begin_step`, then `begin_prompts`, then `in_turn` with a
    `block` for each sequence that lacks something and a `take` for each that gets tokens."""

    def __init__(
        self,
        queue: FairQueue,
        *,
        max_num_seqs: int,
        max_batched_tokens: int,
        max_token_gap_s: float = MAX_TOKEN_GAP_S,
    ) -> None:
        """max_token_gap_s: see `_max_gap_s`."""
        self._queue = queue
        self._max_num_seqs = max_num_seqs
        self._max_batched_tokens = max_batched_tokens
        self._max_token_gap_s = max_token_gap_s
        self.step_time = StepTime()
        self._deadlines = Deadlines()
        self._budget = self._new_budget(Schedule(), frozenset())
        self._closed_by: BlockReason | None = None
        """Reason why no more sequences start in this step; None if they may."""
        self._is_closed_to_over_share = False
        self._is_spent = False
        """Whether the sequence whose turn it is gets no tokens, which ends the round."""

    def add(self, sequence: Sequence, num_live: int) -> None:
        """Queues the sequence. num_live: upper bound of the number of other sequences."""
        self._deadlines.add(sequence, num_live)
        self._queue.add(sequence)

    def take_expired(self, now: float) -> list[Sequence]:
        """Returns waiting sequences whose deadline for the first token has passed."""
        return self._deadlines.take_passed(now)

    def predict_s(self, schedule: Schedule) -> float:
        """Returns the predicted duration of the step in seconds."""
        return self.step_time.predict(schedule.num_tokens, schedule.num_attended)

    def begin_step(self) -> None:
        self._closed_by = None
        self._is_closed_to_over_share = self._is_spent = False

    def begin_prompts(
        self, schedule: Schedule, running: Iterable[Sequence], num_free_slots: int
    ) -> None:
        """Sets the step's budget for prompts. schedule: the generating sequences."""
        over_share = frozenset(
            tenant
            for tenant in {sequence.tenant_queue for sequence in running}
            if self._queue.is_over_share(tenant)
        )
        self._budget = self._new_budget(schedule, over_share)
        if not num_free_slots and not over_share and self._closed_by is None:
            self._closed_by = BlockReason.SLOT

    def in_turn(self) -> Iterator[Sequence]:
        """Yields pending sequences in the order in which they get tokens, until one is blocked by
        the budget. Waiting ones are omitted once they may not start."""
        for sequence in self._queue.in_turn(self._is_closed_to):
            yield sequence
            if self._is_spent:
                return

    def block(self, sequence: Sequence | None, reason: BlockReason) -> None:
        """Reserves for the sequence what it lacks, by keeping later sequences from starting. An
        over-share tenant's sequence holds up only over-share tenants; no sequence, all."""
        if reason is BlockReason.BUDGET:
            self._is_spent = True
        elif reason in (BlockReason.ADAPTER, BlockReason.PREFIX, BlockReason.GRAMMAR):
            pass  # no reservation is needed
        elif reason is not BlockReason.MODEL and self._waits_over_share(sequence):
            self._is_closed_to_over_share = True
        else:
            self._closed_by = reason

    @property
    def is_closed(self) -> bool:
        """Whether no waiting sequence may start."""
        return self._closed_by is not None

    @property
    def is_full(self) -> bool:
        """Whether waiting sequences wait for slots, pages or time, not for an adapter or model."""
        if self._closed_by is BlockReason.MODEL:
            return False
        return self.is_closed or self._is_closed_to_over_share or self._is_spent

    def room(self, sequence: Sequence) -> int:
        """Returns the number of the sequence's prompt tokens that the step has room for."""
        is_over_share = self._queue.is_over_share(sequence.tenant_queue)
        if self._budget.is_spent(is_over_share=is_over_share):
            return 0
        return self._budget.room(sequence.num_computed, is_over_share=is_over_share)

    def may_have_slot(
        self, tenant: TenantQueue, running: Iterable[Sequence], num_free: int
    ) -> bool:
        """Whether the tenant may have one more slot.

        About one slot for each other tenant with work is kept for tenants that are within their
        share and hold few slots. Without a free slot, a tenant may have one only if an over-share
        tenant must give one up for it.
        """
        share = self._queue.share(tenant)
        least, most = (int(part * self._max_num_seqs) for part in (LEAST_KEPT, MOST_KEPT))
        if num_free > min(max(round(1.0 / share) - 1, least), most):
            return True
        limit = with_leeway(min(share, 0.5)) * self._max_num_seqs
        if num_free and tenant.num_running < limit and not self._queue.is_over_share(tenant):
            return True
        return self.victim(tenant, running) is not None

    def victim(self, tenant: TenantQueue, running: Iterable[Sequence]) -> Sequence | None:
        """Returns the sequence that gives up its slot to the tenant: the newest of the over-share
        tenant with the most slots for its share, if that tenant then still has no less than the
        other. Returns None if there is none, or if the tenant itself is over its share."""
        if self._queue.is_over_share(tenant):
            return None
        level = (tenant.num_running + 1) / self._queue.share(tenant)
        over_share = [
            other
            for other in dict.fromkeys(sequence.tenant_queue for sequence in running)
            if (other.num_running - 1) / self._queue.share(other) >= level
            and self._queue.is_over_share(other)
        ]
        if not over_share:
            return None
        most = max(over_share, key=lambda other: other.num_running / self._queue.share(other))
        return last_in_turn(sequence for sequence in running if sequence.tenant_queue is most)

    def take(self, sequence: Sequence, num_tokens: int) -> None:
        """Deducts prompt tokens from the budget and charges them, because the next turn depends on
        it. Tokens computed again after a preemption are not charged."""
        self._budget.take(num_tokens, sequence.num_computed)
        end = sequence.num_computed + num_tokens
        num_new = end - max(sequence.num_charged, sequence.num_computed)
        if num_new > 0:
            self._queue.charge(sequence, PREFILL_COST * num_new)
            sequence.num_charged = end

    def charge_cached(self, sequence: Sequence) -> None:
        """Charges the prompt tokens found in the prefix cache."""
        num_cached = sequence.num_computed - sequence.num_charged
        if num_cached > 0:
            self._queue.charge(sequence, CACHED_COST * num_cached)

    def charge_generated(self, sequence: Sequence, num_known: int) -> None:
        """Charges all generated tokens of `num_known` except the last, each once."""
        if num_known > sequence.num_charged:
            self._queue.charge(sequence, DECODE_COST * (num_known - sequence.num_charged))
            sequence.num_charged = num_known

    def charge_load(self, sequence: Sequence, num_tokens: float) -> None:
        """Charges an adapter's load. num_tokens: tokens that could be prefilled in its time."""
        self._queue.charge(sequence, PREFILL_COST * num_tokens)

    def _is_closed_to(self, tenant: TenantQueue) -> bool:
        if self.is_closed:
            return True
        return self._is_closed_to_over_share and self._queue.is_over_share(tenant)

    def _waits_over_share(self, sequence: Sequence | None) -> bool:
        return (
            sequence is not None
            and sequence.is_waiting
            and self._queue.is_over_share(sequence.tenant_queue)
        )

    def _new_budget(self, schedule: Schedule, over_share: frozenset[TenantQueue]) -> StepBudget:
        items = schedule.items
        within_share = [item for item in items if item.sequence.tenant_queue not in over_share]
        return StepBudget(
            self.step_time,
            num_tokens=self._max_batched_tokens - schedule.num_tokens,
            decode_s=self.predict_s(schedule),
            within_share_s=self.predict_s(Schedule(within_share)) if items else math.inf,
            seconds=min((_due_s(item.sequence) for item in items), default=math.inf)
            - schedule.begin_s,
            max_gap_s=min(map(self._max_gap_s, items), default=math.inf),
        )

    def _max_gap_s(self, item: ScheduledSequence) -> float:
        """Returns the maximum seconds of a step with this generating sequence."""
        return self._max_token_gap_s * item.sequence.terms.num_gaps


def _due_s(sequence: Sequence) -> float:
    """Returns the time when the token after those in flight is due."""
    return sequence.due_s + sequence.num_inflight_tokens * sequence.terms.tpot_s
