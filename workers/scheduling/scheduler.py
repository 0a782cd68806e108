"""Which sequences run in the next step, and with how many tokens.

Whose turn it is comes from `FairQueue`; what fits is decided here and nowhere else: sequence rows,
KV pages, adapter leases and the step's budget. No tensors.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Protocol

from adapters.errors import AdapterUnavailable
from adapters.pool.load_cost import copy_s
from memory.kv_cache import KVCache
from memory.page_key import PAGE_TOKENS
from workers.scheduling.adapter_admission import AdapterTurns
from workers.scheduling.deadlines import Deadlines
from workers.scheduling.fairness import (
    CACHED_COST,
    DECODE_COST,
    PREFILL_COST,
    Account,
    FairQueue,
    last_in_turn,
)
from workers.scheduling.queue_limits import Overload, QueueBounds, Refusal
from workers.scheduling.row_shares import RowShares
from workers.scheduling.schedule import Schedule, ScheduledSequence
from workers.scheduling.sequence import Sequence, SequenceStatus
from workers.scheduling.step_budget import StepBudget
from workers.scheduling.step_cost import StepTime
from workers.wire.protocol import ErrorCode

if TYPE_CHECKING:
    from adapters.pool.pool import AdapterPool

MAX_ASKED = 32
"""Adapters not on the device that may be asked for in one step: those of the next in turn."""

EXPIRED = "its time was over before its prompt could begin"


class SlotAllocator(Protocol):
    """Slots of the device's token buffer, one for each running sequence."""

    def allocate(self, tokens: list[int]) -> int: ...

    def free(self, slot: int) -> None: ...


