"""Eviction of idle pages and adapters when the arena is short of memory. Evicts from the account
that holds the most for its weight."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from functools import partial
from heapq import heapify, heappop, heappush
from itertools import chain, pairwise
from math import ceil, inf
from typing import NamedTuple, Protocol

from memory.accounts import NO_TENANT, Ask, Holdings, Tenant
from memory.arena import Arena
from memory.errors import require
from memory.eviction.adapter_memory import AdapterMemory, Placement
from memory.idle_pages import IdlePages

MARGIN = 2.0
"""Factor by which an item of another cache or kind (KV or adapters) must be cheaper than an own
item to be evicted instead. Without this factor, two owners of equally valuable items would evict
each other's items in turn."""
SLACK = 1.25
"""Maximum ratio of the chosen item's cost to the lowest cost. Finding the exact minimum takes far
longer."""
LOOK_HOLDS = 32
"""Number of further requests for pages for which a cache uses the result of one scan of other
owners' idle items, which are pages of other caches and adapters. With 8,000 idle pages of two
models, a scan for each page took 1.9 ms per page instead of 0.08 ms."""


class Loss(NamedTuple):
    """Sort key of items that may be evicted. priority: eviction priority of the accounts that would
    lose something (see `Ask.priority`). cost_s: seconds to make the item again, times its expected
    reuse, per byte."""

    priority: float
    cost_s: float


class Item(NamedTuple):
    """Idle adapters or pages that are evicted together. key: the adapter's placement, or the number
    of the extent that becomes free. accounts: accounts that lose something. cost_s: seconds to make
    the item again, times its expected reuse. exact: function that returns the accounts and the cost
    including pages in other extents that must be evicted, too, because they follow the item's
    pages. None if there are no such pages."""

    key: Placement | int
    accounts: Collection[str]
    num_bytes: int
    cost_s: float
    evict: Callable[[], None]
    exact: Callable[[], tuple[Collection[str], float]] | None = None

    def loss(self, ask: Ask) -> Loss:
        return Loss(ask.priority(self.accounts), self.cost_s / self.num_bytes)


def by_loss(items: Iterable[Item], ask: Ask) -> Iterator[Item]:
    """Yields the items with their exact costs, in order of their loss. Costs may be out of order by
    a factor of up to `SLACK`. Computes the exact loss only of items that may be next."""
    heap = [(item.loss(ask), number, item) for number, item in enumerate(items)]
    heapify(heap)
    while heap:
        _, number, item = heappop(heap)
        if item.exact is not None:
            accounts, cost_s = item.exact()
            item = item._replace(accounts=accounts, cost_s=cost_s, exact=None)
            loss = item.loss(ask)
            if heap and loss > (heap[0][0].priority, SLACK * heap[0][0].cost_s):
                heappush(heap, (loss, number, item))
                continue
        yield item


class AdapterHolder(Protocol):
    """Adapters of one model that the broker may evict."""

    num_evictions: int
    """Number of adapters evicted so far."""

    def idle(self, *, with_awaited: bool) -> Mapping[Placement, float]:
        """Returns the adapters that may be evicted, because they are neither leased, loading nor
        pinned, with the cost of evicting each, in seconds. with_awaited: whether to include
        adapters that a caller is about to lease."""
        ...

    def evict(self, placement: Placement) -> None:
        """Frees one of the idle placements."""
        ...


