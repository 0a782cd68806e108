"""Cached KV pages that no sequence uses, in the order of their eviction."""

from __future__ import annotations

from collections import Counter, OrderedDict, defaultdict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from heapq import heapify, heappop, heappush
from itertools import count
from math import ceil

from memory.accounts import Ask
from memory.errors import require
from memory.eviction.loss import NO_LIMIT, Idle, Loss
from memory.page_key import PAGE_TOKENS
from memory.pages import PagePool
from memory.reuse import Reuse

MAX_GONE = 1 << 14
"""Maximum number of evicted keys whose reuse is remembered."""
SECONDS_PER_TOKEN = 1e-3
"""Assumed seconds to prefill one token, until a prefill has been measured."""
MEMORY = 0.9
"""Factor by which each prefill measurement multiplies the sums of the earlier measurements."""


@dataclass(eq=False, slots=True)
class CachedPage:
    """Page of the prefix cache. `parent` is the page before it, and `children` are the pages that
    follow it in different sequences."""

    key: bytes
    id: int
    account: str
    adapter: str | None
    """Digest of the adapter that computed the page, None if the base model alone did."""
    parent: CachedPage | None
    reuse: Reuse
    """Recent matches of the page. Until the first match, the insertion counts as one use."""
    was_matched: bool = False
    children: set[CachedPage] = field(default_factory=set["CachedPage"])
    idle_order: int = 0
    """Position in the order in which pages turned idle. 0 while the page is in use."""


_Leaf = tuple[float, int, CachedPage]
"""Entry of a heap of idle pages without children: rank of the page's reuse, the page's `idle_order`
when the entry was added, and the page."""
_Turn = tuple[float, bool, float, str, int, CachedPage]
"""Entry of the heap from which `evict` chooses the next page. Each account has one valid entry, for
its least reused idle page without children. An entry has, in this order: the account's eviction
priority, whether the account is not the requesting account, the page's expected reuse, the
account's name, the page's `idle_order`, and the page."""


class PageReuse:
    """Estimate of the future matches of cached pages.

    The expected reuse of a page is its number of recent matches. For a page never matched, it is
    the fraction of recent pages that were ever matched, decaying with the page's age. The reuse of
    an evicted page is remembered. If the page is inserted again, that counts as a match, because
    the page would have been found if it had stayed in the cache.
    """

    def __init__(self) -> None:
        self._added, self._matched = Reuse(), Reuse()
        """Decaying counts of the pages added, and of the pages matched for the first time."""
        self._gone: OrderedDict[bytes, Reuse] = OrderedDict()
        """Reuse of evicted pages, by key. The page that was evicted first is first."""

    def add(self, page: CachedPage, now: float) -> None:
        """Records that the page was inserted into the cache."""
        self._added.note(now)
        gone = self._gone.pop(page.key, None)
        if gone is not None:
            self.record_match(page, now)
            page.reuse.note(now, gone.expected(now))

    def record_match(self, page: CachedPage, now: float) -> None:
        """Records that a sequence used the page instead of computing it."""
        if not page.was_matched:
            page.reuse, page.was_matched = Reuse(), True
            self._matched.note(now)
        page.reuse.note(now)

    def remember(self, page: CachedPage) -> None:
        """Remembers the reuse of an evicted page."""
        self._gone[page.key] = page.reuse if page.was_matched else Reuse()
        if len(self._gone) > MAX_GONE:
            self._gone.popitem(last=False)

    def chance(self, now: float) -> float:
        """Estimates the probability that a page is ever matched; 1/2 without observations."""
        return min((self._matched.expected(now) + 1) / (self._added.expected(now) + 2), 1.0)

    def expected(self, page: CachedPage, now: float) -> float:
        """Returns the expected number of future matches of the page."""
        return page.reuse.expected(now) * (1.0 if page.was_matched else self.chance(now))


@dataclass(slots=True)
class _IdleInExtent:
    """Idle pages of one extent."""

    pages: dict[int, CachedPage] = field(default_factory=dict[int, CachedPage])
    num_of: Counter[str] = field(default_factory=Counter[str])
    """Number of pages by account."""
    reuse: tuple[Reuse, Reuse] = field(default_factory=lambda: (Reuse(), Reuse()))
    """Sum of the reuse of the pages never matched, and sum of the reuse of the matched pages.
    `drainable` multiplies the first sum by the chance of a first match."""


