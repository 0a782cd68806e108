"""Who gives way when the arena is short: whatever is idle and costs the least to make again."""

from __future__ import annotations

import math
from collections.abc import Mapping
from threading import Lock
from typing import TYPE_CHECKING, Protocol

from memory.arena import Arena
from memory.places import Stretch, cheapest_first, find_places
from memory.runs import AdapterRuns, Run

if TYPE_CHECKING:
    from memory.kv_cache import KVCache

MARGIN = 2.0
"""The other kind gives way only where it loses so many times less: or else two kinds of equal worth
would take the same bytes from each other in turn."""
LOOK_HOLDS = 32
"""Shortages of pages that one look at what others would lose is good for."""


class RunHolder(Protocol):
    """Adapters of one model."""

    def idle_runs(self, *, with_awaited: bool) -> Mapping[Run, float]:
        """Runs that nobody reads or fills, each with the seconds that its loss costs: to load it
        again, times its expected reuse. with_awaited: those too that somebody is about to lease."""
        ...

    def evict(self, run: Run) -> None:
        """Frees one of the idle runs."""
        ...


class MemoryBroker:
    """Trades the arena between KV and adapters by what a loss costs: seconds to make the thing
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
        self._caches: dict[str, KVCache] = {}
        self._holders: list[RunHolder] = []
        self._looks: dict[KVCache, tuple[int, float]] = {}
        """For so many shortages of pages more, others are taken to lose at least so many seconds a
        byte."""

    def add_cache(self, owner: str, cache: KVCache) -> None:
        self._caches[owner] = cache

    def add_holder(self, holder: RunHolder) -> None:
        self._holders.append(holder)

    @property
    def num_caches(self) -> int:
        return len(self._caches)

    @property
    def num_holders(self) -> int:
        return len(self._holders)

    def free_pages(self, cache: KVCache, num_pages: int) -> bool:
        """Makes so many pages free in the cache's pool. False, and nothing is given up, if all that
        is idle does not suffice."""
        pool = cache.pool
        if num_pages <= pool.num_free or self._evict_own(cache, num_pages - pool.num_free):
            return True
        idle = self._idle_runs(with_awaited=True)
        costs = self._extents_for_pages(cache, idle)
        reach = pool.num_free + cache.num_cached + len(costs) * pool.pages_per_extent
        if num_pages > reach:
            return False
        by_cost = cheapest_first(costs.items(), lambda extent: self._exact_cost(extent, costs))
        for cost, extent in by_cost:
            cost_per_byte = cost / self._arena.extent_bytes
            cache.evict(num_pages - pool.num_free, cost_per_byte)
            if num_pages <= pool.num_free:
                self._looks[cache] = LOOK_HOLDS, cost_per_byte
                return True
            self._clear(extent, idle)
        cache.evict(num_pages - pool.num_free)
        self._looks[cache] = LOOK_HOLDS, math.inf
        return True

    def _evict_own(self, cache: KVCache, num_pages: int) -> bool:
        """As many idle pages as are missing, if they are cheaper than all that others had at the
        last look. False: it is time to look again."""
        uses_left, cost_per_byte = self._looks.get(cache, (0, 0.0))
        if uses_left == 0 or num_pages > cache.num_cached:
            return False
        self._looks[cache] = uses_left - 1, cost_per_byte
        return cache.evict(num_pages, cost_per_byte) == num_pages

    def allocate_run(self, num_bytes: int) -> Run | None:
        """A run of at least num_bytes, where it costs the least. None if no place can be
        cleared."""
        assert self._runs is not None, "no adapters share this arena"
        while (run := self._runs.allocate(num_bytes)) is None:
            if not (self._clear_place(self._runs, num_bytes) or self._arena.sink_weights()):
                return None
        return run

    def allocate_weights(self, owner: str, num_extents: int) -> int:
        """Gives the owner up to so many extents more, at the cost of what is idle. Returns how
        many: what others use in the meantime may be had later."""
        missing = num_extents - len(self._arena.allocate_weights(owner, num_extents))
        if not missing:
            return num_extents
        idle = self._idle_runs(with_awaited=True)
        costs = self._extents_for_pages(None, idle)
        by_cost = cheapest_first(costs.items(), lambda extent: self._exact_cost(extent, costs))
        for _, extent in by_cost:
            self._clear(extent, idle)
            missing -= len(self._arena.allocate_weights(owner, missing))
            if not missing:
                break
        return num_extents - missing

    def _idle_runs(self, *, with_awaited: bool) -> dict[Run, _Idle]:
        return {
            run: (cost, holder)
            for holder in self._holders
            for run, cost in holder.idle_runs(with_awaited=with_awaited).items()
        }

    def _extents_for_pages(self, cache: KVCache | None, idle: dict[Run, _Idle]) -> dict[int, float]:
        """Extents that all but the cache would free for KV, with what that costs them at least."""
        costs = {
            extent: MARGIN * cost
            for other in self._caches.values()
            if other is not cache
            for extent, cost in other.drainable().items()
        }
        if self._runs is None:
            return costs
        for extent, runs in self._runs.by_extent().items():
            if self._arena.is_for_kv(extent) and all(run in idle for run in runs):
                costs[extent] = MARGIN * sum(self._share(run, idle[run][0]) for run in runs)
        return costs

    def _share(self, run: Run, cost: float) -> float:
        """Of the cost of a run, for one of the extents that it frees."""
        return cost * min(1.0, self._arena.extent_bytes / run.num_bytes)

    def _exact_cost(self, extent: int, costs: dict[int, float]) -> float:
        owner = self._arena.kv_owner(extent)
        if owner is None:
            return costs[extent]
        return MARGIN * self._caches[owner].drain_cost([extent])

    def _clear(self, extent: int, idle: dict[Run, _Idle]) -> None:
        owner = self._arena.kv_owner(extent)
        if owner is not None:
            self._caches[owner].drain(extent)
        elif self._runs is not None:
            for run in self._runs.by_extent().get(extent, ()):
                idle[run][1].evict(run)

    def _clear_place(self, runs: AdapterRuns, num_bytes: int) -> bool:
        """Gives up what lies in the cheapest place for so many bytes; where only the ceiling is in
        the way, the cheapest adapter. False, and nothing is given up, if that cannot help."""
        idle = self._idle_runs(with_awaited=False)
        num_idle_bytes = sum(run.num_bytes for run in idle)
        if runs.num_used_bytes - num_idle_bytes + num_bytes > runs.capacity_bytes:
            return False
        stretches = self._stretches(runs, idle)
        places = dict(find_places(stretches, num_bytes))
        by_cost = cheapest_first(
            places.items(), lambda place: self._cost_of(stretches[slice(*place)])
        )
        for _, place in by_cost:
            if runs.is_allowed(stretches[place[0]].start, stretches[place[1] - 1].end, num_bytes):
                return self._give_up(stretches[slice(*place)], idle)
        if not places or not idle:
            return False
        least = min(idle, key=lambda run: (idle[run][0] / run.num_bytes, run.offset))
        idle[least][1].evict(least)
        return True

    def _stretches(self, runs: AdapterRuns, idle: dict[Run, _Idle]) -> list[Stretch]:
        """All bytes that adapters could have, by place."""
        size = self._arena.extent_bytes
        stretches = [Stretch(*hole) for hole in runs.holes()]
        stretches += [Stretch(r.start * size, r.stop * size) for r in self._arena.free_ranges()]
        for run, (cost, _) in idle.items():
            stretches.append(Stretch(run.offset, run.offset + run.num_bytes, cost, run=run))
        for cache in self._caches.values():
            for extent, cost in cache.drainable().items():
                start = extent * size
                stretches.append(Stretch(start, start + size, MARGIN * cost, extent=extent))
        return sorted(stretches, key=lambda stretch: stretch.start)

    def _cost_of(self, place: list[Stretch]) -> float:
        extents = [stretch.extent for stretch in place if stretch.extent is not None]
        kv = sum(
            cache.drain_cost([e for e in extents if self._arena.kv_owner(e) == owner])
            for owner, cache in self._caches.items()
        )
        return MARGIN * kv + sum(stretch.cost_s for stretch in place if stretch.extent is None)

    def _give_up(self, place: list[Stretch], idle: dict[Run, _Idle]) -> bool:
        """False if nobody has anything there."""
        for stretch in place:
            if stretch.run is not None:
                idle[stretch.run][1].evict(stretch.run)
            elif stretch.extent is not None:
                self._clear(stretch.extent, idle)
        return any(stretch.is_held for stretch in place)


_Idle = tuple[float, RunHolder]