class MemoryBroker:
    """`PageSource` that chooses the items to evict among all caches and adapters. It evicts from
    the account that holds the most for its weight (see accounts.py). Within an account, it evicts
    the cache's own pages in the order of their last use, and adapters and other caches' extents in
    the order of their loss per byte.

    KV pages are evicted one by one for their own model, and by whole extents for other models and
    for adapters. Adapters are evicted one by one. The adapters' floor and ceiling (see `Arena`)
    limit how much memory can move between adapters and KV. Memory in use is never evicted.
    """

    def __init__(self, arena: Arena, adapters: AdapterMemory) -> None:
        """adapters: memory of the adapters of all models, in the same arena."""
        self.lock = arena.lock
        self.bytes_held = arena.bytes_held
        self._arena = arena
        self._adapters = adapters
        self._caches: dict[IdlePages, _Look] = {}
        """For each cache, the result of the last scan of idle items that other owners hold."""
        self.holders: list[AdapterHolder] = []

    def add_cache(self, idle: IdlePages) -> Callable[[], None]:
        """Implements `PageSource.add_cache`."""
        self._caches[idle] = _Look()
        return partial(self._caches.__delitem__, idle)

    def add_holder(self, holder: AdapterHolder) -> Callable[[], None]:
        """Adds a holder. Returns a function that removes the holder. Call this function only when
        the holder has no placements."""
        self.holders.append(holder)
        return partial(self.holders.remove, holder)

    @property
    def num_evictions(self) -> int:
        """Number of adapters of all models that have been evicted so far."""
        return sum(holder.num_evictions for holder in self.holders)

    def may_displace(
        self, idle: IdlePages, tenant: Tenant, other: Tenant, *, is_first: bool
    ) -> bool:
        """Implements `PageSource.may_displace`."""
        return self._ask(idle, tenant, 1, is_first=is_first).may_take([other.name])

    def make_room(
        self, idle: IdlePages, tenant: Tenant, num_pages: int, num_beside: int, *, is_first: bool
    ) -> bool:
        """Implements `PageSource.make_room`. If it returns False, it has usually evicted nothing.
        It may have evicted some items if it could free fewer extents than it had estimated."""
        pool = idle.pool
        ask = self._ask(idle, tenant, num_pages, is_first=is_first)
        num_pages += num_beside
        if num_pages <= pool.num_free:
            return True
        spare = idle.num_of(tenant.name) * pool.page_bytes
        num_own = sum(
            ceil(min(ask.most(name, spare) / pool.page_bytes, idle.num_of(name)))
            for name in idle.accounts
        )
        look = self._caches[idle]
        if look.uses_left and num_pages <= pool.num_free + num_own:
            self._caches[idle] = look._replace(uses_left=look.uses_left - 1)
            self._evict_pages(idle, num_pages, ask, look.limit(ask))
            if num_pages <= pool.num_free:
                return True
        items = [
            item
            for item in self._extents(without=idle)
            if all(ask.most(name, spare) > 0 for name in item.accounts)
        ]
        num_others = len(items) * pool.pages_per_extent
        if num_pages > pool.num_free + num_own + num_others:
            return False
        self._caches[idle] = _Look(LOOK_HOLDS)
        for item in by_loss(items, ask):
            look = _Look(LOOK_HOLDS, item.accounts, MARGIN * item.cost_s / item.num_bytes)
            self._evict_pages(idle, num_pages, ask, look.limit(ask))
            if num_pages <= pool.num_free:
                self._caches[idle] = look
                return True
            if ask.may_take(item.accounts):
                item.evict()
        self._evict_pages(idle, num_pages, ask, _Look().limit(ask))
        return num_pages <= pool.num_free

    def _ask(self, idle: IdlePages, tenant: Tenant, num_pages: int, *, is_first: bool) -> Ask:
        """Records and returns a request for pages."""
        self.bytes_held.accounts.note(tenant)
        num_bytes = num_pages * idle.pool.page_bytes
        return Ask(self.bytes_held, tenant.name, num_bytes, is_first=is_first)

    def _evict_pages(self, idle: IdlePages, num_free: int, ask: Ask, limit: Loss) -> None:
        """Evicts pages of one cache until `num_free` pages are free in its pool. Evicts from the
        account with the lowest eviction priority, and there the least recently used page first.
        Pages whose loss is greater than the limit, and pages that may not be evicted for the
        request, stay."""
        turns: dict[str, _Turn] = {}
        heap: list[_Turn] = []

        def take_turn(account: str) -> None:
            """Adds the account's next page. A page that was added before is no longer valid."""
            if (page := idle.oldest(account)) is not None:
                cost_s = idle.loss_s(page) / idle.pool.page_bytes
                turns[account] = ask.priority([account]), account != ask.name, cost_s, account
                heappush(heap, turns[account])

        for account in idle.accounts:
            take_turn(account)
        while idle.pool.num_free < num_free and heap:
            turn = heappop(heap)
            priority, _, cost_s, account = turn
            page = idle.oldest(account)
            if page is None or turn is not turns[account]:
                continue
            if (priority, cost_s) > limit or not ask.may_take([account]):
                return
            idle.evict(page)
            for name in {account} if page.parent is None else {account, page.parent.account}:
                take_turn(name)

    def allocate_adapter(
        self, ends: Sequence[int], account: str = NO_TENANT.name, *, is_first: bool = False
    ) -> Placement | None:
        """Allocates memory for an adapter, evicting the items of least loss. Returns None, having
        evicted nothing, if too little may be evicted. ends: byte positions in the image at which
        its factors end. is_first: whether the account uses no other adapter."""
        placement = self._adapters.allocate(ends, account)
        if placement is not None:
            return placement
        # The request uses a copy of the amounts held, because evictions change them. Without the
        # copy, the second eviction for a request could be refused after the first was made.
        now = Holdings(self.bytes_held.accounts, self.bytes_held.held.items())
        ask = Ask(now, account, self._adapters.rounded(ends[-1]), is_first=is_first)
        for item in self._victims(ends, ask):
            item.evict()
        return self._adapters.allocate(ends, account)

    def allocate_weights(self, owner: str, num_extents: int) -> int:
        """Allocates up to `num_extents` more extents to the owner, evicting idle items. Returns the
        number allocated. More extents may become available when items that are in use become
        idle."""
        missing = num_extents - self._arena.allocate_weights(owner, num_extents)
        at_any_cost = Ask(self.bytes_held, NO_TENANT.name, 0, is_first=True)
        items = self._extents() if missing else []
        for item in by_loss(items, at_any_cost):
            if not missing:
                break
            item.evict()
            missing -= self._arena.allocate_weights(owner, missing)
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

    def _placed(self, *, for_adapter: bool) -> dict[Placement, Item]:
        """Returns the idle adapters. for_adapter: whether another adapter needs the memory. If so,
        adapters that a caller is about to lease are left out, and costs are divided by `MARGIN`, so
        that adapters are evicted before pages of similar cost."""
        margin = MARGIN if for_adapter else 1.0
        found: dict[Placement, Item] = {}
        for holder in self.holders:
            for placement, cost_s in holder.idle(with_awaited=not for_adapter).items():
                accounts = [self._adapters.account_of(placement)]
                evict = partial(holder.evict, placement)
                size = placement.num_bytes
                found[placement] = Item(placement, accounts, size, cost_s / margin, evict)
        return found

    def _paged(self, without: IdlePages | None = None) -> dict[int, Item]:
        """Returns the extents of KV pages in which no sequence uses a page. Leaves out the extents
        of the cache `without`."""
        size = self._arena.extent_bytes
        return {
            extent: Item(
                *(extent, idle.accounts_in(extent), size, cost_s, partial(idle.drain, extent)),
                exact=partial(idle.lost_with, extent),
            )
            for idle in self._caches
            if idle is not without
            for extent, cost_s in idle.drainable().items()
        }

    def _extents(self, without: IdlePages | None = None) -> list[Item]:
        """Returns the extents that can be freed for KV or weights."""
        size = self._arena.extent_bytes
        items = [*self._paged(without).values()]
        placed = self._placed(for_adapter=False)
        for extent, placements in self._adapters.by_extent().items():
            if self._arena.is_for_kv(extent) and placed.keys() >= set(placements):
                accounts = [name for each in placements for name in placed[each].accounts]
                # Evicting an adapter frees all of its extents, so each extent bears a share of the
                # cost.
                shares = (placed[p].cost_s * min(1.0, size / p.num_bytes) for p in placements)
                evict = partial(_evict_all, placements, placed)
                items.append(Item(extent, accounts, size, sum(shares), evict))
        return items

    def _victims(self, ends: Sequence[int], ask: Ask) -> list[Item]:
        """Returns the items to evict for an image, first those of least loss. If a factor needs
        adjacent extents, begins with the items that free them. Returns no items if evicting all
        would not make enough room."""
        placed, paged = self._placed(for_adapter=True), self._paged()
        items = {key: each for key, each in (placed | paged).items() if ask.may_take(each.accounts)}
        num_adjacent = max(
            -(-(end - start) // self._arena.extent_bytes) for start, end in pairwise([0, *ends])
        )
        row = self._row(num_adjacent, items) if num_adjacent > 1 else []
        rest = by_loss([item for key, item in items.items() if key not in row], ask)
        trial, victims = self._adapters.trial(), list[Item]()
        for item in chain([items[key] for key in row], rest):
            if isinstance(item.key, Placement):
                trial.free(item.key)
            elif item.key in row or (trial.needs_extents and ask.may_take(item.accounts)):
                trial.free_extent(item.key)
            else:
                continue
            victims.append(item)
            has_room = len(victims) >= len(row) and ends[-1] <= trial.num_free_bytes
            if has_room and trial.allocate(ends) is not None:
                return victims
        return []

    def _row(
        self, num_extents: int, items: Mapping[Placement | int, Item]
    ) -> list[Placement | int]:
        """Returns the keys of the items whose eviction leaves `num_extents` adjacent extents free,
        at the highest possible place in the arena. Returns none if there is no such place."""
        by_extent = self._adapters.by_extent()
        row: list[Sequence[Placement | int]] = []
        for extent in reversed(range(self._arena.num_extents)):
            keys = [] if self._arena.is_free(extent) else by_extent.get(extent, [extent])
            row = [*row, keys] if items.keys() >= set(keys) else []
            if len(row) == num_extents:
                return list(dict.fromkeys(key for keys in row for key in keys))
        return []


def _evict_all(placements: Iterable[Placement], placed: dict[Placement, Item]) -> None:
    """Evicts the adapters at those of `placements` that are still in `placed`."""
    for placement in placements:
        if placement in placed:
            placed.pop(placement).evict()


class _Look(NamedTuple):
    """Result of a cache's last scan of the idle items of other owners. uses_left: number of further
    requests that may use the result. accounts: accounts that would lose the cheapest item, None if
    there is no item. cost_s: `MARGIN` times the cost of this item, in seconds per byte."""

    uses_left: int = 0
    accounts: Collection[str] | None = None
    cost_s: float = inf

    def limit(self, ask: Ask) -> Loss:
        """Returns the largest loss of an own page that is evicted before the item."""
        return Loss(inf if self.accounts is None else ask.priority(self.accounts), self.cost_s)


_Turn = tuple[float, bool, float, str]
"""Entry of the heap from which `_evict_pages` chooses the next page, which is the least recently
used page of one account: the account's eviction priority, whether the account is not the requesting
account, the page's cost per byte, and the account's name."""
