"""Admission of waiting sequences by their adapters: decides which adapter is loaded, and on which
adapter no sequence starts, so that it can be evicted.

    no room --(patience ends)--> starving: its victim starts no sequences
            --(the victim's last sequence ends)--> loaded

An adapter that finds no room is skipped until its patience ends, which is the promised time to
first token (`Terms.ttft_s`). Then the adapter starves and gets a victim: the adapter in use whose
sequences end soonest. An adapter of a tenant that was charged less than the starving adapter's
tenant becomes a victim only if there is no other. No sequence starts on a victim. While there are
victims, only their starving adapters may load, and adapters of tenants that were charged less than
the starving adapters' tenants. So the longest wait of an adapter for room, while its tenant is
charged no more than others, is its patience plus, for each victim that it needs, the time until the
victim's last sequence ends. The adapter that has starved longest gets its victim first.

If no adapter is or can be a victim, the pages of running sequences fill the memory. Then only
sequences of adapters that lack room start, until enough running sequences have ended.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable

from adapters.errors import AdapterUnavailable
from adapters.pool.source import AdapterLease, AdapterRef, AdapterSource, Loading
from memory.accounts import Tenant
from workers.scheduling.policy import Charge
from workers.scheduling.schedule import Blocked, BlockReason
from workers.scheduling.sequence import Sequence
from workers.wire.protocol import ErrorCode

MAX_ASKED, MAX_ASKERS = 32, 128
"""Maximum number of adapters that are requested from the pool in one step while they are not on the
device, and maximum number including the first one of each further tenant. A request takes 15 us."""


LATER = Blocked(BlockReason.ADAPTER)
"""Decision that a sequence waits for its adapter, its constraint or a page of its prefix. It costs
little and does not count as a block, so that any number of such sequences hides no others."""
NO_MEMORY = Blocked(
    BlockReason.ADAPTER,
    (
        ErrorCode.ADAPTER_UNAVAILABLE,
        "there is no room for it beside the adapters that are pinned",
    ),
    lacks_memory=True,
)
"""Decision that a sequence waits, or fails if no memory can be freed, because the pool found no
room on the device for the sequence's adapter."""


