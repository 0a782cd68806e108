"""Who gives way when the arena is short: whatever is idle and costs the least to make again."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from heapq import heapify, heappop, heappush
from typing import TYPE_CHECKING, Protocol, TypeVar

from memory.arena import Arena
from memory.runs import AdapterRuns, Run

if TYPE_CHECKING:
    from memory.kv_cache import KVCache

MARGIN = 2.0
"""The other kind gives way only where it loses so many times less: or else two kinds of equal worth
would take the same bytes from each other in turn."""

T = TypeVar("T")


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
    one. Floor and ceiling of the arena bound the trade, and what is in use takes no part. Used by
    one thread.
    """

    def __init__(self, arena: Arena, runs: AdapterRuns | None = None) -> None:
        """runs: the adapters' part of the arena, if adapters share it."""
        self._arena = arena
        self._runs = runs
        self._caches: dict[str, KVCache] = {}
        self._holders: list[RunHolder] = []

    def add_cache(self, owner: str, cache: KVCache) -> None:
        self._caches[owner] = cache

    def add_holder(self, holder: RunHolder) -> None:
        self._holders.append(holder)

    @property
    def num_holders(self) -> int:
        return len(self._holders)

    def free_pages(self, cache: KVCache, num_pages: int) -> bool:
        """Makes so many pages free in the cache's pool. False, and nothing is given up, if all that
        is idle does not suffice."""
        pool = cache.pool
        if num_pages <= pool.num_free:
            return True
        idle = self._idle_runs(with_awaited=True)
        costs = self._extents_for_pages(cache, idle)
        reach = pool.num_free + cache.num_cached + len(costs) * pool.pages_per_extent
        if num_pages > reach:
            return False
        by_cost = _cheapest_first(costs.items(), lambda extent: self._exact_cost(extent, costs))
        for cost, extent in by_cost:
            cache.evict(num_pages - pool.num_free, cost / self._arena.extent_bytes)
            if num_pages <= pool.num_free:
                return True
            self._clear(extent, idle)
        cache.evict(num_pages - pool.num_free)
        return True

    def allocate_run(self, num_bytes: int) -> Run | None:
        """A run of at least num_bytes, where it costs the least. None if no place can be
        cleared."""
        assert self._runs is not None, "no adapters share this arena"
        while (run := self._runs.allocate(num_bytes)) is None:
            if not self._clear_place(self._runs, num_bytes):
                return None
        return run

    def _idle_runs(self, *, with_awaited: bool) -> dict[Run, _Idle]:
        return {
            run: (cost, holder)
            for holder in self._holders
            for run, cost in holder.idle_runs(with_awaited=with_awaited).items()
        }

    def _extents_for_pages(self, cache: KVCache, idle: dict[Run, _Idle]) -> dict[int, float]:
        """Extents that others would free for KV, with what that costs them at least."""
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
        places = list(_places(self._stretches(runs, idle), num_bytes))[::-1]  # from the high end
        under_ceiling = [place for place in places if runs.is_allowed(*_span(place), num_bytes)]
        lower = ((place, sum(stretch.cost_s for stretch in place)) for place in under_ceiling)
        _, best = next(_cheapest_first(lower, self._cost_of_place), (0.0, None))
        if best is not None:
            taken = [stretch for stretch in best if not stretch.is_free]
            for stretch in taken:
                self._give_up(stretch, idle)
            return bool(taken)
        if not places or not idle:
            return False
        least = min(idle, key=lambda run: (idle[run][0] / run.num_bytes, run.offset))
        idle[least][1].evict(least)
        return True

    def _stretches(self, runs: AdapterRuns, idle: dict[Run, _Idle]) -> list[_Stretch]:
        """All bytes that adapters could have, by place."""
        size = self._arena.extent_bytes
        free = [
            *runs.holes(),
            *((r.start * size, r.stop * size) for r in self._arena.free_ranges()),
        ]
        stretches = [_Stretch(start, end) for start, end in free]
        for run, (cost, _) in idle.items():
            stretches.append(_Stretch(run.offset, run.offset + run.num_bytes, cost, run=run))
        for cache in self._caches.values():
            for extent, cost in cache.drainable().items():
                start = extent * size
                stretches.append(_Stretch(start, start + size, MARGIN * cost, extent=extent))
        return sorted(stretches, key=lambda stretch: stretch.start)

    def _cost_of_place(self, place: tuple[_Stretch, ...]) -> float:
        extents = [stretch.extent for stretch in place if stretch.extent is not None]
        kv = sum(
            cache.drain_cost([e for e in extents if self._arena.kv_owner(e) == owner])
            for owner, cache in self._caches.items()
        )
        return MARGIN * kv + sum(stretch.cost_s for stretch in place if stretch.extent is None)

    def _give_up(self, stretch: _Stretch, idle: dict[Run, _Idle]) -> None:
        if stretch.run is not None:
            idle[stretch.run][1].evict(stretch.run)
        elif stretch.extent is not None:
            self._clear(stretch.extent, idle)


_Idle = tuple[float, RunHolder]


@dataclass(frozen=True, slots=True, eq=False)
class _Stretch:
    """Bytes start..end that are free, or would be if their holder gave them up."""

    start: int
    end: int
    cost_s: float = 0.0
    """What is lost with it; for KV in this extent alone, so at least that."""
    run: Run | None = None
    extent: int | None = None

    @property
    def is_free(self) -> bool:
        return self.run is None and self.extent is None


def _places(stretches: list[_Stretch], num_bytes: int) -> Iterator[tuple[_Stretch, ...]]:
    """Every shortest row of adjacent stretches that is long enough."""
    first = 0
    for last, stretch in enumerate(stretches):
        if last > 0 and stretches[last - 1].end != stretch.start:
            first = last
        while stretch.end - stretches[first].end >= num_bytes:
            first += 1
        if stretch.end - stretches[first].start >= num_bytes:
            yield tuple(stretches[first : last + 1])


def _span(place: tuple[_Stretch, ...]) -> tuple[int, int]:
    return place[0].start, place[-1].end


def _cheapest_first(
    bounds: Iterable[tuple[T, float]], cost_of: Callable[[T], float]
) -> Iterator[tuple[float, T]]:
    """Items by cost, given a lower bound of each; the cost itself is asked for only of those whose
    turn it may be."""
    items = [(bound, False, order, item) for order, (item, bound) in enumerate(bounds)]
    heapify(items)
    while items:
        cost, is_exact, order, item = heappop(items)
        if is_exact:
            yield cost, item
        else:
            heappush(items, (cost_of(item), True, order, item))
