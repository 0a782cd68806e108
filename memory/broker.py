"""Who gives way when the arena is short: what is idle, of the account that holds most for its
weight, and costs the least to make again."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping
from threading import Lock
from typing import NamedTuple, Protocol

from memory.accounts import NOBODY, Ask, Ledger
from memory.arena import Arena
from memory.errors import require
from memory.pages import PagePool
from memory.places import NO_LIMIT, Idle, Loss, Stretch, cheapest_first, find_places
from memory.runs import AdapterRuns, Run

MARGIN = 2.0
"""The other kind gives way only where it loses so many times less: or else two kinds of equal worth
would take the same bytes from each other in turn."""
LOOK_HOLDS = 32
"""Shortages of pages that one look at what others would lose is good for."""


class PageHolder(Protocol):
    """KV pages of one model, as `KVCache` holds them."""

    pool: PagePool

    def num_evictable(self, ask: Ask) -> int:
        """Idle pages that give way to the ask."""
        ...

    def evict(self, num_pages: int, ask: Ask | None = None, limit: Loss = NO_LIMIT) -> int:
        """Frees idle pages in the order of their loss, up to the limit. Returns how many."""
        ...

    def drainable(self) -> dict[int, Idle]:
        """Extents that `drain` could free, with what their loss costs."""
        ...

    def lost_with(self, extents: Iterable[int]) -> Idle:
        """What draining these extents together loses."""
        ...

    def drain(self, extent: int) -> None:
        """Gives a drainable extent back to the arena."""
        ...


class RunHolder(Protocol):
    """Adapters of one model."""

    def idle_runs(self, *, with_awaited: bool) -> Mapping[Run, Idle]:
        """Runs that nobody reads or fills. with_awaited: those too that somebody is about to
        lease."""
        ...

    def evict(self, run: Run) -> None:
        """Frees one of the idle runs."""
        ...


class MemoryBroker:
    """Trades the arena between accounts by what they hold for their weight (see accounts.py), and
    within one account between KV and adapters by what a loss costs: seconds to make the thing
    again, times its expected reuse, per byte.

    A model gives up prefixes to itself by the page, to others by the extent; adapters leave one by
    one. Floor and ceiling of the arena bound the trade, and what is in use takes no part.
    """

    def __init__(self, arena: Arena, runs: AdapterRuns | None = None) -> None:
        """runs: the adapters' part of the arena, if adapters share it."""
        self.lock = Lock()
        """Held by whoever looks at or changes who owns which bytes of the arena. The engine thread
        leaves it to others while it computes a step, whose bytes are in use and stay."""
        self._arena = arena
        self._runs = runs
        self._caches: dict[str, PageHolder] = {}
        self._holders: list[RunHolder] = []
        self._looks: dict[PageHolder, _Look] = {}

    def add_cache(self, owner: str, cache: PageHolder) -> None:
        self._caches[owner] = cache

    def add_holder(self, holder: RunHolder) -> None:
        self._holders.append(holder)

    @property
    def ledger(self) -> Ledger:
        return self._arena.ledger

    @property
    def num_caches(self) -> int:
        return len(self._caches)

    @property
    def num_holders(self) -> int:
        return len(self._holders)

    def free_pages(self, cache: PageHolder, num_pages: int, ask: Ask) -> bool:
        """Makes so many pages free in the cache's pool. False if all that gives way does not
        suffice: then nothing is given up, but where others would give a part and no more."""
        pool = cache.pool
        if num_pages <= pool.num_free or self._evict_own(cache, num_pages - pool.num_free, ask):
            return True
        idle = self._idle_runs(with_awaited=True)
        others = self._extents_for_pages(cache, idle, ask)
        num_own = cache.num_evictable(ask)
        if num_pages > pool.num_free + num_own + len(others) * pool.pages_per_extent:
            return False
        for loss, extent in self._by_loss(others, ask):
            loss_per_byte = Loss(loss.turn, loss.cost_s / self._arena.extent_bytes)
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
        """As many idle pages as are missing, if their turn comes before that of all that others had
        at the last look. False: it is time to look again."""
        look = self._looks.get(cache)
        if look is None or look.uses_left == 0:
            return False
        if num_pages > cache.num_evictable(ask):
            return False
        self._looks[cache] = look._replace(uses_left=look.uses_left - 1)
        limit = Loss(ask.turn(*look.accounts), look.cost_s) if look.accounts else NO_LIMIT
        return cache.evict(num_pages, ask, limit) == num_pages

    def allocate_run(
        self, num_bytes: int, account: str = NOBODY.name, *, is_first: bool = False
    ) -> Run | None:
        """A run of at least num_bytes, where the loss is least. None if no place can be cleared.
        is_first: the account uses no other adapter."""
        assert self._runs is not None, "no adapters share this arena"
        # By what each holds now: else the first of several things might go in vain.
        ask = Ask(self.ledger.copy(), account, self._runs.rounded(num_bytes), is_first=is_first)
        while (run := self._runs.allocate(num_bytes, account)) is None:
            if not (self._clear_place(self._runs, num_bytes, ask) or self._arena.sink_weights()):
                return None
        return run

    def allocate_weights(self, owner: str, num_extents: int) -> int:
        """Gives the owner up to so many extents more, at the cost of what is idle. Returns how
        many: what others use in the meantime may be had later."""
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
        """For nobody in particular."""
        return Ask(self.ledger, NOBODY.name, 0, is_first=True)

    def held_bytes(self) -> tuple[Counter[str], Counter[str]]:
        """Of pages and of runs, by account."""
        pages = Counter[str]()
        for cache in self._caches.values():
            pages.update(cache.pool.held_bytes())
        return pages, Counter() if self._runs is None else self._runs.held_bytes()

    def check_integrity(self) -> None:
        """Raises IntegrityError unless each account is charged with what it holds."""
        pages, runs = self.held_bytes()
        held, charged = pages + runs, self.ledger.held
        require(held == charged, f"accounts hold {held}, charged are {charged}")

    def _idle_runs(self, *, with_awaited: bool) -> dict[Run, _IdleRun]:
        return {
            run: _IdleRun(holder, lost)
            for holder in self._holders
            for run, lost in holder.idle_runs(with_awaited=with_awaited).items()
        }

    def _extents_for_pages(
        self, cache: PageHolder | None, idle: dict[Run, _IdleRun], ask: Ask
    ) -> dict[int, Idle]:
        """Extents that all but the cache may come to free for KV, with what that loses at least."""
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

    def _share(self, run: Run, cost: float) -> float:
        """Of the cost of a run, for one of the extents that it frees."""
        return cost * min(1.0, self._arena.extent_bytes / run.num_bytes)

    def _by_loss(self, extents: dict[int, Idle], ask: Ask) -> Iterator[tuple[Loss, int]]:
        def loss_of(lost: Idle) -> Loss:
            return Loss(ask.turn(*lost.accounts), MARGIN * lost.cost_s)

        bounds = [(extent, loss_of(lost)) for extent, lost in extents.items()]
        return cheapest_first(bounds, lambda extent: loss_of(self._lost_with(extent, extents)))

    def _lost_with(self, extent: int, extents: dict[int, Idle]) -> Idle:
        """With the pages elsewhere that go with it."""
        owner = self._arena.kv_owner(extent)
        return extents[extent] if owner is None else self._caches[owner].lost_with([extent])

    def _clear(self, extent: int, idle: dict[Run, _IdleRun]) -> None:
        owner = self._arena.kv_owner(extent)
        if owner is not None:
            self._caches[owner].drain(extent)
        elif self._runs is not None:
            for run in self._runs.by_extent().get(extent, ()):
                idle[run].holder.evict(run)

    def _clear_place(self, runs: AdapterRuns, num_bytes: int, ask: Ask) -> bool:
        """Gives up what lies in the place of least loss for so many bytes; where only the ceiling
        is in the way, the adapter of least loss. False, and nothing is given up, if that cannot
        help."""
        idle = self._idle_runs(with_awaited=False)
        idle = {run: found for run, found in idle.items() if ask.may_take(*found.lost.accounts)}
        num_idle_bytes = sum(run.num_bytes for run in idle)
        if runs.num_used_bytes - num_idle_bytes + num_bytes > runs.capacity_bytes:
            return False
        stretches = self._stretches(runs, idle, ask)
        places = dict(find_places(stretches, num_bytes))
        by_loss = cheapest_first(
            places.items(), lambda place: self._loss_of(stretches[slice(*place)], ask)
        )
        for _, place in by_loss:
            if runs.is_allowed(stretches[place[0]].start, stretches[place[1] - 1].end, num_bytes):
                return self._give_up(stretches[slice(*place)], idle)
        if not places or not idle:
            return False
        least = min(idle, key=lambda run: (*_loss_per_byte(run, idle[run].lost, ask), run.offset))
        idle[least].holder.evict(least)
        return True

    def _stretches(self, runs: AdapterRuns, idle: dict[Run, _IdleRun], ask: Ask) -> list[Stretch]:
        """All bytes that adapters could have, by place."""
        size = self._arena.extent_bytes
        stretches = [Stretch(*hole) for hole in runs.holes()]
        stretches += [Stretch(r.start * size, r.stop * size) for r in self._arena.free_ranges()]
        for run, (_, (accounts, cost)) in idle.items():
            loss = Loss(ask.turn(*accounts), cost)
            stretches.append(Stretch(run.offset, run.offset + run.num_bytes, loss, run=run))
        for cache in self._caches.values():
            for extent, (accounts, cost) in cache.drainable().items():
                if ask.may_take(*accounts):
                    loss = Loss(ask.turn(*accounts), MARGIN * cost)
                    start = extent * size
                    stretches.append(Stretch(start, start + size, loss, extent=extent))
        return sorted(stretches, key=lambda stretch: stretch.start)

    def _loss_of(self, place: list[Stretch], ask: Ask) -> Loss | None:
        """None: pages elsewhere would go with it that do not give way."""
        extents = [stretch.extent for stretch in place if stretch.extent is not None]
        turn = max(stretch.loss.turn for stretch in place)
        cost_s = sum(stretch.loss.cost_s for stretch in place if stretch.extent is None)
        for owner, cache in self._caches.items():
            accounts, cost = cache.lost_with(
                [extent for extent in extents if self._arena.kv_owner(extent) == owner]
            )
            if not ask.may_take(*accounts):
                return None
            turn = max(turn, ask.turn(*accounts))
            cost_s += MARGIN * cost
        return Loss(turn, cost_s)

    def _give_up(self, place: list[Stretch], idle: dict[Run, _IdleRun]) -> bool:
        """False if nobody has anything there."""
        for stretch in place:
            if stretch.run is not None:
                idle[stretch.run].holder.evict(stretch.run)
            elif stretch.extent is not None:
                self._clear(stretch.extent, idle)
        return any(stretch.is_held for stretch in place)


class _IdleRun(NamedTuple):
    holder: RunHolder
    lost: Idle


class _Look(NamedTuple):
    """For so many shortages of pages more, others are taken to lose at least that: what these
    accounts hold, at so many seconds a byte. No accounts: nothing is to be had of others."""

    uses_left: int
    accounts: Collection[str] = ()
    cost_s: float = 0.0


def _loss_per_byte(run: Run, lost: Idle, ask: Ask) -> Loss:
    return Loss(ask.turn(*lost.accounts), lost.cost_s / run.num_bytes)
