"""Eviction of idle pages and adapters when the arena is short of memory. Evicts from the account
that holds the most for its weight, and there the items that are cheapest to make again."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import pairwise
from threading import Lock
from typing import NamedTuple, Protocol

from memory.accounts import NO_TENANT, Ask, Holdings
from memory.arena import Arena
from memory.errors import require
from memory.eviction.adapter_memory import AdapterMemory, Placement
from memory.eviction.idle_pages import IdlePages
from memory.eviction.loss import NO_LIMIT, Idle, Item, Loss, by_loss

MARGIN = 2.0
"""Factor by which an item of another cache or kind (KV or adapters) must be cheaper than an own
item to be evicted instead. Without this factor, two owners of equally valuable items would evict
each other's items in turn."""
RETRY_S = 0.25
"""Seconds after which an adapter for which there was no room is tried again in any case."""
LOOK_HOLDS = 32
"""Number of further requests for pages for which a cache uses the result of one scan of other
owners' idle items, which are pages of other caches and adapters."""


class AdapterHolder(Protocol):
    """Adapters of one model that the broker may evict."""

    num_evictions: int
    """Number of adapters evicted so far."""

    def idle(self, *, with_awaited: bool) -> Mapping[Placement, Idle]:
        """Returns the adapters that may be evicted, because they are neither leased, loading nor
        pinned. with_awaited: whether to include adapters that a caller is about to lease."""
        ...

    def evict(self, placement: Placement) -> None:
        """Frees one of the idle placements."""
        ...


