"""Which sequences run in the next step, and with how many tokens.

The order comes from `Sequence.policy_key`; what fits is decided here and nowhere else: token budget, sequence
rows, KV pages and adapter leases. No tensors.
"""

from __future__ import annotations

from bisect import insort
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from adapters.errors import AdapterUnavailable
from adapters.pool import AdapterPool
from memory.block_table import BlockTable
from memory.kv_cache import KVCache
from memory.page_key import PageHasher
from ops.base import PAGE_TOKENS
from workers.protocol import ErrorCode
from workers.sequence import Sequence, SequenceStatus


@dataclass(slots=True)
class ScheduledSequence:
    """`num_tokens` rows of a sequence, from its `num_computed` on."""

    sequence: Sequence
    num_tokens: int

    @property
    def slot(self) -> int:
        """Adapter slot, -1 for base only."""
        lease = self.sequence.lease
        return -1 if lease is None else lease.slot

    @property
    def is_sampled(self) -> bool:
        """The rows reach the sequence's last token, so the next one is drawn."""
        sequence = self.sequence
        reaches_end = sequence.num_computed + self.num_tokens == len(sequence.tokens)
        return reaches_end and sequence.params.max_tokens > 0


@dataclass(slots=True)
class Schedule:
    """items: neighbours share an adapter slot; base-only sequences last. failed: dropped, with the reason."""

    items: list[ScheduledSequence] = field(default_factory=list)
    failed: list[tuple[Sequence, ErrorCode, str]] = field(default_factory=list)
    num_preempted: int = 0

    @property
    def sampled(self) -> list[ScheduledSequence]:
        return [item for item in self.items if item.is_sampled]

    @property
    def last_rows(self) -> list[int]:
        """The batch row of each sampled sequence's last token."""
        rows: list[int] = []
        end = 0
        for item in self.items:
            end += item.num_tokens
            if item.is_sampled:
                rows.append(end - 1)
        return rows

    @property
    def num_tokens(self) -> int:
        return sum(item.num_tokens for item in self.items)


class Scheduler:
    """Continuous batching with chunked prefill, prefix reuse and preemption by recompute."""

    def __init__(
        self,
        kv: KVCache,
        pool: AdapterPool,
        *,
        page_hasher: Callable[[Sequence], PageHasher],
        allocate_row: Callable[[list[int]], int],
        free_row: Callable[[int], None],
        max_num_seqs: int,
        max_batched_tokens: int,
        clock: Callable[[], float],
    ) -> None:
        self._kv = kv
        self._pool = pool
        self._page_hasher = page_hasher
        self._allocate_row = allocate_row
        self._free_row = free_row
        self._max_num_seqs = max_num_seqs
        self._max_batched_tokens = max_batched_tokens
        self._clock = clock
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []
        self.num_preemptions = 0
        self.num_queried_tokens = 0
        self.num_hit_tokens = 0

    @property
    def has_work(self) -> bool:
        return bool(self.running or self.waiting)

    def add(self, sequence: Sequence) -> None:
        """Queues it; its adapter starts to load at once."""
        if sequence.adapter is not None:
            self._pool.prefetch(sequence.adapter)
        self._enqueue(sequence)

    def remove(self, sequence: Sequence) -> None:
        """Frees all it holds, whatever it was doing."""
        if sequence.status is SequenceStatus.RUNNING:
            self.running.remove(sequence)
            self._release(sequence)
        elif sequence.status is SequenceStatus.WAITING:
            self.waiting.remove(sequence)
            if sequence.adapter is not None:
                self._pool.cancel(sequence.adapter)
        sequence.status = SequenceStatus.FINISHED

    def schedule(self) -> Schedule:
        """The next step: running sequences first (decode before prefill), then as many waiting ones as fit."""
        schedule = Schedule()
        budget = self._max_batched_tokens
        for sequence in sorted(self.running, key=lambda s: (s.is_prefilling, s.policy_key)):
            if sequence.status is SequenceStatus.RUNNING and budget > 0:
                budget -= self._continue(sequence, budget, schedule)
        if not schedule.num_preempted:
            self._admit(budget, schedule)
        schedule.items = [i for i in schedule.items if i.sequence.status is SequenceStatus.RUNNING]
        schedule.items.sort(key=lambda item: (item.slot < 0, item.slot))
        return schedule

    def update(self, schedule: Schedule) -> None:
        """The step was computed: its full pages may now be shared."""
        for item in schedule.items:
            item.sequence.num_computed += item.num_tokens
            assert item.sequence.block_table is not None
            item.sequence.block_table.commit(item.sequence.tokens, item.sequence.num_computed)

    def _continue(self, sequence: Sequence, budget: int, schedule: Schedule) -> int:
        num_tokens = min(sequence.num_uncomputed, budget)
        assert sequence.block_table is not None
        while not sequence.block_table.grow(sequence.num_computed + num_tokens):
            victim = max(self.running, key=lambda s: s.policy_key)
            self._preempt(victim, schedule)
            if victim is sequence:
                return 0
        schedule.items.append(ScheduledSequence(sequence, num_tokens))
        return num_tokens

    def _admit(self, budget: int, schedule: Schedule) -> None:
        """Waiting sequences in order; those whose adapter is on its way are passed over, the first that
        lacks memory ends the search."""
        computing = {s.block_table.next_key for s in self.running if s.block_table is not None}
        for sequence in list(self.waiting):
            if budget <= 0 or len(self.running) >= self._max_num_seqs:
                return
            try:
                lease = None if sequence.adapter is None else self._pool.acquire(sequence.adapter)
            except AdapterUnavailable as error:
                self._fail(sequence, schedule, ErrorCode.ADAPTER_UNAVAILABLE, str(error))
                continue
            if sequence.adapter is not None and lease is None:
                continue
            sequence.lease = lease
            outcome = self._try_start(sequence, budget, computing)
            if outcome is None:
                self._drop_lease(sequence)
                if not self.running and not schedule.items:
                    self._fail_unplaceable(sequence, schedule)
                return
            if outcome == 0:
                self._drop_lease(sequence)
                continue
            schedule.items.append(ScheduledSequence(sequence, outcome))
            budget -= outcome
