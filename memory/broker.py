"""Eviction of idle pages and adapters when the arena is short: of the account that holds the most
for its weight, and there the ones that are cheapest to make again."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping
from threading import Lock
from typing import NamedTuple, Protocol

from memory.accounts import NO_TENANT, Ask, BytesHeld
from memory.allocations import AdapterAllocations, Allocation
from memory.arena import Arena
from memory.errors import require
from memory.pages import PagePool
from memory.places import NO_LIMIT, Idle, Loss, Span, cheapest_first, find_places

MARGIN = 2.0
"""Factor by which evicting the other kind (KV or adapters) must cost less than evicting the own.
Without it, two kinds of equal worth would take the same bytes from each other in turn."""
LOOK_HOLDS = 32
"""Number of page shortages for which one scan of the other holders is reused."""


class PageHolder(Protocol):
    """KV pages of one model that the broker may evict, implemented by `KVCache`."""

    pool: PagePool

    def num_evictable(self, ask: Ask) -> int:
        """Returns the number of idle pages that may be evicted for the request."""
        ...

    def evict(self, num_pages: int, ask: Ask | None = None, limit: Loss = NO_LIMIT) -> int:
        """Frees idle pages in the order of their loss, up to the limit. Returns their number."""
        ...

    def drainable(self) -> dict[int, Idle]:
        """Returns the extents that `drain` could free, with the cost of losing them."""
        ...

    def lost_with(self, extents: Iterable[int]) -> Idle:
        """Returns the cost of draining these extents together."""
        ...

    def drain(self, extent: int) -> None:
        """Returns a drainable extent to the arena."""
        ...


class AllocationHolder(Protocol):
    """Adapters of one model that the broker may evict."""

    def idle_runs(self, *, with_awaited: bool) -> Mapping[Allocation, Idle]:
        """Returns the allocations that are neither read nor filled. with_awaited: include those
        that a caller is about to lease."""
        ...

    def evict(self, run: Allocation) -> None:
        """Frees one of the idle allocations."""
        ...


class MemoryBroker:
    """Owner of the decision what to evict. Between accounts, it evicts by what they hold for their
    weight (see accounts.py). Within one account, between KV and adapters, it evicts by the cost of
    a loss: seconds to make the item again, times its expected reuse, per byte.

    A model evicts KV pages one by one for itself, and by the extent for others. Adapters are
    evicted one by one. The arena's floor and ceiling bound the trade. Memory in use is never
    evicted.
    """

    def __init__(self, arena: Arena, runs: AdapterAllocations | None = None) -> None:
        """runs: allocations of the adapters, if they share the arena."""
        self.lock = Lock()
        """Held while reading or changing the owners of the arena's bytes. The engine thread
        releases it while it computes a step, because the bytes of the step are in use and stay."""
        self._arena = arena
        self._runs = runs
        self._caches: dict[str, PageHolder] = {}
        self._holders: list[AllocationHolder] = []
        self._looks: dict[PageHolder, _Look] = {}

    def add_cache(self, owner: str, cache: PageHolder) -> None:
        self._caches[owner] = cache

    def add_holder(self, holder: AllocationHolder) -> None:
        self._holders.append(holder)

    @property
    def bytes_held(self) -> BytesHeld:
        return self._arena.bytes_held

    @property
    def num_caches(self) -> int:
        return len(self._caches)

    @property
    def num_holders(self) -> int:
        return len(self._holders)

    def free_pages(self, cache: PageHolder, num_pages: int, ask: Ask) -> bool:
        """Makes `num_pages` pages free in the cache's pool. Returns False if too few can be freed.
        Usually nothing is evicted then; a partial eviction is possible if others yield less than
        offered."""
        pool = cache.pool
        if num_pages <= pool.num_free or self._evict_own(cache, num_pages - pool.num_free, ask):
            return True
        idle = self._idle_runs(with_awaited=True)
        others = self._extents_for_pages(cache, idle, ask)
        num_own = cache.num_evictable(ask)
        if num_pages > pool.num_free + num_own + len(others) * pool.pages_per_extent:
            return False
        for loss, extent in self._by_loss(others, ask):
            loss_per_byte = Loss(loss.priority, loss.cost_s / self._arena.extent_bytes)
            cache.evict(num_pages - pool.num_free, ask, loss_per_byte)
            lost = self._lost_with(extent, others)
            if num_pages <= pool.num_free:
                self._looks[cache] = _Look(LOOK_HOLDS, lost.accounts, loss_per_byte.cost_s)
                return True
            if ask.may_take(*lost.accounts):
                self._clear(extent, idle)
        cache.evict(num_pages - pool.num_free, ask)
        self._looks[cache] = _Look(LOOK_HOLDS)
        return num_pages <= pool.num_free

    def _evict_own(self, cache: PageHolder, num_pages: int, ask: Ask) -> bool:
        """Evicts the missing pages from the cache itself, if they are cheaper than anything the
        other holders had at the last scan. Returns False if a new scan is needed. A scan visits
        every idle item: for each page of a full cache of 4,000 it took 12 ms, instead of 0.8 ms."""
        look = self._looks.get(cache)
        if look is None or look.uses_left == 0:
            return False
        if num_pages > cache.num_evictable(ask):
            return False
        self._looks[cache] = look._replace(uses_left=look.uses_left - 1)
        limit = Loss(ask.priority(*look.accounts), look.cost_s) if look.accounts else NO_LIMIT
        return cache.evict(num_pages, ask, limit) == num_pages

    def allocate_run(
        self, num_bytes: int, account: str = NO_TENANT.name, *, is_first: bool = False
    ) -> Allocation | None:
        """Allocates at least `num_bytes` for an adapter, clearing the place of least loss. Returns
        None if no place can be cleared. is_first: the account uses no other adapter."""
        assert self._runs is not None, "no adapters share this arena"
        # A copy, because evictions change the levels, by which a later eviction for this request
        # could be refused after others were made.
        now = BytesHeld(self.bytes_held.accounts, self.bytes_held.held.items())
        ask = Ask(now, account, self._runs.rounded(num_bytes), is_first=is_first)
        while (run := self._runs.allocate(num_bytes, account)) is None:
            if not (self._clear_place(self._runs, num_bytes, ask) or self._arena.sink_weights()):
                return None
        return run

    def allocate_weights(self, owner: str, num_extents: int) -> int:
        """Allocates up to `num_extents` more extents to the owner, evicting idle items. Returns the
        number allocated. The rest may become obtainable when items now in use turn idle."""
        missing = num_extents - self._arena.allocate_weights(owner, num_extents)
        if not missing:
            return num_extents
        idle = self._idle_runs(with_awaited=True)
        ask = self.at_any_cost()
        for _, extent in self._by_loss(self._extents_for_pages(None, idle, ask), ask):
            self._clear(extent, idle)
            missing -= self._arena.allocate_weights(owner, missing)
            if not missing:
                break
        return num_extents - missing

    def at_any_cost(self) -> Ask:
        """Returns a request of no account that may evict any idle item."""
        return Ask(self.bytes_held, NO_TENANT.name, 0, is_first=True)

    def held_bytes(self) -> tuple[Counter[str], Counter[str]]:
        """Returns the bytes of pages and of adapter allocations, each by account."""
        pages = Counter[str]()
        for cache in self._caches.values():
            pages.update(cache.pool.held_bytes())
        return pages, Counter() if self._runs is None else self._runs.held_bytes()

    def check_integrity(self) -> None:
        """Raises IntegrityError unless each account is charged for exactly what it holds."""
        pages, runs = self.held_bytes()
        held, charged = pages + runs, self.bytes_held.held
        require(held == charged, f"accounts hold {held}, charged are {charged}")

    def _idle_runs(self, *, with_awaited: bool) -> dict[Allocation, _IdleAllocation]:
        return {
            run: _IdleAllocation(holder, lost)
            for holder in self._holders
            for run, lost in holder.idle_runs(with_awaited=with_awaited).items()
        }

    def _extents_for_pages(
        self, cache: PageHolder | None, idle: dict[Allocation, _IdleAllocation], ask: Ask
    ) -> dict[int, Idle]:
        """Returns the extents that other holders could free for KV, with lower bounds of the
        cost."""
        found = {
            extent: lost
            for other in self._caches.values()
            if other is not cache
            for extent, lost in other.drainable().items()
        }
        if self._runs is not None:
            for extent, runs in self._runs.by_extent().items():
                if self._arena.is_for_kv(extent) and all(run in idle for run in runs):
                    accounts = [name for run in runs for name in idle[run].lost.accounts]
                    costs = (self._share(run, idle[run].lost.cost_s) for run in runs)
                    found[extent] = Idle(accounts, sum(costs))
        return {
            extent: lost
            for extent, lost in found.items()
            if all(ask.most(name) > 0 for name in lost.accounts)
        }

    def _share(self, run: Allocation, cost: float) -> float:
        """Returns the part of an allocation's cost for one of the extents that it frees."""
        return cost * min(1.0, self._arena.extent_bytes / run.num_bytes)

    def _by_loss(self, extents: dict[int, Idle], ask: Ask) -> Iterator[tuple[Loss, int]]:
        def loss_of(lost: Idle) -> Loss:
            return Loss(ask.priority(*lost.accounts), MARGIN * lost.cost_s)

        bounds = [(extent, loss_of(lost)) for extent, lost in extents.items()]
        return cheapest_first(bounds, lambda extent: loss_of(self._lost_with(extent, extents)))

    def _lost_with(self, extent: int, extents: dict[int, Idle]) -> Idle:
        """Returns the cost of freeing the extent, including dependent pages elsewhere."""
        owner = self._arena.kv_owner(extent)
        return extents[extent] if owner is None else self._caches[owner].lost_with([extent])

    def _clear(self, extent: int, idle: dict[Allocation, _IdleAllocation]) -> None:
        owner = self._arena.kv_owner(extent)
        if owner is not None:
            self._caches[owner].drain(extent)
        elif self._runs is not None:
            for run in self._runs.by_extent().get(extent, ()):
                idle[run].holder.evict(run)

    def _clear_place(self, runs: AdapterAllocations, num_bytes: int, ask: Ask) -> bool:
        """Evicts the items in the place of least loss that fits `num_bytes`. If only the ceiling is
        in the way, evicts the adapter of least loss. Returns False, evicting nothing, if that
        cannot help."""
        idle = self._idle_runs(with_awaited=False)
        idle = {run: found for run, found in idle.items() if ask.may_take(*found.lost.accounts)}
        num_idle_bytes = sum(run.num_bytes for run in idle)
        if runs.held_bytes().total() - num_idle_bytes + num_bytes > runs.capacity_bytes:
            return False
        spans = self._spans(runs, idle, ask)
        places = dict(find_places(spans, num_bytes))
        by_loss = cheapest_first(
            places.items(), lambda place: self._loss_of(spans[slice(*place)], ask)
        )
        for _, place in by_loss:
            if runs.is_allowed(spans[place[0]].start, spans[place[1] - 1].end, num_bytes):
                return self._give_up(spans[slice(*place)], idle)
        if not places or not idle:
            return False
        least = min(idle, key=lambda run: (*_loss_per_byte(run, idle[run].lost, ask), run.offset))
        idle[least].holder.evict(least)
        return True

    def _spans(
        self, runs: AdapterAllocations, idle: dict[Allocation, _IdleAllocation], ask: Ask
    ) -> list[Span]:
        """Returns all bytes that adapters could obtain, ordered by address."""
        size = self._arena.extent_bytes
        spans = [Span(*hole) for hole in runs.holes()]
        spans += [Span(r.start * size, r.stop * size) for r in self._arena.free_ranges()]
        for run, (_, (accounts, cost)) in idle.items():
            loss = Loss(ask.priority(*accounts), cost)
            spans.append(Span(run.offset, run.offset + run.num_bytes, loss, run=run))
        for cache in self._caches.values():
            for extent, (accounts, cost) in cache.drainable().items():
                if ask.may_take(*accounts):
                    loss = Loss(ask.priority(*accounts), MARGIN * cost)
                    start = extent * size
                    spans.append(Span(start, start + size, loss, extent=extent))
        return sorted(spans, key=lambda span: span.start)

    def _loss_of(self, place: list[Span], ask: Ask) -> Loss | None:
        """Returns None if pages elsewhere depend on the place and may not be evicted."""
        extents = [span.extent for span in place if span.extent is not None]
        priority = max(span.loss.priority for span in place)
        cost_s = sum(span.loss.cost_s for span in place if span.extent is None)
        for owner, cache in self._caches.items():
            accounts, cost = cache.lost_with(
                [extent for extent in extents if self._arena.kv_owner(extent) == owner]
            )
            if not ask.may_take(*accounts):
                return None
            priority = max(priority, ask.priority(*accounts))
            cost_s += MARGIN * cost
        return Loss(priority, cost_s)

    def _give_up(self, place: list[Span], idle: dict[Allocation, _IdleAllocation]) -> bool:
        """Evicts every item in the place. Returns False if it held none."""
        for span in place:
            if span.run is not None:
                idle[span.run].holder.evict(span.run)
            elif span.extent is not None:
                self._clear(span.extent, idle)
        return any(span.is_held for span in place)


class _IdleAllocation(NamedTuple):
    holder: AllocationHolder
    lost: Idle


class _Look(NamedTuple):
    """Result of a scan of the other holders, valid for `uses_left` more shortages: they lose at
    least what these accounts hold, at `cost_s` seconds per byte. No accounts: nothing evictable."""

    uses_left: int
    accounts: Collection[str] = ()
    cost_s: float = 0.0


def _loss_per_byte(run: Allocation, lost: Idle, ask: Ask) -> Loss:
    return Loss(ask.priority(*lost.accounts), lost.cost_s / run.num_bytes)