class AdapterAdmission:
    """Acquires the adapters' leases for sequences, and chooses victims for starving adapters.
    Adapters are identified by digest."""

    def __init__(self, pool: AdapterSource, charged: Callable[[Sequence], Charge]) -> None:
        """charged: method `SchedulingPolicy.charged` of the scheduler's policy."""
        self._pool = pool
        self._charged = charged
        self._now = 0.0
        self._asked: set[str] = set()
        """Digests of the adapters that were requested in this step and are not on the device."""
        self._askers: set[str] = set()
        """Names of the tenants for which these adapters were requested."""
        self._starves_at_s: dict[str, float] = {}
        """Time at which each adapter that lacks room begins to starve, by digest."""
        self._victims: dict[str, str] = {}
        """Victim of each starving adapter. No sequence may start on a victim."""
        self._charged_least: Charge = (0.0, 0.0)
        """Lowest charge of the tenants whose starving adapters have victims."""
        self._lacks_pages = False
        """Whether running sequences must free pages, because a starving adapter lacks memory, no
        adapter can be its victim, and no other starving adapter has a victim."""
        self._waiting: defaultdict[str, dict[Sequence, None]] = defaultdict(dict)
        """Waiting sequences of each adapter, in the order of arrival."""

    def load(self, ref: AdapterRef, tenant: Tenant) -> None:
        """Starts to load the adapter to the device, unless starving adapters are loaded first."""
        if not self._victims and not self._lacks_pages:
            self._pool.load(ref, tenant)

    def prefetch(self, sequence: Sequence) -> None:
        """Starts to load the sequence's adapter to the host."""
        if sequence.adapter is not None:
            self._pool.prefetch(sequence.adapter, sequence.block_table.tenant)

    def cancel(self, sequence: Sequence) -> None:
        """Cancels the load of the sequence's adapter, unless other sequences wait for it."""
        adapter = sequence.adapter
        if adapter is not None and adapter.digest not in self._waiting:
            self._pool.cancel(adapter)

    def add_waiting(self, sequence: Sequence) -> None:
        if sequence.adapter is not None:
            self._waiting[sequence.adapter.digest][sequence] = None

    def remove_waiting(self, sequence: Sequence) -> None:
        if sequence.adapter is None:
            return
        digest = sequence.adapter.digest
        del self._waiting[digest][sequence]
        if not self._waiting[digest]:
            del self._waiting[digest]
            self._forget(digest)

    def begin_step(self, now: float, in_use: Iterable[Sequence]) -> None:
        """Chooses victims for adapters that have begun to starve, or that still lack room although
        their victim is no longer in use. in_use: sequences that may hold leases."""
        self._now = now
        self._asked.clear()
        self._askers.clear()
        self._lacks_pages = False
        starving = sorted(
            (due_s, digest) for digest, due_s in self._starves_at_s.items() if due_s <= now
        )
        if starving:
            self._choose_victims([digest for _, digest in starving], list(in_use))

    def acquire(self, sequence: Sequence) -> Blocked | None:
        """Leases the adapter if it is on the device, else starts to load it if it may be loaded.
        Returns why there is no lease, or None if the sequence has its lease or no adapter."""
        ref = sequence.adapter
        if ref is None:
            return None if self.may_start(None) else LATER
        digest = ref.digest
        if digest in self._asked or not self.may_start(digest):
            return LATER
        tenant = sequence.block_table.tenant
        may_ask = len(self._asked) < (MAX_ASKED if tenant.name in self._askers else MAX_ASKERS)
        may_load = may_ask and (self.may_load(digest) or self._goes_first(sequence))
        if not may_load and self._pool.missing_bytes(ref) != 0:
            return LATER
        try:
            # The newest step's requests are first, in the policy's order.
            answer = self._pool.acquire(ref, tenant, (-self._now, len(self._asked)))
        except AdapterUnavailable as error:
            return Blocked(BlockReason.ADAPTER, (ErrorCode.ADAPTER_UNAVAILABLE, str(error)))
        if isinstance(answer, AdapterLease):
            sequence.lease = answer
            self._forget(digest)
            return None
        self._asked.add(digest)
        self._askers.add(tenant.name)
        if isinstance(answer, Loading):
            return LATER
        due_s = self._now + sequence.terms.ttft_s
        self._starves_at_s[digest] = min(self._starves_at_s.get(digest, due_s), due_s)
        return NO_MEMORY if answer.num_bytes else LATER

    def may_load(self, digest: str) -> bool:
        """Whether the adapter may be loaded. While there are victims, only their starving adapters
        may be loaded. While sequences must free pages, only adapters that lack room may."""
        if self._lacks_pages:
            return digest in self._starves_at_s
        return not self._victims or digest in self._victims

    def may_start(self, digest: str | None) -> bool:
        """Whether a sequence with this adapter may start. digest: None for the base model alone."""
        if self._lacks_pages:
            return digest in self._starves_at_s
        return digest not in self._victims.values()

    def _goes_first(self, sequence: Sequence) -> bool:
        """Whether the sequence's adapter may be loaded although others starve, because its tenant
        was charged less than theirs."""
        return not self._lacks_pages and self._charged(sequence) < self._charged_least

    def _forget(self, digest: str) -> None:
        """Ends the adapter's starvation. Called when the adapter is leased, or when no sequence
        waits for it."""
        self._starves_at_s.pop(digest, None)
        self._victims.pop(digest, None)

    def _choose_victims(self, starving: list[str], running: list[Sequence]) -> None:
        in_use = self._in_use(running)
        self._victims = {
            digest: victim for digest, victim in self._victims.items() if victim in in_use
        }
        for digest in starving:
            if digest in self._victims or digest not in self._waiting:
                continue
            taken = {*self._victims, *self._victims.values()}
            first = next(iter(self._waiting[digest]))
            assert first.adapter is not None
            free = {
                other: use
                for other, use in in_use.items()
                if other not in taken and self._pool.may_displace(first.adapter, other)
            }
            if not free:
                must_wait = bool(running) and not self._victims
                self._lacks_pages |= must_wait and bool(self._pool.missing_bytes(first.adapter))
                continue
            charged = self._charged(first)
            self._victims[digest] = min(free, key=lambda d: (free[d][0] < charged, free[d][1], d))
        firsts = (next(iter(self._waiting[digest])) for digest in self._victims)
        self._charged_least = min(map(self._charged, firsts), default=(0.0, 0.0))

    def _in_use(self, running: Iterable[Sequence]) -> dict[str, tuple[Charge, int]]:
        """Returns, for each adapter in use, the smallest charge of the tenants that use it, and the
        largest number of tokens that one of its sequences may still generate."""
        used: dict[str, tuple[Charge, int]] = {}
        for sequence in running:
            if sequence.adapter is not None:
                charged = self._charged(sequence)
                left = sequence.max_len - len(sequence.tokens)
                if (other := used.get(sequence.adapter.digest)) is not None:
                    charged, left = min(charged, other[0]), max(left, other[1])
                used[sequence.adapter.digest] = charged, left
        return used