@dataclass(slots=True)
class _IdleOfAccount:
    """Idle pages of one account."""

    num_pages: int = 0
    leaves: tuple[list[_Leaf], list[_Leaf]] = field(default_factory=lambda: ([], []))
    """Heaps of the pages without children: pages never matched, and matched pages. An entry is
    skipped if its page has been in use since the entry was added."""

    def push(self, page: CachedPage) -> None:
        """Adds a page without children to its heap."""
        heap = self.leaves[page.was_matched]
        heappush(heap, (page.reuse.rank, page.idle_order, page))
        if len(heap) > 2 * self.num_pages + 64:
            heap[:] = filter(_is_current, heap)
            heapify(heap)

    def least(self) -> Iterator[CachedPage]:
        """Yields the least reused page of each heap. Of equal pages, yields the longest idle."""
        for heap in self.leaves:
            while heap and not _is_current(heap[0]):
                heappop(heap)
            if heap:
                yield heap[0][2]


def _is_current(leaf: _Leaf) -> bool:
    """Whether the page has been idle since the entry was added. If so, it still has no children,
    because a page gets children only while it is in use."""
    return leaf[2].idle_order == leaf[1]


class IdlePages:
    """Pages of a prefix cache that no sequence uses, and that may therefore be evicted. A page is
    evicted after its children, which are idle, too. Hence each evicted page is a leaf."""

    def __init__(
        self, pool: PagePool, clock: Callable[[], float], forget: Callable[[CachedPage], None]
    ) -> None:
        """forget: function that removes an evicted page from the cache and releases it."""
        self.pool = pool
        self.num_pages = 0
        self.reuse = PageReuse()
        self._clock = clock
        self._forget = forget
        self._in_extent: defaultdict[int, _IdleInExtent] = defaultdict(_IdleInExtent)
        """Idle pages by extent. Extents without idle pages have no entry."""
        self._of_account: defaultdict[str, _IdleOfAccount] = defaultdict(_IdleOfAccount)
        """Idle pages by account. Accounts without idle pages have no entry."""
        self._orders = count(1)
        self._prefill = (float(PAGE_TOKENS), PAGE_TOKENS * SECONDS_PER_TOKEN)
        """Decaying sums of the tokens and of the seconds of prefills."""

    @property
    def page_cost_s(self) -> float:
        """Estimated seconds to compute a page again, based on recent prefills."""
        num_tokens, seconds = self._prefill
        return PAGE_TOKENS * seconds / num_tokens

    def record_prefill(self, num_tokens: int, seconds: float) -> None:
        """Records how long the prefill of `num_tokens` tokens took."""
        old_tokens, old_seconds = self._prefill
        self._prefill = MEMORY * old_tokens + num_tokens, MEMORY * old_seconds + seconds

    def num_of(self, account: str) -> int:
        """Returns the number of the account's idle pages."""
        return self._of_account[account].num_pages if account in self._of_account else 0

    def add(self, page: CachedPage, now: float) -> None:
        """Adds a page that its last sequence has released."""
        page.idle_order = next(self._orders)
        self.num_pages += 1
        in_extent = self._in_extent[self.pool.extent_of(page.id)]
        in_extent.pages[page.id] = page
        in_extent.num_of[page.account] += 1
        in_extent.reuse[page.was_matched].note(now, page.reuse.expected(now))
        of_account = self._of_account[page.account]
        of_account.num_pages += 1
        if not page.children:
            of_account.push(page)

    def remove(self, page: CachedPage, now: float) -> None:
        """Removes a page that is used again or evicted."""
        page.idle_order = 0
        self.num_pages -= 1
        extent = self.pool.extent_of(page.id)
        in_extent = self._in_extent[extent]
        del in_extent.pages[page.id]
        in_extent.num_of[page.account] -= 1
        if not in_extent.num_of[page.account]:
            del in_extent.num_of[page.account]
        in_extent.reuse[page.was_matched].note(now, -page.reuse.expected(now))
        if not in_extent.pages:
            del self._in_extent[extent]
        of_account = self._of_account[page.account]
        of_account.num_pages -= 1
        if not of_account.num_pages:
            del self._of_account[page.account]

    def num_evictable(self, ask: Ask) -> int:
        """Returns the number of pages that `evict` could free for the request."""
        page_bytes = self.pool.page_bytes
        return sum(
            ceil(min(ask.most(name) / page_bytes, idle.num_pages))
            for name, idle in self._of_account.items()
        )

    def evict(self, num_pages: int, ask: Ask, limit: Loss = NO_LIMIT) -> int:
        """Evicts up to `num_pages` pages that may be evicted for the request, and returns the
        number evicted. Evicts from the account with the lowest eviction priority, and there the
        least reused leaf first.

        limit: pages whose loss is greater than this limit are not evicted.
        """
        now = self._clock()
        max_reuse = limit.cost_s * self.pool.page_bytes / self.page_cost_s
        num_evicted = 0
        turns = {name: self._turn(name, ask, now) for name in self._of_account}
        heap = [turn for turn in turns.values() if turn is not None]
        heapify(heap)
        while num_evicted < num_pages and heap:
            turn = heappop(heap)
            priority, _, reuse, account, _, page = turn
            if turn is not turns[account]:
                continue  # The entry is outdated, because the account's pages have changed.
            if (priority, reuse) > (limit.priority, max_reuse) or not ask.may_take(account):
                break
            self._evict(page, now)
            num_evicted += 1
            for name in [account] if page.parent is None else {account, page.parent.account}:
                turn = turns[name] = self._turn(name, ask, now)
                if turn is not None:
                    heappush(heap, turn)
        return num_evicted

    def drainable(self) -> dict[int, Idle]:
        """Returns the extents whose allocated pages are all idle, with the cost of evicting these
        pages: the seconds to compute them again, times their expected reuse. `lost_with` may return
        a higher cost, because it includes descendants in other extents."""
        now = self._clock()
        chance, cost_s = self.reuse.chance(now), self.page_cost_s
        found: dict[int, Idle] = {}
        for extent, idle in self._in_extent.items():
            if len(idle.pages) == self.pool.num_used_in(extent):
                never, matched = idle.reuse
                reuse = chance * never.expected(now) + matched.expected(now)
                found[extent] = Idle(idle.num_of, cost_s * reuse)
        return found

    def lost_with(self, extent: int) -> Idle:
        """Returns the exact cost of draining the extent. It includes the cost of the descendants in
        other extents, which `drain` evicts, too."""
        now = self._clock()
        in_extent = self._in_extent.get(extent, _IdleInExtent())
        pages = self._with_descendants(in_extent.pages.values())
        reuse = sum(self.reuse.expected(page, now) for page in pages)
        return Idle({page.account for page in pages}, reuse * self.page_cost_s)

    def drain(self, extent: int) -> None:
        """Evicts the extent's idle pages and all their descendants."""
        self.evict_each(self._in_extent.get(extent, _IdleInExtent()).pages.values())

    def evict_each(self, pages: Iterable[CachedPage]) -> None:
        """Evicts the pages, all of which must be idle, and all their descendants."""
        now = self._clock()
        for page in self._with_descendants(pages):
            self._evict(page, now)

    def _turn(self, account: str, ask: Ask, now: float) -> _Turn | None:
        """Returns the account's entry in the heap of `evict`. Returns None if the account has no
        idle page without children, for example because all have children of another account."""
        if account not in self._of_account:
            return None
        leaves = [(self.reuse.expected(p, now), p) for p in self._of_account[account].least()]
        if not leaves:
            return None
        reuse, page = min(leaves, key=lambda leaf: leaf[0])
        return ask.priority(account), account != ask.name, reuse, account, page.idle_order, page

    def _with_descendants(self, pages: Iterable[CachedPage]) -> list[CachedPage]:
        """Returns the pages and their descendants, descendants first."""
        found: dict[CachedPage, None] = {}
        for page in pages:
            below = [page]
            for each in below:  # `below` grows during the loop.
                below.extend(child for child in each.children if child not in found)
            found.update((each, None) for each in reversed(below))
        return list(found)

    def _evict(self, page: CachedPage, now: float) -> None:
        require(page.idle_order > 0, f"page {page.id} is evicted while it is in use")
        require(not page.children, f"page {page.id} is evicted before the pages after it")
        self.remove(page, now)
        self.reuse.remember(page)
        self._forget(page)
        parent = page.parent
        if parent is not None and parent.idle_order and not parent.children:
            self._of_account[parent.account].push(parent)

    def check_integrity(self, idle: set[CachedPage]) -> None:
        """Raises IntegrityError unless exactly the pages in `idle` are filed by extent and by
        account, and exactly the pages without children are filed as leaves."""
        filed = [page for each in self._in_extent.values() for page in each.pages.values()]
        require(
            set(filed) == idle and len(filed) == len(idle) == self.num_pages,
            f"{len(idle)} pages are idle, {len(filed)} filed by extent, {self.num_pages} counted",
        )
        for extent, each in self._in_extent.items():
            require(
                each.num_of == Counter(page.account for page in each.pages.values()),
                f"the idle pages of extent {extent} are filed under others' names",
            )
        num_of = Counter(page.account for page in idle)
        counted = {name: each.num_pages for name, each in self._of_account.items()}
        require(num_of == counted, f"idle pages by account are {num_of}, counted {counted}")
        entries = [e for each in self._of_account.values() for heap in each.leaves for e in heap]
        leaves = {page for _, order, page in entries if page.idle_order == order}
        expected = {page for page in idle if not page.children}
        require(leaves == expected, f"{len(expected)} idle leaves, {len(leaves)} filed")