class MemoryBroker:
    """`PageSource` that chooses the items to evict among all caches and adapters. It evicts from
    the account that holds the most for its weight (see accounts.py). Within an account, it evicts
    the pages or adapters whose loss costs least per byte. The cost of a loss is the seconds to make
    the item again, times the item's expected reuse.

    KV pages are evicted one by one for their own model, and by whole extents for other models and
    for adapters. Adapters are evicted one by one. The adapters' floor and ceiling (see `Arena`)
    limit how much memory can move between adapters and KV. Memory in use is never evicted.
    """

    def __init__(self, arena: Arena, adapters: AdapterMemory) -> None:
        """adapters: memory of the adapters of all models, in the same arena."""
        self.lock = Lock()
        """Must be held while reading or changing the owners of the arena's bytes. The engine thread
        does not hold this lock while it computes a step, because bytes in use are never evicted."""
        self.bytes_held = arena.bytes_held
        self._arena = arena
        self._adapters = adapters
        self._caches: dict[IdlePages, _Look] = {}
        """For each cache, the result of the last scan of idle items that other owners hold."""
        self.holders: list[AdapterHolder] = []

    def add_cache(self, idle: IdlePages) -> Callable[[], None]:
        """Implements `PageSource.add_cache`."""
        self._caches[idle] = _Look(0)
        return partial(self._caches.__delitem__, idle)

    def add_holder(self, holder: AdapterHolder) -> Callable[[], None]:
        """Adds a holder. Returns a function that removes the holder. Call this function only when
        the holder has no placements."""
        self.holders.append(holder)
        return partial(self.holders.remove, holder)

    @property
    def is_shared(self) -> bool:
        return len(self._caches) > 1

    @property
    def num_evictions(self) -> int:
        """Number of adapters of all models that have been evicted so far."""
        return sum(holder.num_evictions for holder in self.holders)

    def make_room(self, idle: IdlePages, num_pages: int, ask: Ask) -> bool:
        """Implements `PageSource.make_room`. If it returns False, it has usually evicted nothing.
        It may have evicted some items if it could free fewer extents than it had estimated."""
        pool = idle.pool
        if num_pages <= pool.num_free or self._evict_own(idle, num_pages - pool.num_free, ask):
            return True
        others = [
            item
            for item in self._extents(without=idle)
            if all(ask.most(name) > 0 for name in item.lost.accounts)
        ]
        num_own = idle.num_evictable(ask)
        if num_pages > pool.num_free + num_own + len(others) * pool.pages_per_extent:
            return False
        for loss, item in by_loss(others, ask):
            limit = Loss(loss.priority, MARGIN * loss.cost_s)
            idle.evict(num_pages - pool.num_free, ask, limit)
            accounts = item.exact().accounts
            if num_pages <= pool.num_free:
                self._caches[idle] = _Look(LOOK_HOLDS, accounts, limit.cost_s)
                return True
            if ask.may_take(*accounts):
                item.evict()
        idle.evict(num_pages - pool.num_free, ask)
        self._caches[idle] = _Look(LOOK_HOLDS)
        return num_pages <= pool.num_free

    def _evict_own(self, idle: IdlePages, num_pages: int, ask: Ask) -> bool:
        """Evicts `num_pages` pages of the cache itself, without a new scan of other owners' items.
        Compares each page with the cheapest item that the last scan found. A page is evicted if its
        account has a lower eviction priority than the item, or if the priorities are equal and the
        page costs at most `MARGIN` times as much per byte as the item. Returns False if too few
        pages were evicted, or if a new scan is due. A scan visits every idle item: with a full
        cache of 4,000 pages, a scan for each page took 12 ms per page instead of 0.8 ms."""
        look = self._caches[idle]
        if not look.uses_left or num_pages > idle.num_evictable(ask):
            return False
        self._caches[idle] = look._replace(uses_left=look.uses_left - 1)
        limit = Loss(ask.priority(*look.accounts), look.cost_s) if look.accounts else NO_LIMIT
        return idle.evict(num_pages, ask, limit) == num_pages

    def allocate_adapter(
        self, ends: Sequence[int], account: str = NO_TENANT.name, *, is_first: bool = False
    ) -> Placement | None:
        """Allocates memory for an adapter, evicting the items of least loss. Returns None if too
        little may be evicted. ends: byte positions in the image at which its factors end. is_first:
        whether the account uses no other adapter."""
        placement = self._adapters.allocate(ends, account)
        if placement is not None:
            return placement
        # The request uses a copy of the amounts held, because evictions change them. Without the
        # copy, the second eviction for a request could be refused after the first was made.
        now = Holdings(self.bytes_held.accounts, self.bytes_held.held.items())
        ask = Ask(now, account, self._adapters.rounded(ends[-1]), is_first=is_first)
        for victims in self._victims(ends, ask):
            for item in victims:
                item.evict()
            placement = self._adapters.allocate(ends, account)
            if placement is not None:
                return placement
        return None

    def allocate_weights(self, owner: str, num_extents: int) -> int:
        """Allocates up to `num_extents` more extents to the owner, evicting idle items. Returns the
        number allocated. More extents may become available when items that are in use become
        idle."""
        missing = num_extents - self._arena.allocate_weights(owner, num_extents)
        if not missing:
            return num_extents
        at_any_cost = Ask(self.bytes_held, NO_TENANT.name, 0, is_first=True)
        for _, item in by_loss(self._extents(), at_any_cost):
            item.evict()
            missing -= self._arena.allocate_weights(owner, missing)
            if not missing:
                break
        return num_extents - missing

    def levels(self) -> tuple[int, int, int]:
        """Returns the number of free extents, the free bytes in the adapters' extents, and the
        number of pages that are free or idle."""
        num_pages = sum(idle.pool.num_free + idle.num_pages for idle in self._caches)
        return self._arena.num_free, self._adapters.num_hole_bytes, num_pages

    def check_integrity(self) -> None:
        """Raises IntegrityError unless each account is charged for exactly what it holds."""
        held = self._adapters.held_bytes()
        for idle in self._caches:
            held.update(idle.pool.held_bytes())
        charged = self.bytes_held.held
        require(held == charged, f"accounts hold {held}, charged are {charged}")

    def _placed(self, *, for_adapter: bool) -> dict[Placement | int, Item]:
        """Returns the idle adapters as evictable items, by placement. for_adapter: whether another
        adapter needs the memory. If so, adapters that a caller is about to lease are left out, and
        costs are divided by `MARGIN`, so that adapters are evicted before pages of similar cost."""
        margin = MARGIN if for_adapter else 1.0
        return {
            placement: _exact_item(
                placement.num_bytes,
                Idle(lost.accounts, lost.cost_s / margin),
                partial(holder.evict, placement),
            )
            for holder in self.holders
            for placement, lost in holder.idle(with_awaited=not for_adapter).items()
        }

    def _paged(self, without: IdlePages | None = None) -> dict[int, Item]:
        """Returns, as evictable items, the extents of KV pages in which no sequence uses a page.
        Leaves out the extents of the cache `without`."""
        size = self._arena.extent_bytes
        return {
            extent: Item(size, lost, partial(idle.lost_with, extent), partial(idle.drain, extent))
            for idle in self._caches
            if idle is not without
            for extent, lost in idle.drainable().items()
        }

    def _extents(self, without: IdlePages | None = None) -> list[Item]:
        """Returns the extents that can be freed for KV or weights, as evictable items."""
        size = self._arena.extent_bytes
        items = [*self._paged(without).values()]
        placed = self._placed(for_adapter=False)
        for extent, placements in self._adapters.by_extent().items():
            if self._arena.is_for_kv(extent) and placed.keys() >= set(placements):
                accounts = [name for each in placements for name in placed[each].lost.accounts]
                # Evicting an adapter frees all of its extents, so each extent bears a share of the
                # cost.
                shares = (
                    placed[each].lost.cost_s * min(1.0, size / each.num_bytes)
                    for each in placements
                )
                lost = Idle(accounts, sum(shares))
                items.append(_exact_item(size, lost, partial(_evict_all, placements, placed)))
        return items

    def _victims(self, ends: Sequence[int], ask: Ask) -> Iterator[list[Item]]:
        """Yields lists of items. The caller evicts one list after the other until the image fits.
        If a factor needs adjacent extents, the first list frees adjacent extents. The next list
        frees the bytes that are still missing, by evicting the items of least loss. The image may
        not fit even then, because it can be cut only between factors. Therefore each later list has
        one more item. Yields nothing if evicting all items would not make enough room."""
        arena, size = self._arena, self._arena.extent_bytes
        items = self._placed(for_adapter=True) | self._paged()
        items = {key: item for key, item in items.items() if ask.may_take(*item.lost.accounts)}
        placed = {item for key, item in items.items() if isinstance(key, Placement)}
        num_new = arena.adapter_ceiling - arena.num_adapter_extents
        # Evicting pages helps only until the adapters' extents reach the adapters' ceiling.
        num_paged = min(max(num_new - arena.num_free, 0), len(items) - len(placed))
        missing = self._adapters.rounded(ends[-1]) - self._adapters.num_hole_bytes
        missing -= min(num_new, arena.num_free) * size
        if missing > sum(item.num_bytes for item in placed) + num_paged * size:
            return
        row: list[Item] | None = []
        num_adjacent = max(-(-(end - start) // size) for start, end in pairwise([0, *ends]))
        if num_adjacent > 1:
            row = self._row(num_adjacent, items)
            if row is None:
                return
            yield row
            missing -= sum(item.num_bytes for item in row)
        victims: list[Item] = []
        for _, item in by_loss([item for item in items.values() if item not in row], ask):
            if item not in placed:
                if not num_paged or not ask.may_take(*item.exact().accounts):
                    continue
                num_paged -= 1
            victims.append(item)
            missing -= item.num_bytes
            if missing <= 0:
                yield victims
                victims = []

    def _row(self, num_extents: int, items: Mapping[Placement | int, Item]) -> list[Item] | None:
        """Returns items whose eviction leaves `num_extents` adjacent extents free, at the highest
        possible place in the arena. Returns None if there is no such place."""
        by_extent = self._adapters.by_extent()
        row: list[list[Item]] = []
        for extent in reversed(range(self._arena.num_extents)):
            keys = [] if self._arena.is_free(extent) else by_extent.get(extent, [extent])
            held = [items[key] for key in keys if key in items]
            row = [*row, held] if len(held) == len(keys) else []
            if len(row) == num_extents:
                return list(dict.fromkeys(item for held in row for item in held))
        return None


class Refusals:
    """Adapters for which too little memory could be freed, by account. They are refused without
    another scan of all idle items until memory has become free or idle, or `RETRY_S` have passed,
    because what may be evicted also depends on the accounts."""

    def __init__(self, broker: MemoryBroker, clock: Callable[[], float]) -> None:
        self._broker = broker
        self._clock = clock
        self._num_bytes: dict[str, int] = {}
        """Smallest refused size of each account, in bytes."""
        self._levels: tuple[int, ...] = ()
        """Amounts of memory that were free or idle at the last call of `look`."""
        self._ends_s = 0.0

    def includes(self, account: str, num_bytes: int) -> bool:
        return num_bytes >= self._num_bytes.get(account, num_bytes + 1)

    def add(self, account: str, num_bytes: int) -> None:
        self._num_bytes[account] = num_bytes

    def look(self, *levels: int) -> None:
        """Ends the refusals if any amount of free or idle memory has grown since the last call.
        levels: further amounts of resources that are free or idle."""
        now = self._clock()
        before, self._levels = self._levels, (*levels, *self._broker.levels())
        has_grown = any(old < new for old, new in zip(before, self._levels, strict=False))
        if has_grown or now >= self._ends_s:
            self._num_bytes.clear()
            self._ends_s = now + RETRY_S


def _exact_item(num_bytes: int, lost: Idle, evict: Callable[[], None]) -> Item:
    return Item(num_bytes, lost, lambda: lost, evict)


def _evict_all(placements: Iterable[Placement], placed: dict[Placement | int, Item]) -> None:
    """Evicts the adapters at those of `placements` that are still in `placed`."""
    for placement in placements:
        if placement in placed:
            placed.pop(placement).evict()


class _Look(NamedTuple):
    """Result of a cache's last scan of the idle items of other owners. uses_left: number of further
    requests that may use the result. accounts: accounts that would lose the cheapest item, empty if
    there is no item. cost_s: `MARGIN` times the cost of this item, in seconds per byte."""

    uses_left: int
    accounts: Collection[str] = ()
    cost_s: float = 0.0