class Scheduler:
    """Continuous batching with chunked prefill, prefix reuse and preemption by recompute.

    A step has a row for each sequence that generates, and prompts as far as `StepBudget` lets them.

    A step may be scheduled while the one before it is in flight: each sequence is taken to go on.
    Of one that has ended by then the row is for nothing: `update` leaves no trace of it. What a
    step in flight uses stays as it is until its `update`, so nobody is preempted meanwhile: a
    sequence that lacks pages is left out, and `needs_drain` until nothing is in flight.
    """

    def __init__(
        self,
        kv: KVCache,
        pool: AdapterPool,
        slots: SlotAllocator,
        *,
        max_num_seqs: int,
        max_batched_tokens: int,
        max_pages: int | None = None,
        bounds: QueueBounds = QueueBounds(),  # noqa: B008
    ) -> None:
        """max_pages: that one sequence may need; None: all that the arena has."""
        self._kv = kv
        self._pool = pool
        self._slots = slots
        self.max_num_seqs = max_num_seqs
        self.max_batched_tokens = max_batched_tokens
        self._queue = FairQueue()
        self._shares = RowShares(self._queue, max_num_seqs)
        self.step_time = StepTime()
        self._overload = Overload(self._queue, bounds, self.step_time, max_batched_tokens)
        self._turns = AdapterTurns()
        self._deadlines = Deadlines()
        self._num_drained = self._num_drained_tokens = 0
        """What left the queue since the last step."""
        self._asked: set[str] = set()
        """Adapters that were asked for in vain in this step."""
        self._is_closed = False
        """Nobody begins any more in this step."""
        self._is_closed_to_guests = False
        self._is_spent = False
        """It has no more time for whoever is next in turn."""
        self._has_guests = False
        """Some of them run."""
        self.running: list[Sequence] = []
        self.leaving: list[Sequence] = []
        """Ended, but a step in flight computes rows of them."""
        self._in_flight: list[Schedule] = []
        """Not updated yet, the oldest first."""
        self.needs_drain = False
        """The next step can be scheduled when those in flight have ended, not before."""
        self.num_preemptions = 0
        self.num_queried_tokens = 0
        self.num_hit_tokens = 0
        self._max_pages = kv.num_total if max_pages is None else max_pages
        self.is_held = False
        """Nobody who waits is admitted."""
        self.is_short = False
        """In the last step the first who waited found too few pages, and other models have them."""

    @property
    def waiting(self) -> list[Sequence]:
        return self._queue.waiting

    @property
    def first_waiting(self) -> Sequence | None:
        """Who would be the next to run."""
        return next((s for s in self._queue.in_turn(lambda _: False) if s.is_waiting), None)

    @property
    def num_pages_wanted(self) -> int:
        """Of the first who waits, in all; or as much memory, for its adapter."""
        first = self.first_waiting
        if first is None:
            return 0
        num_bytes = 0 if first.adapter is None else self._pool.num_lacking(first.adapter)
        return _num_pages(len(first.tokens)) - (-num_bytes // self._kv.pool.page_bytes)

    @property
    def has_work(self) -> bool:
        return bool(self.running or self._in_flight or self._queue.num_waiting)

    @property
    def num_waiting(self) -> int:
        return self._queue.num_waiting

    @property
    def num_waiting_tokens(self) -> int:
        """Of prompts: neither computed nor known to be cached."""
        return self._queue.num_waiting_tokens + sum(
            s.num_uncomputed for s in self.running if s.is_prefilling
        )

    @property
    def weight(self) -> int:
        """Of all tenants with work here."""
        return self._queue.weight

    @property
    def has_free_row(self) -> bool:
        """One more sequence would not wait for another to end."""
        return self._num_used_slots + self.num_waiting < self.max_num_seqs

    @property
    def _num_used_slots(self) -> int:
        """Slots of the token buffer that are taken."""
        return len(self.running) + len(self.leaving)

    @property
    def num_free_pages(self) -> int:
        return self._kv.num_free

    def refusal(self, sequence: Sequence) -> tuple[ErrorCode, str] | None:
        """Why the sequence could never run, even alone."""
        num_pages = _num_pages(sequence.max_len)
        if num_pages > self._max_pages:
            return ErrorCode.PROMPT_TOO_LONG, (
                f"needs {num_pages} KV pages of {PAGE_TOKENS} tokens, "
                f"the arena has {self._max_pages}"
            )
        return None

    def refuse_for(self, newcomer: Sequence, now: float) -> list[Refusal]:
        """Who must not wait so that the newcomer may: nobody, others, or the newcomer itself."""
        return self._overload.refuse_for(newcomer, now, self._num_free_slots, self.running)

    def expect(self, sequence: Sequence) -> None:
        """It will be added: the load of its adapter need not wait for the step's end."""
        if sequence.adapter is not None and self.has_free_row and self._turns.is_open:
            self._pool.expect(sequence.adapter, sequence.block_table.tenant)

    def add(self, sequence: Sequence) -> None:
        """Queues it; its adapter starts to load at once."""
        if sequence.adapter is not None:
            self._pool.prefetch(sequence.adapter, sequence.block_table.tenant)
        self._deadlines.add(sequence, self.num_waiting + len(self.running))
        self._queue.add(sequence)
        self._turns.note_waiting(sequence)

    def remove(self, sequence: Sequence) -> None:
        """Frees all it holds, whatever it was doing; if a step in flight uses it, then at its
        end."""
        if sequence.status is SequenceStatus.RUNNING:
            self.running.remove(sequence)
            if sequence.num_inflight_steps:
                self.leaving.append(sequence)
            else:
                self._release(sequence)
            self._queue.remove(sequence, is_waiting=False)
        elif sequence.status is SequenceStatus.WAITING:
            self._queue.remove(sequence, is_waiting=True)
            self._turns.note_not_waiting(sequence)
            self._cancel_load(sequence)
        sequence.status = SequenceStatus.FINISHED

    def suspend(self) -> None:
        """Everything that runs waits again and keeps its tokens. Nothing is in flight."""
        for sequence in list(self.running):
            self._put_back(sequence)

    def expire(self, now: float) -> list[Sequence]:
        """Removes and returns what waits for a first token that nobody wants any more, and has not
        begun."""
        expired = self._deadlines.take_passed(now)
        for sequence in expired:
            self.remove(sequence)
        return expired

    def schedule(self, now: float) -> Schedule:
        """The next step: a row for each sequence that generates, then prompts in turn, those begun
        and those that can begin."""
        schedule = Schedule(begin_s=max([now, *map(self._end_s, self._in_flight)]))
        self.is_short = self.needs_drain = False
        self._is_closed, self._is_closed_to_guests = self.is_held, False
        self._is_spent = False
        for sequence in self.expire(now):
            schedule.failed.append((sequence, ErrorCode.EXPIRED, EXPIRED))
        due_s = self._decode(schedule)
        if self._queue.has_pending:
            guests = set(filter(self._queue.is_guest, {s.account for s in self.running}))
            others = [item for item in schedule.items if item.sequence.account not in guests]
            budget = StepBudget(
                self.step_time,
                num_rows=self.max_batched_tokens - schedule.num_tokens,
                decode_s=self._step_s(schedule),
                without_guests_s=self._step_s(Schedule(others)) if schedule.items else math.inf,
                seconds=due_s - schedule.begin_s,
            )
            self._has_guests = bool(guests)
            self._prefill(budget, now, schedule)
        schedule.items.sort(key=lambda item: (item.adapter_slot < 0, item.adapter_slot))
        self._overload.rate.note(
            now,
            self._num_drained,
            self._num_drained_tokens,
            is_backlogged=self.num_waiting > 0 and self._is_full_up,
        )
        self._num_drained = self._num_drained_tokens = 0
        self._depart(schedule)
        return schedule

    def update(self, schedule: Schedule, num_new: list[int]) -> None:
        """The step has ended: what it computed is charged, full pages may now be shared. Not of
        sequences that have ended: they let go of what they had.

        num_new: new tokens that each sequence of the schedule takes. One that was given none, where
        one was expected, computes its last token again.
        """
        self._in_flight.remove(schedule)
        for item, num_tokens in zip(schedule.items, num_new, strict=True):
            sequence = item.sequence
            sequence.num_inflight_steps -= 1
            sequence.num_inflight_tokens -= item.is_sampled
            if not sequence.is_finished:
                num_computed = item.end
                if item.is_sampled and not num_tokens:
                    num_computed = sequence.num_computed = item.end - 1
                num_known = item.end + max(num_tokens - 1, 0)
                self._account(sequence, num_computed, num_known)
            elif not sequence.num_inflight_steps:
                self.leaving.remove(sequence)
                self._release(sequence)

    def _account(self, sequence: Sequence, num_computed: int, num_known: int) -> None:
        """Takes note of how many of its tokens are computed by now, and charges those generated,
        each once: all but the last of `num_known`. A prompt is charged when it is scheduled."""
        if num_known > sequence.num_charged:
            self._queue.charge(sequence, DECODE_COST * (num_known - sequence.num_charged))
            sequence.num_charged = num_known
        num_full = num_computed // PAGE_TOKENS
        if num_full > sequence.block_table.num_committed:
            sequence.block_table.commit(sequence.page_keys[:num_full])
        if sequence.is_pending and num_computed == len(sequence.tokens):
            self._queue.leave(sequence)

    def _depart(self, schedule: Schedule) -> None:
        """From now on it is in flight."""
        for item in schedule.items:
            sequence = item.sequence
            sequence.num_computed = item.end
            sequence.num_inflight_steps += 1
            sequence.num_inflight_tokens += item.is_sampled
        if schedule.items:
            self._in_flight.append(schedule)

    def _end_s(self, schedule: Schedule) -> float:
        """When it should have ended."""
        return schedule.begin_s + self._step_s(schedule)

    def _step_s(self, schedule: Schedule) -> float:
        """As predicted."""
        return self.step_time.predict(schedule.num_tokens, schedule.num_attended)

    def _decode(self, schedule: Schedule) -> float:
        """The tokens that sequences which generate have not computed yet: one each, unless the last
        step gave several. Returns when the first of their next tokens is due."""
        due_s = math.inf
        for sequence in list(self.running):
            is_on = sequence.status is SequenceStatus.RUNNING and sequence.is_generating
            num_tokens = sequence.num_uncomputed
            if is_on and self._grow(sequence, num_tokens, schedule):
                schedule.items.append(ScheduledSequence(sequence, num_tokens))
                due_s = min(
                    due_s, sequence.due_s + sequence.num_inflight_tokens * sequence.terms.tpot_s
                )
        return due_s

    def _prefill(self, budget: StepBudget, now: float, schedule: Schedule) -> None:
        """Gives prompts their rows, in turn. Passed over: those whose adapter is not there, and
        those whose next page another sequence computes right now. After the first that lacks pages
        or a row nobody new begins, or no guest if it is one; after a guest that the step has no
        more time for, nobody at all: they would be given more than is their due."""
        self._asked.clear()
        begun = [sequence for sequence in self.running if sequence.is_pending]
        if self._is_closed_to_all and not begun:
            return
        in_use = [*self.running, *self.leaving]
        pool = self._pool
        self._turns.choose_victims(now, in_use, pool.may_displace, pool.num_lacking)
        computing = {sequence.next_page_key for sequence in begun}
        for sequence in self._queue.in_turn(self._is_full):
            if budget.is_spent(is_guest=self._queue.is_guest(sequence.account)):
                self._is_spent = True
                return
            if not sequence.is_waiting:
                self._continue(sequence, budget, schedule)
            elif not self._may_begin(sequence):
                self._close(sequence)
            elif self._acquire_adapter(sequence, now, schedule):
                self._admit(sequence, computing, budget, schedule)

    def _close(self, sequence: Sequence) -> None:
        """It lacks something, and who comes after it may not take that before it does. From a guest
        only other guests may not: it has had more than its due of late, and is none afterwards."""
        if self._queue.is_guest(sequence.account):
            self._is_closed_to_guests = True
        else:
            self._is_closed = True

    @property
    def _is_closed_to_all(self) -> bool:
        return self._is_closed or not (self._num_free_slots or self._has_guests)

    @property
    def _is_full_up(self) -> bool:
        """Rows, pages or time are short: it is no adapter or base model that those who wait wait
        for."""
        is_short = self._is_spent or self._is_closed_to_all or self._is_closed_to_guests
        return is_short and not self.is_held

    def _is_full(self, account: Account) -> bool:
        is_closed = self._is_closed_to_guests and self._queue.is_guest(account)
        return is_closed or self._is_closed_to_all

    @property
    def _num_free_slots(self) -> int:
        return self.max_num_seqs - self._num_used_slots

    def _continue(self, sequence: Sequence, budget: StepBudget, schedule: Schedule) -> None:
        if sequence.num_computed >= len(sequence.tokens):
            return  # the rest of it is in flight
        num_tokens = self._num_next(sequence, budget)
        if self._grow(sequence, num_tokens, schedule):
            self._take(sequence, num_tokens, budget, schedule)

    def _grow(self, sequence: Sequence, num_tokens: int, schedule: Schedule) -> bool:
        """Pages for its next rows, preempting while memory is short. False: it was preempted
        itself, or nobody can be before the step in flight has ended."""
        while not sequence.block_table.grow(sequence.num_computed + num_tokens):
            self._is_closed = True
            if self._in_flight:
                self.needs_drain = True
                return False
            table = sequence.block_table
            victim = last_in_turn(s for s in self.running if table.may_displace(s.block_table))
            self._preempt(victim, schedule)
            if victim is sequence:
                return False
        return True

    def _may_begin(self, sequence: Sequence) -> bool:
        """As far as it depends on rows."""
        return self._shares.may_begin(sequence.account, self.running, self._num_free_slots)

    def _make_row(self, sequence: Sequence, schedule: Schedule) -> bool:
        """There is one, or a guest gives one up, as none can before the step in flight has
        ended."""
        if self._num_free_slots:
            return True
        if self._in_flight:
            self.needs_drain = True
            return False
        victim = self._shares.victim(sequence.account, self.running)
        if victim is not None:
            self._preempt(victim, schedule)
        return victim is not None

    def _preempt(self, victim: Sequence, schedule: Schedule) -> None:
        self._put_back(victim)
        schedule.items = [item for item in schedule.items if item.sequence is not victim]
        schedule.num_preempted += 1

    def _num_next(self, sequence: Sequence, budget: StepBudget) -> int:
        is_guest = self._queue.is_guest(sequence.account)
        return sequence.num_next(budget.room(sequence.num_computed, is_guest=is_guest))

    def _take(
        self, sequence: Sequence, num_tokens: int, budget: StepBudget, schedule: Schedule
    ) -> None:
        """Rows of a prompt. They are charged at once, for whoever is next in turn depends on it,
        but not again after a preemption."""
        schedule.items.append(ScheduledSequence(sequence, num_tokens))
        budget.take(num_tokens, sequence.num_computed)
        end = sequence.num_computed + num_tokens
        num_new = end - max(sequence.num_charged, sequence.num_computed)
        if num_new > 0:
            self._queue.charge(sequence, PREFILL_COST * num_new)
            sequence.num_charged = end

    def _put_back(self, sequence: Sequence) -> None:
        """It waits again, and keeps its tokens."""
        self.running.remove(sequence)
        self._release(sequence)
        sequence.status = SequenceStatus.WAITING
        self._queue.put_back(sequence)
        self._turns.note_waiting(sequence)
        self.num_preemptions += 1

    def _admit(
        self,
        sequence: Sequence,
        computing: set[bytes | None],
        budget: StepBudget,
        schedule: Schedule,
    ) -> None:
        self._match_prefix(sequence)
        key = sequence.next_page_key
        if key is not None and key in computing:
            self._release(sequence)
        elif not self._has_room(sequence):
            self._release(sequence)
            self._close(sequence)
            message = (
                f"needs {_num_pages(len(sequence.tokens))} KV pages of {PAGE_TOKENS} tokens, "
                "more than there are beside its adapter and those that are pinned"
            )
            self._lack_memory(sequence, schedule, ErrorCode.PROMPT_TOO_LONG, message)
        elif not self._make_row(sequence, schedule):
            self._release(sequence)
            self._is_closed = True
        else:
            self._start(sequence, budget, schedule)
            computing.add(sequence.next_page_key)

    def _lack_memory(
        self, sequence: Sequence, schedule: Schedule, code: ErrorCode, message: str
    ) -> None:
        """It finds too little. If nothing of ours will come free, others' memory may; if nobody
        else has any, it fails."""
        if self.running or self._in_flight or self._pool.is_loading or self._pool.is_leased:
            return
        if sequence.adapter is not None and self._pool.lay_anew(sequence.adapter):
            # No other sequence begins in this step: the pool refuses until the next one.
            self._is_closed = True
            return
        self.is_short = self._kv.has_neighbours
        if not self.is_short:
            self._fail(sequence, schedule, code, message)

    def _acquire_adapter(self, sequence: Sequence, now: float, schedule: Schedule) -> bool:
        ref = sequence.adapter
        if ref is None:
            return self._turns.may_start(sequence, None)
        if ref.digest in self._asked or not self._turns.may_start(sequence, ref.digest):
            return False
        is_here = self._pool.is_here(ref)
        if not is_here and (len(self._asked) >= MAX_ASKED or not self._turns.may_load(ref.digest)):
            return False
        try:
            sequence.lease = self._pool.acquire(ref, sequence.block_table.tenant)
        except AdapterUnavailable as error:
            self._fail(sequence, schedule, ErrorCode.ADAPTER_UNAVAILABLE, str(error))
            return False
        if sequence.lease is None:
            self._asked.add(ref.digest)
            if self._pool.is_short(ref):
                self._turns.note_short(sequence, ref.digest, now)
            if self._pool.num_lacking(ref):
                message = "there is no room for it beside the adapters that are pinned"
                self._lack_memory(sequence, schedule, ErrorCode.ADAPTER_UNAVAILABLE, message)
            return False
        self._turns.note_served(ref.digest)
        if sequence.lease.num_loaded_bytes:
            self._charge_load(sequence, sequence.lease.num_loaded_bytes)
        return True

    def _charge_load(self, sequence: Sequence, num_bytes: int) -> None:
        """As many tokens as could be prefilled while the bytes are copied."""
        seconds_per_token = self._kv.page_cost_s / PAGE_TOKENS
        self._queue.charge(sequence, PREFILL_COST * copy_s(num_bytes) / seconds_per_token)

    def _cancel_load(self, sequence: Sequence) -> None:
        """Unless others wait for the same adapter."""
        adapter = sequence.adapter
        if adapter is not None and not self._turns.is_awaited(adapter.digest):
            self._pool.cancel(adapter)

    def _match_prefix(self, sequence: Sequence) -> None:
        if sequence.params.prompt_logprobs is None:
            num_matchable = len(sequence.tokens) - 1
            sequence.num_computed = sequence.block_table.match_prefix(
                sequence.page_keys, num_matchable
            )

    def _has_room(self, sequence: Sequence) -> bool:
        """Pages for all its tokens are obtainable, beside those that begun prompts still need: none
        need stop half way."""
        table = sequence.block_table
        num_own, num_beside = _num_missing(sequence), 0
        for begun in self.running:
            if begun.is_pending and begun.request.tenant == sequence.request.tenant:
                num_own += _num_missing(begun)
            elif begun.is_pending:
                num_beside += _num_missing(begun)
        return self._kv.make_room(
            num_own, table.tenant, num_beside=num_beside, is_first=table.is_first
        )

    def _start(self, sequence: Sequence, budget: StepBudget, schedule: Schedule) -> None:
        num_tokens = self._num_next(sequence, budget)
        if not sequence.block_table.grow(sequence.num_computed + num_tokens):
            raise AssertionError("pages counted as obtainable were not")
        if not sequence.num_reached or sequence.num_computed > sequence.num_reached:
            # Below that it may have found what was computed for it.
            sequence.num_cached = min(sequence.num_computed, sequence.num_prompt)
        if not sequence.num_charged:
            self.num_queried_tokens += len(sequence.tokens)
            self.num_hit_tokens += sequence.num_computed
        if sequence.num_computed > sequence.num_charged:
            num_cached = sequence.num_computed - sequence.num_charged
            self._queue.charge(sequence, CACHED_COST * num_cached)
        sequence.slot = self._slots.allocate(sequence.tokens)
        sequence.status = SequenceStatus.RUNNING
        self.running.append(sequence)
        self._queue.start(sequence)
        self._turns.note_not_waiting(sequence)
        self._num_drained += 1
        self._num_drained_tokens += len(sequence.tokens)
        self._take(sequence, num_tokens, budget, schedule)

    def _release(self, sequence: Sequence) -> None:
        """Gives back pages, adapter and row; the sequence could start anew."""
        sequence.block_table.free()
        sequence.num_computed = 0
        if sequence.lease is not None:
            sequence.lease.release()
            sequence.lease = None
        if sequence.slot is not None:
            self._slots.free(sequence.slot)
            sequence.slot = None

    def _fail(self, sequence: Sequence, schedule: Schedule, code: ErrorCode, message: str) -> None:
        self._queue.remove(sequence, is_waiting=True)
        self._turns.note_not_waiting(sequence)
        sequence.status = SequenceStatus.FINISHED
        schedule.failed.append((sequence, code, message))


def _num_pages(num_tokens: int) -> int:
    return -(-num_tokens // PAGE_TOKENS)


def _num_missing(sequence: Sequence) -> int:
    """Pages for its tokens; it may have one more, for the token that a step in flight draws."""
    return max(_num_pages(len(sequence.tokens)) - len(sequence.block_table.pages), 0)
