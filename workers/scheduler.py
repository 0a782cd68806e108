"""Which sequences run in the next step, and with how many tokens.

The order comes from `Sequence.policy_key`; what fits is decided here and nowhere else: token
budget, sequence rows, KV pages and adapter leases. No tensors.
"""

from __future__ import annotations

from bisect import insort
from typing import TYPE_CHECKING, Protocol

from adapters.errors import AdapterUnavailable
from memory.kv_cache import KVCache
from memory.page_key import PAGE_TOKENS
from workers.protocol import ErrorCode
from workers.sequence import Sequence, SequenceStatus
from workers.step import Schedule, ScheduledSequence

if TYPE_CHECKING:
    from adapters.pool import AdapterPool


class RowAllocator(Protocol):
    """Rows of the device's token buffer, one for each running sequence."""

    def allocate(self, tokens: list[int]) -> int: ...

    def free(self, row: int) -> None: ...


class Scheduler:
    """Continuous batching with chunked prefill, prefix reuse and preemption by recompute."""

    def __init__(
        self,
        kv: KVCache,
        pool: AdapterPool,
        rows: RowAllocator,
        *,
        max_num_seqs: int,
        max_batched_tokens: int,
    ) -> None:
        self._kv = kv
        self._pool = pool
        self._rows = rows
        self._max_num_seqs = max_num_seqs
        self._max_batched_tokens = max_batched_tokens
        self.waiting: list[Sequence] = []
        """In policy order."""
        self.running: list[Sequence] = []
        self.num_preemptions = 0
        self.num_queried_tokens = 0
        self.num_hit_tokens = 0
        self._max_pages = kv.num_total

    @property
    def has_work(self) -> bool:
        return bool(self.running or self.waiting)

    @property
    def has_free_row(self) -> bool:
        """One more sequence would not wait for another to end."""
        return len(self.running) + len(self.waiting) < self._max_num_seqs

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

    def add(self, sequence: Sequence) -> None:
        """Queues it; its adapter starts to load at once."""
        if sequence.adapter is not None:
            self._pool.prefetch(sequence.adapter)
        insort(self.waiting, sequence, key=_policy_key)

    def remove(self, sequence: Sequence) -> None:
        """Frees all it holds, whatever it was doing."""
        if sequence.status is SequenceStatus.RUNNING:
            self.running.remove(sequence)
            self._release(sequence)
        elif sequence.status is SequenceStatus.WAITING:
            self.waiting.remove(sequence)
            self._cancel_load(sequence)
        sequence.status = SequenceStatus.FINISHED

    def schedule(self) -> Schedule:
        """The next step: running sequences first, decode before prefill, then waiting ones as far
        as they fit."""
        schedule = Schedule()
        budget = self._max_batched_tokens
        for sequence in sorted(self.running, key=lambda s: (s.is_prefilling, s.policy_key)):
            if sequence.status is SequenceStatus.RUNNING and budget > 0:
                budget -= self._continue(sequence, budget, schedule)
        if schedule.num_preempted == 0:
            self._admit(budget, schedule)
        schedule.items.sort(key=lambda item: (item.slot < 0, item.slot))
        return schedule

    def update(self, schedule: Schedule) -> None:
        """The step was computed: full pages may now be shared."""
        for item in schedule.items:
            sequence = item.sequence
            sequence.num_computed += item.num_tokens
            num_full = sequence.num_computed // PAGE_TOKENS
            if num_full > sequence.block_table.num_committed:
                sequence.block_table.commit(sequence.page_keys[:num_full])

    def _continue(self, sequence: Sequence, budget: int, schedule: Schedule) -> int:
        """Gives a running sequence its rows, preempting the last in order while pages are short."""
        num_tokens = sequence.num_next(budget)
        while not sequence.block_table.grow(sequence.num_computed + num_tokens):
            victim = max(self.running, key=_policy_key)
            self._preempt(victim, schedule)
            if victim is sequence:
                return 0
        schedule.items.append(ScheduledSequence(sequence, num_tokens))
        return num_tokens

    def _preempt(self, victim: Sequence, schedule: Schedule) -> None:
        self.running.remove(victim)
        self._release(victim)
        victim.status = SequenceStatus.WAITING
        insort(self.waiting, victim, key=_policy_key)
        schedule.items = [item for item in schedule.items if item.sequence is not victim]
        schedule.num_preempted += 1
        self.num_preemptions += 1

    def _admit(self, budget: int, schedule: Schedule) -> None:
        """Starts waiting sequences in order. Passed over: those whose adapter is on its way, and
        those whose next page another sequence computes right now. The first that lacks pages ends
        the search."""
        computing = {sequence.next_page_key for sequence in self.running if sequence.is_prefilling}
        for sequence in list(self.waiting):
            if budget <= 0 or len(self.running) >= self._max_num_seqs:
                return
            if not self._acquire_adapter(sequence, schedule):
                continue
            self._match_prefix(sequence)
            key = sequence.next_page_key
            if key is not None and key in computing:
                self._release(sequence)
                continue
            if not self._has_room(sequence):
                self._release(sequence)
                is_alone = not (self.running or self._pool.is_loading or self._pool.is_leased)
                if is_alone:
                    self._fail(
                        sequence, schedule, ErrorCode.OVERLOADED, "KV memory is held elsewhere"
                    )
                return
            budget -= self._start(sequence, budget, schedule)
            computing.add(sequence.next_page_key)

    def _acquire_adapter(self, sequence: Sequence, schedule: Schedule) -> bool:
        if sequence.adapter is None:
            return True
        try:
            sequence.lease = self._pool.acquire(sequence.adapter)
        except AdapterUnavailable as error:
            self._fail(sequence, schedule, ErrorCode.ADAPTER_UNAVAILABLE, str(error))
        return sequence.lease is not None

    def _cancel_load(self, sequence: Sequence) -> None:
        """Unless others wait for the same adapter."""
        adapter = sequence.adapter
        if adapter is None:
            return
        others = (other.adapter for other in self.waiting)
        if not any(other is not None and other.digest == adapter.digest for other in others):
            self._pool.cancel(adapter)

    def _match_prefix(self, sequence: Sequence) -> None:
        if sequence.params.prompt_logprobs is None:
            num_matchable = len(sequence.tokens) - 1
            sequence.num_computed = sequence.block_table.match_prefix(
                sequence.page_keys, num_matchable
            )

    def _has_room(self, sequence: Sequence) -> bool:
        """Pages for all its tokens are obtainable: it need not stop half way through its
        prefill."""
        missing = _num_pages(len(sequence.tokens)) - len(sequence.block_table.pages)
        return self._kv.make_room(missing)

    def _start(self, sequence: Sequence, budget: int, schedule: Schedule) -> int:
        num_tokens = sequence.num_next(budget)
        if not sequence.block_table.grow(sequence.num_computed + num_tokens):
            raise AssertionError("pages counted as obtainable were not")
        if not sequence.is_begun:
            sequence.num_cached = min(sequence.num_computed, sequence.num_prompt)
            self.num_queried_tokens += len(sequence.tokens)
            self.num_hit_tokens += sequence.num_computed
        sequence.row = self._rows.allocate(sequence.tokens)
        sequence.status = SequenceStatus.RUNNING
        self.waiting.remove(sequence)
        self.running.append(sequence)
        schedule.items.append(ScheduledSequence(sequence, num_tokens))
        return num_tokens

    def _release(self, sequence: Sequence) -> None:
        """Gives back pages, adapter and row; the sequence could start anew."""
        sequence.block_table.free()
        sequence.num_computed = 0
        if sequence.lease is not None:
            sequence.lease.release()
            sequence.lease = None
        if sequence.row is not None:
            self._rows.free(sequence.row)
            sequence.row = None

    def _fail(self, sequence: Sequence, schedule: Schedule, code: ErrorCode, message: str) -> None:
        self.waiting.remove(sequence)
        sequence.status = SequenceStatus.FINISHED
        schedule.failed.append((sequence, code, message))


def _policy_key(sequence: Sequence) -> tuple[int, float]:
    return sequence.policy_key


def _num_pages(num_tokens: int) -> int:
    return -(-num_tokens // PAGE_TOKENS)
