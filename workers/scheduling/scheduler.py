"""Scheduler that decides which sequences run in the next step, and with how many tokens.

A `SchedulingPolicy` orders the sequences. The scheduler decides whether they fit: each needs a
sequence slot, KV pages, and a lease of its adapter. This module uses no tensors. What the device
has to know before a step is ordered with commands (`ops.commands`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator

import numpy as np

from adapters.pool.source import (
    AdapterLease,
    AdapterSource,
    AdapterTurn,
    AdapterUnavailable,
    AdapterUse,
    Charge,
    Loading,
)
from adapters.reference import AdapterRef
from memory.accounts import Tenant
from memory.kv_cache import KVCache
from memory.page_key import PAGE_TOKENS, pages_of
from memory.prefix_cache import Image
from ops.commands import PendingCommands, WriteTokens
from workers.scheduling.policy import UNCHARGED, SchedulingPolicy
from workers.scheduling.schedule import Blocked, BlockReason, Failure, Schedule, ScheduledSequence
from workers.scheduling.sequence import Sequence, SequenceStatus
from workers.wire.protocol import ErrorCode, ServiceClass

LATER = Blocked(BlockReason.ADAPTER)
"""Decision that a sequence waits for its adapter, its constraint or a page of its prefix. It costs
little and does not count as a block, so that any number of such sequences hides no others."""


class Scheduler:
    """Continuous batching with chunked prefill, prefix reuse and preemption by recomputation.

    A step has the next tokens of each sequence that generates, and as many prompt tokens as the
    policy's budget permits.

    A step may be scheduled while the previous one is in flight. Each sequence is then assumed to
    continue, and `update` discards the tokens of sequences that ended. Pages, slots and leases that
    a step in flight uses are kept until its `update`. Until then no sequence can be preempted, so a
    sequence that lacks pages is left out of the new step, and `Schedule.needs_drain` is set.
    """

    def __init__(
        self,
        kv: KVCache,
        adapters: AdapterSource,
        commands: PendingCommands,
        policy: SchedulingPolicy,
        *,
        max_num_seqs: int,
        max_batched_tokens: int,
    ) -> None:
        """max_batched_tokens: maximum number of tokens in a step, which the policy also knows."""
        self.kv = kv
        self.commands = commands
        self.policy = policy
        self.max_num_seqs = max_num_seqs
        self.max_batched_tokens = max_batched_tokens
        self.waiting: dict[Sequence, None] = {}
        """Waiting sequences, the one that has waited longest first."""
        self.running: list[Sequence] = []
        self.leaving: list[Sequence] = []
        """Ended sequences whose tokens a step in flight still computes."""
        self.short: Sequence | None = None
        """First waiting sequence that lacks memory shared with other models, at the last step."""
        self.num_preemptions = 0
        self.num_queried_tokens = 0
        self.num_hit_tokens = 0
        self._adapters = adapters
        self._is_idle = True
        """Whether the last `schedule` left no step in flight, or the engine is suspended."""
        self._counted_s = 0.0
        """End of the last step, or the time when the first step after idleness was scheduled."""
        self._num_waiting_for = Counter[str]()
        """Number of waiting sequences of each adapter, by digest."""
        self._may_start_base = True
        """Whether sequences without an adapter may start in the current step."""
        self._free_slots = list(reversed(range(max_num_seqs)))
        """Free slots of the token buffer, of which each running sequence has one."""
        self._now = 0.0
        """Time at which the current step is scheduled."""
        self._in_flight: list[Schedule] = []
        """Schedules of the steps in flight, the oldest first."""

    @property
    def has_work(self) -> bool:
        return bool(self.running or self._in_flight or self.waiting)

    @property
    def num_waiting_tokens(self) -> int:
        """Prompt tokens that are neither computed nor known to be cached."""
        num_begun = sum(s.num_uncomputed for s in self.running if s.is_prefilling)
        return self.policy.status.num_tokens + num_begun

    @property
    def first_waiting(self) -> Sequence | None:
        """Waiting sequence that is `short`, or else the one that has waited longest, if any."""
        return self.short if self.short in self.waiting else next(iter(self.waiting), None)

    def load_adapter(self, ref: AdapterRef | None, tenant: Tenant, num_ahead: int = 0) -> None:
        """Starts to load the adapter of a sequence that will be added soon, if a slot will be free
        for that sequence. num_ahead: number of sequences that will be added before it."""
        if ref is not None and len(self.waiting) + num_ahead < len(self._free_slots):
            self._adapters.load(ref, tenant)

    def add(self, sequence: Sequence) -> None:
        """Queues the sequence. Its adapter starts to load to the host at once."""
        if sequence.adapter is not None:
            self._adapters.prefetch(sequence.adapter, sequence.block_table.tenant)
        self.policy.add(sequence)
        self._count_waiting(sequence, 1)

    def remove(self, sequence: Sequence) -> None:
        """Ends the sequence, in any state, and frees its resources. Resources that a step in flight
        uses are freed when that step ends."""
        if sequence.is_finished:
            return
        sequence.constraint.close()
        self.policy.remove(sequence)
        if sequence.status is SequenceStatus.RUNNING:
            self.running.remove(sequence)
            if sequence.num_inflight_steps:
                self.leaving.append(sequence)
            else:
                self._release(sequence)
        elif self._count_waiting(sequence, -1) == 0 and sequence.adapter is not None:
            self._adapters.cancel(sequence.adapter)
        sequence.status = SequenceStatus.FINISHED

    def suspend(self, now: float) -> None:
        """Preempts all running sequences, which keep their tokens. No step may be in flight."""
        self._now, self._is_idle = now, True
        for sequence in list(self.running):
            self._put_back(sequence)

    def schedule(self, now: float, *, is_held: bool = False) -> Schedule:
        """Returns the next step: the next tokens of each generating sequence, then tokens of
        started and newly admitted prompts in turn. is_held: if True, no sequence is admitted."""
        self._now, self.short = now, None
        if self._is_idle:
            self._counted_s = now
        self._may_start_base = self._adapters.begin_step(self._uses())
        schedule = Schedule(now=now, in_flight=tuple(self._in_flight), is_held=is_held)
        self._decode(schedule)
        self._prefill(schedule)
        schedule.items.sort(key=lambda item: (item.adapter_slot < 0, item.adapter_slot))
        for item in schedule.items:
            sequence = item.sequence
            sequence.num_computed = item.end
            sequence.num_inflight_steps += 1
            sequence.num_inflight_tokens += item.is_sampled
        if schedule.items:
            self._in_flight.append(schedule)
        schedule.in_flight = ()
        self._is_idle = not self._in_flight
        return schedule

    def record_duration(self, schedule: Schedule, seconds: float, ended_s: float) -> None:
        """Records the device time of a step that ended at `ended_s`. Called before `update`."""
        num_tokens, num_attended = schedule.num_tokens, schedule.num_attended
        if 2 * schedule.num_prefill_tokens > num_tokens:
            self.kv.idle.token_s.add(seconds, num_tokens)
        if any(item.sequence.connection >= 0 for item in schedule.items):
            # A step of the warm-up may compile kernels.
            self.policy.record_step(num_tokens, num_attended, seconds, ended_s - self._counted_s)
        self._counted_s = ended_s

    def write_tokens(self, sequence: Sequence, num_tokens: int) -> None:
        """Makes the next step write the last `num_tokens` tokens, which the device did not draw."""
        if sequence.slot is not None and num_tokens:
            position = len(sequence.tokens) - num_tokens
            tokens = np.array(sequence.tokens[position:], np.int32)
            self.commands.tokens.append(WriteTokens(sequence.slot, position, tokens))

    def update(self, schedule: Schedule, num_new: list[int | None]) -> None:
        """Charges the computed tokens, and puts full pages into the prefix cache. Frees the
        resources of sequences that ended while the step was in flight.

        num_new: number of tokens that the step drew for each sequence of the schedule, None if the
        step failed for it. If a sampled sequence got 0, its last token is computed again.
        """
        self._in_flight.remove(schedule)
        for item, num_tokens in zip(schedule.items, num_new, strict=True):
            sequence = item.sequence
            sequence.num_inflight_steps -= 1
            sequence.num_inflight_tokens -= item.is_sampled
            if num_tokens is not None and not sequence.is_finished:
                self._complete(item, num_tokens)
            elif sequence.is_finished and not sequence.num_inflight_steps:
                self.leaving.remove(sequence)
                self._release(sequence)

    def _decode(self, schedule: Schedule) -> None:
        """Schedules the uncomputed tokens of generating sequences, usually one token of each.
        Sequences whose constraint is not ready are left out."""
        for sequence in list(self.running):
            constraint = sequence.constraint
            if not constraint.is_ready:
                continue
            if constraint.failure is not None:
                message = f"the grammar cannot be followed any further: {constraint.failure}"
                self._fail(sequence, (ErrorCode.INVALID, message), schedule)
                continue
            is_on = sequence.status is SequenceStatus.RUNNING and sequence.is_generating
            num_tokens = sequence.num_uncomputed
            if is_on and self._grow(sequence, num_tokens, schedule):
                schedule.items.append(ScheduledSequence(sequence, num_tokens))

    def _prefill(self, schedule: Schedule) -> None:
        """Schedules prompt tokens in the policy's order, up to the step's budget."""
        begun = [sequence for sequence in self.running if sequence.is_pending]
        if begun or self.waiting:
            schedule.computing = {s.page_key(s.block_table.num_committed): s for s in begun}
            schedule.lists_all = any(s.request.params.lists_vocabulary for s in self.running)
        schedule.num_free_slots = len(self._free_slots)
        for sequence in self.policy.in_turn(schedule):
            if not sequence.is_waiting:
                self._continue(sequence, schedule, self.policy.room(sequence))
            elif (blocked := self._admit(sequence, schedule)) and blocked is not LATER:
                self.policy.block(sequence, blocked.reason)
                if blocked.failure is not None:
                    self._fail(sequence, blocked.failure, schedule)

    def _continue(self, sequence: Sequence, schedule: Schedule, room: int) -> None:
        """Schedules the next chunk of a started prompt, at most `room` tokens, unless the step has
        a chunk of it already or the rest of the prompt is in flight."""
        is_scheduled = any(item.sequence is sequence for item in schedule.items)
        if is_scheduled or sequence.num_computed >= len(sequence.tokens):
            return
        if not room:
            self.policy.block(sequence, BlockReason.BUDGET)
            return
        num_tokens = sequence.num_next(room)
        if self._grow(sequence, num_tokens, schedule):
            schedule.items.append(ScheduledSequence(sequence, num_tokens))
            self.policy.charge(sequence, sequence.num_computed + num_tokens)

    def _admit(self, sequence: Sequence, schedule: Schedule) -> Blocked | None:
        """Starts a sequence if it fits in the step, else releases it and returns what it lacks."""
        constraint = sequence.constraint
        if not constraint.is_ready:
            return LATER
        if constraint.failure is not None:
            return Blocked(BlockReason.CONSTRAINT, (ErrorCode.INVALID, constraint.failure))
        if not self.policy.room(sequence):
            return Blocked(BlockReason.BUDGET)
        if schedule.lists_all and sequence.request.params.lists_vocabulary:
            return LATER  # because each of them keeps the host busy in each step
        if self._awaits_page(sequence, schedule):
            return LATER
        if self.policy.victim(sequence, len(self._free_slots)) is sequence:
            return Blocked(BlockReason.SLOT)
        blocked = (
            self._lease(sequence)
            or self._find_pages(sequence, schedule)
            or self._find_slot(sequence, schedule)
        )
        if blocked is None:
            self._start(sequence, schedule)
            return None
        if blocked is not LATER:
            self._release(sequence)
        return self._lack_memory(sequence, blocked) if blocked.lacks_memory else blocked

    def _uses(self) -> Iterator[AdapterUse]:
        for sequence in self.running:
            num_left = sequence.max_len - len(sequence.tokens)
            yield AdapterUse(_digest(sequence), self.policy.account(sequence), num_left)
        for sequence in self.leaving:
            yield AdapterUse(_digest(sequence), UNCHARGED, 0)

    def _count_waiting(self, sequence: Sequence, change: int) -> int:
        """Adds the sequence to the waiting ones, or removes it. Returns the number of waiting
        sequences of its adapter."""
        if change > 0:
            self.waiting[sequence] = None
        else:
            del self.waiting[sequence]
        if sequence.adapter is None:
            return 0
        digest = sequence.adapter.digest
        self._num_waiting_for[digest] += change
        return self._num_waiting_for[digest] or self._num_waiting_for.pop(digest)

    def _lease(self, sequence: Sequence) -> Blocked | None:
        """Leases the sequence's adapter. Returns why there is no lease, or None if the sequence has
        its lease or no adapter."""
        if sequence.adapter is None:
            return None if self._may_start_base else LATER
        tenant, account = sequence.block_table.tenant, self.policy.account(sequence)
        turn = AdapterTurn(tenant, account, sequence.terms.ttft_s)
        try:
            answer = self._adapters.acquire(sequence.adapter, turn)
        except AdapterUnavailable as error:
            return Blocked(BlockReason.ADAPTER, (ErrorCode.ADAPTER_UNAVAILABLE, str(error)))
        if isinstance(answer, AdapterLease):
            sequence.lease = answer
            return None
        if isinstance(answer, Loading) or not answer.num_bytes:
            return LATER
        message = "there is no room for it beside the adapters that are pinned"
        failure = ErrorCode.ADAPTER_UNAVAILABLE, message
        return Blocked(BlockReason.ADAPTER, failure, lacks_memory=True)

    def _fail(self, sequence: Sequence, failure: Failure, schedule: Schedule) -> None:
        self.remove(sequence)
        schedule.failed.append((sequence, *failure))

    def _grow(self, sequence: Sequence, num_tokens: int, schedule: Schedule) -> bool:
        """Allocates pages for the sequence's next tokens, preempting sequences while memory is
        short. Returns False if the sequence was preempted, or must wait for a step in flight."""
        while not sequence.block_table.grow(sequence.num_computed + num_tokens):
            schedule.lacks_pages = True
            self.policy.block(sequence, BlockReason.PAGES)
            if self._in_flight:
                schedule.needs_drain = True
                return False
            others = (s for s in self.running if sequence.block_table.may_displace(s.block_table))
            victim = self._last_in_turn(others)
            self._preempt(victim, schedule)
            if victim is sequence:
                return False
        return True

    def _last_in_turn(self, sequences: Iterable[Sequence]) -> Sequence:
        """Returns the sequence to preempt when memory is short: a `batch` sequence if there is one,
        of several one of the account that was charged most, there the newest."""

        def key(sequence: Sequence) -> tuple[bool, Charge, float]:
            is_batch = sequence.request.service_class is ServiceClass.BATCH
            return is_batch, self.policy.account(sequence).charge, sequence.times.arrival_s

        return max(sequences, key=key)

    def _find_pages(self, sequence: Sequence, schedule: Schedule) -> Blocked | None:
        """Acquires cached pages of the sequence's prefix. Makes room for all its tokens and for the
        rest of all started prompts, so that no prompt stops half way."""
        table = sequence.block_table
        if sequence.adapter is not None and sequence.lease is not None:
            first_page = sequence.request.activation // PAGE_TOKENS
            table.use_image(Image(sequence.adapter.digest, sequence.lease.checksum, first_page))
        if sequence.may_skip_cached:
            sequence.num_computed = num_found = sequence.num_found()
            sequence.awaited_key = sequence.page_key(num_found // PAGE_TOKENS)
            if self._awaits_page(sequence, schedule):
                return Blocked(BlockReason.PREFIX)
            table.match_prefix(sequence.page_keys(num_found // PAGE_TOKENS))
        num_own, num_beside = _num_missing(sequence), 0
        for begun in self.running:
            if begun.is_pending and begun.request.tenant == sequence.request.tenant:
                num_own += _num_missing(begun)
            elif begun.is_pending:
                num_beside += _num_missing(begun)
        if table.make_room(num_own, num_beside=num_beside):
            return None
        message = (
            f"needs {pages_of(len(sequence.tokens))} KV pages of {PAGE_TOKENS} tokens, "
            "more than there are beside its adapter and those that are pinned"
        )
        return Blocked(BlockReason.PAGES, (ErrorCode.PROMPT_TOO_LONG, message), lacks_memory=True)

    def _awaits_page(self, sequence: Sequence, schedule: Schedule) -> bool:
        """Whether a started prompt computes the page that the sequence awaits. If so, lets this
        prompt use the sequence's turn, because its tenant or class may have a smaller share."""
        begun = sequence.awaited_key and schedule.computing.get(sequence.awaited_key)
        if begun:
            self._continue(begun, schedule, self.policy.room(sequence))
        return bool(begun)

    def _find_slot(self, sequence: Sequence, schedule: Schedule) -> Blocked | None:
        """Returns None if a slot is free, or if one becomes free by preempting a sequence of an
        over-share tenant. While a step is in flight, no sequence can be preempted."""
        if self._free_slots:
            return None
        if self._in_flight:
            schedule.needs_drain = True
        elif (victim := self.policy.victim(sequence, 0)) not in (None, sequence):
            self._preempt(victim, schedule)
            return None
        return Blocked(BlockReason.SLOT)

    def _lack_memory(self, sequence: Sequence, blocked: Blocked) -> Blocked:
        """Decides about a sequence that lacks memory. The sequence fails only if this model will
        free no memory, no idle adapter can be evicted, and no other model shares the memory."""
        if self.running or self._in_flight or self._adapters.is_busy:
            return Blocked(blocked.reason)
        if sequence.adapter is not None and self._adapters.evict_all_idle(sequence.adapter):
            # The adapter can be requested again in the next step.
            return Blocked(BlockReason.MODEL)
        if not self.kv.is_shared:
            return blocked
        self.short = self.short or sequence
        return Blocked(blocked.reason)

    def _start(self, sequence: Sequence, schedule: Schedule) -> None:
        num_tokens = sequence.num_next(self.policy.room(sequence))
        if not sequence.block_table.grow(sequence.num_computed + num_tokens):
            raise AssertionError("pages counted as obtainable were not")
        if not sequence.num_reached or sequence.num_computed > sequence.num_reached:
            # Cached positions up to `num_reached` may have been computed by this sequence itself.
            sequence.num_cached = min(sequence.num_computed, sequence.num_prompt)
        times, lease = sequence.times, sequence.lease
        if times.started_s is None:
            self.num_queried_tokens += len(sequence.tokens)
            self.num_hit_tokens += sequence.num_computed
            times.started_s = self._now
            times.adapter_load = lease and lease.load_since(times.arrival_s)
        sequence.slot = self._free_slots.pop()
        self.write_tokens(sequence, len(sequence.tokens))
        sequence.status = SequenceStatus.RUNNING
        self.running.append(sequence)
        schedule.lists_all |= sequence.request.params.lists_vocabulary
        self.policy.start(sequence)
        self._count_waiting(sequence, -1)
        schedule.computing[sequence.page_key(sequence.block_table.num_committed)] = sequence
        schedule.items.append(ScheduledSequence(sequence, num_tokens))
        self.policy.charge(sequence, sequence.num_computed + num_tokens)

    def _complete(self, item: ScheduledSequence, num_new: int) -> None:
        """Charges computed tokens, and puts the sequence's full pages into the prefix cache. Once
        all its tokens are computed, removes it from the policy's queue."""
        sequence, num_computed = item.sequence, item.end
        if item.is_sampled and not num_new:
            num_computed = sequence.num_computed = item.end - 1
        if item.is_prefill:
            num_prompt = min(item.end, sequence.num_prompt)
            sequence.num_reached = max(sequence.num_reached, num_prompt)
        sequence.num_finished = num_computed
        self.policy.charge(sequence, item.end + max(num_new - 1, 0))
        num_full = num_computed // PAGE_TOKENS
        if num_full > sequence.block_table.num_committed:
            sequence.block_table.commit(sequence.page_keys(num_full))

    def _preempt(self, victim: Sequence, schedule: Schedule) -> None:
        self._put_back(victim)
        schedule.items = [item for item in schedule.items if item.sequence is not victim]
        schedule.computing = {k: s for k, s in schedule.computing.items() if s is not victim}
        schedule.num_preempted += 1

    def _put_back(self, sequence: Sequence) -> None:
        """Makes a running sequence wait again. The sequence keeps its tokens."""
        self.running.remove(sequence)
        self._release(sequence)
        sequence.status = SequenceStatus.WAITING
        sequence.num_queued = len(sequence.tokens)
        self.policy.add(sequence)
        self._count_waiting(sequence, 1)
        sequence.times.record_preemption(self._now)
        self.num_preemptions += 1

    def _release(self, sequence: Sequence) -> None:
        """Releases the sequence's pages, adapter lease and slot, so that it can start again."""
        sequence.block_table.free()
        sequence.num_computed = sequence.num_finished = 0
        if sequence.lease is not None:
            sequence.lease.release()
            sequence.lease = None
        if sequence.slot is not None:
            self._free_slots.append(sequence.slot)
            sequence.slot = None


def _num_missing(sequence: Sequence) -> int:
    """Returns the number of pages that the sequence's tokens still need. Returns 0 even if the
    sequence has one page more, for the token that a step in flight draws."""
    return max(pages_of(len(sequence.tokens)) - len(sequence.block_table.pages), 0)


def _digest(sequence: Sequence) -> str | None:
    return None if sequence.adapter is None else sequence.adapter.digest
