"""Eviction of idle pages and adapters when the arena is short of memory. Evicts from the account
that holds the most for its weight, and there the items that are cheapest to make again."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from functools import partial
from itertools import pairwise
from threading import Lock
from typing import NamedTuple, Protocol

from memory.accounts import NO_TENANT, Ask, BytesHeld
from memory.arena import Arena
from memory.errors import require
from memory.eviction.adapter_memory import AdapterMemory, Placement
from memory.eviction.loss import NO_LIMIT, Idle, Item, Loss, by_loss
from memory.page_source import PageHolder

MARGIN = 2.0
"""Factor by which an item of another cache or kind (KV or adapters) must be cheaper than an own
item to be evicted instead. Without it, two owners of equally valuable items would take the same
bytes from each other in turn."""
LOOK_HOLDS = 32
"""Number of page shortages for which one scan of the other holders is reused."""


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
    the pages or adapters whose loss costs least per byte: seconds to make the item again, times its
    expected reuse.

    KV pages are evicted one by one for their own model, and by whole extents for other models and
    for adapters. Adapters are evicted one by one. The adapters' floor and ceiling (see `Arena`)
    limit how much memory can move between adapters and KV. Memory in use is never evicted.
    """

    def __init__(self, arena: Arena, adapters: AdapterMemory | None = None) -> None:
        """adapters: memory of the adapters, if they share the arena."""
        self.lock = Lock()
        """Held while reading or changing the owners of the arena's bytes. The engine thread
        releases it while it computes a step, because the bytes that the step uses are not
        evicted."""
        self._arena = arena
        self._adapters = adapters
        self._caches: dict[str, PageHolder] = {}
        self.holders: list[AdapterHolder] = []
        """Holders of the adapters of all models."""
        self._looks: dict[PageHolder, _Look] = {}

    def add_cache(self, owner: str, cache: PageHolder) -> Callable[[], None]:
        """Implements `PageSource.add_cache`."""
        self._caches[owner] = cache

        def remove() -> None:
            del self._caches[owner]
            self._looks.pop(cache, None)

        return remove

    def add_holder(self, holder: AdapterHolder) -> Callable[[], None]:
        """Adds a holder. Returns a function that removes it, to be called when it has no
        placements."""
        self.holders.append(holder)
        return partial(self.holders.remove, holder)

    @property
    def bytes_held(self) -> BytesHeld:
        return self._arena.bytes_held

    @property
    def is_shared(self) -> bool:
        return len(self._caches) > 1

    @property
    def num_evictions(self) -> int:
        """Number of adapters of all models that have been evicted so far."""
        return sum(holder.num_evictions for holder in self.holders)

    def make_room(self, cache: PageHolder, num_pages: int, ask: Ask) -> bool:
        """Implements `PageSource.make_room`. When it returns False, usually nothing was evicted.
        Some items may have been, if fewer extents than estimated could be freed."""
        pool = cache.pool
        if num_pages <= pool.num_free or self._evict_own(cache, num_pages - pool.num_free, ask):
            return True
        others = [
            item
            for item in self._extents(without=cache)
            if all(ask.most(name) > 0 for name in item.lost.accounts)
        ]
        num_own = cache.num_evictable(ask)
        if num_pages > pool.num_free + num_own + len(others) * pool.pages_per_extent:
            return False
        for loss, item in by_loss(others, ask):
            cache.evict(num_pages - pool.num_free, ask, loss)
            accounts = item.exact().accounts
            if num_pages <= pool.num_free:
                self._looks[cache] = _Look(LOOK_HOLDS, accounts, loss.cost_s)
                return True
            if ask.may_take(*accounts):
                item.evict()
        cache.evict(num_pages - pool.num_free, ask)
        self._looks[cache] = _Look(LOOK_HOLDS)
        return num_pages <= pool.num_free

    def _evict_own(self, cache: PageHolder, num_pages: int, ask: Ask) -> bool:
        """Evicts the missing pages from the cache itself, if they cost less than every item of the
        other holders at the last scan. Returns False if a new scan is needed. The result of a scan
        is reused because a scan visits every idle item: with a full cache of 4,000 pages, scanning
        for each page took 12 ms per page instead of 0.8 ms."""
        look = self._looks.get(cache)
        if look is None or look.uses_left == 0:
            return False
        if num_pages > cache.num_evictable(ask):
            return False
        self._looks[cache] = look._replace(uses_left=look.uses_left - 1)
        limit = Loss(ask.priority(*look.accounts), look.cost_s) if look.accounts else NO_LIMIT
        return cache.evict(num_pages, ask, limit) == num_pages

    def allocate_adapter(
        self, ends: Sequence[int], account: str = NO_TENANT.name, *, is_first: bool = False
    ) -> Placement | None:
        """Allocates memory for an adapter, evicting the items of least loss. Returns None if too
        little may be evicted. ends: byte positions in the image at which its factors end. is_first:
        whether the account uses no other adapter."""
        assert self._adapters is not None, "no adapters share this arena"
        # The levels are copied, because evictions change them. Otherwise a later eviction for the
        # same request could be refused after earlier ones were made.
        now = BytesHeld(self.bytes_held.accounts, self.bytes_held.held.items())
        ask = Ask(now, account, self._adapters.rounded(ends[-1]), is_first=is_first)
        placement = self._adapters.allocate(ends, account)
        if placement is None:
            for victims in self._victims(self._adapters, ends, ask):
                for item in victims:
                    item.evict()
                placement = self._adapters.allocate(ends, account)
                if placement is not None:
                    break
        return placement

    def allocate_weights(self, owner: str, num_extents: int) -> int:
        """Allocates up to `num_extents` more extents to the owner, evicting idle items. Returns the
        number allocated. The rest may become obtainable when items that are in use now turn
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

    def held_bytes(self) -> tuple[Counter[str], Counter[str]]:
        """Returns the bytes of pages and of adapters, each by account."""
        pages = Counter[str]()
        for cache in self._caches.values():
            pages.update(cache.pool.held_bytes())
        return pages, Counter() if self._adapters is None else self._adapters.held_bytes()

    def check_integrity(self) -> None:
        """Raises IntegrityError unless each account is charged for exactly what it holds."""
        pages, adapters = self.held_bytes()
        held, charged = pages + adapters, self.bytes_held.held
        require(held == charged, f"accounts hold {held}, charged are {charged}")

    def _placed(self, *, with_awaited: bool) -> dict[Placement, Item]:
        """Returns the idle adapters as evictable items, by placement."""
        return {
            placement: Item(
                placement.num_bytes, lost, lambda lost=lost: lost, partial(holder.evict, placement)
            )
            for holder in self.holders
            for placement, lost in holder.idle(with_awaited=with_awaited).items()
        }

    def _paged(self, without: PageHolder | None = None) -> dict[int, Item]:
        """Returns the extents whose used pages are all idle, as evictable items, except the extents
        of the cache `without`."""
        size = self._arena.extent_bytes
        return {
            extent: Item(
                size, _margin(lost), partial(self._lost_with, extent), partial(self._drain, extent)
            )
            for cache in self._caches.values()
            if cache is not without
            for extent, lost in cache.drainable().items()
        }

    def _extents(self, without: PageHolder | None = None) -> list[Item]:
        """Returns the extents that can be freed for KV or weights, as evictable items."""
        size = self._arena.extent_bytes
        items = [*self._paged(without).values()]
        if self._adapters is None:
            return items
        placed = self._placed(with_awaited=True)
        for extent, placements in self._adapters.by_extent().items():
            if self._arena.is_for_kv(extent) and all(each in placed for each in placements):
                accounts = [name for each in placements for name in placed[each].lost.accounts]
                # Evicting an adapter frees all of its extents, so each extent bears a share of the
                # cost.
                shares = (
                    placed[each].lost.cost_s * min(1.0, size / each.num_bytes)
                    for each in placements
                )
                lost = _margin(Idle(accounts, sum(shares)))
                clear = partial(self._clear, extent, placed)
                items.append(Item(size, lost, lambda lost=lost: lost, clear))
        return items

    def _lost_with(self, extent: int) -> Idle:
        """Returns the cost of freeing an extent of pages, including pages in other extents that
        follow its pages."""
        owner = self._arena.kv_owner(extent)
        return Idle((), 0.0) if owner is None else _margin(self._caches[owner].lost_with(extent))

    def _drain(self, extent: int) -> None:
        """Frees an extent of idle pages, unless an earlier eviction has already freed it."""
        owner = self._arena.kv_owner(extent)
        if owner is not None:
            self._caches[owner].drain(extent)

    def _clear(self, extent: int, placed: Mapping[Placement, Item]) -> None:
        """Evicts the adapters that have bytes in the extent."""
        assert self._adapters is not None
        for placement in self._adapters.by_extent().get(extent, ()):
            placed[placement].evict()

    def _victims(
        self, adapters: AdapterMemory, ends: Sequence[int], ask: Ask
    ) -> Iterator[list[Item]]:
        """Yields lists of items to evict to make room for an image, the least loss first. If a
        factor needs adjacent extents, the first list frees these. The next list frees enough bytes,
        and each later list has one more item, because an image can be cut only between factors and
        may still not fit. Yields nothing if all evictable items together are too small."""
        size = self._arena.extent_bytes
        items = self._placed(with_awaited=False) | self._paged()
        items = {key: item for key, item in items.items() if ask.may_take(*item.lost.accounts)}
        num_new = self._arena.adapter_ceiling - self._arena.num_adapter_extents
        placed = [item.num_bytes for key, item in items.items() if isinstance(key, Placement)]
        # Freed extents of pages help only until the adapters reach their ceiling.
        num_paged = min(max(num_new - self._arena.num_free, 0), len(items) - len(placed))
        missing = adapters.rounded(ends[-1]) - adapters.num_hole_bytes
        missing -= min(num_new, self._arena.num_free) * size
        if missing > sum(placed) + num_paged * size:
            return
        keys = {item: key for key, item in items.items()}
        num_adjacent = max(-(-(end - start) // size) for start, end in pairwise([0, *ends]))
        if num_adjacent > 1:
            row = self._row(adapters, num_adjacent, items)
            if row is None:
                return
            yield row
            for item in row:
                del keys[item]
                missing -= item.num_bytes
        victims: list[Item] = []
        for _, item in by_loss(keys, ask):
            if not isinstance(keys[item], Placement):
                if not num_paged or not ask.may_take(*item.exact().accounts):
                    continue
                num_paged -= 1
            victims.append(item)
            missing -= item.num_bytes
            if missing <= 0:
                yield victims
                victims = []

    def _row(
        self, adapters: AdapterMemory, num_extents: int, items: Mapping[Placement | int, Item]
    ) -> list[Item] | None:
        """Returns the items to evict to free `num_extents` adjacent extents, the highest that only
        these items use. Returns None if there are no such extents."""
        by_extent = adapters.by_extent()
        row: list[list[Item]] = []
        for extent in reversed(range(self._arena.num_extents)):
            keys = [] if self._arena.is_free(extent) else by_extent.get(extent, [extent])
            held = [items[key] for key in keys if key in items]
            row = [*row, held] if len(held) == len(keys) else []
            if len(row) == num_extents:
                return list(dict.fromkeys(item for held in row for item in held))
        return None


def _margin(lost: Idle) -> Idle:
    return Idle(lost.accounts, MARGIN * lost.cost_s)


class _Look(NamedTuple):
    """Result of a scan of the other holders, valid for `uses_left` more shortages. accounts,
    cost_s: accounts of their cheapest item, and its cost in seconds per byte. accounts is empty if
    they have no evictable item."""

    uses_left: int
    accounts: Collection[str] = ()
    cost_s: float = 0.0
