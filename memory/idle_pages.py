"""Cached KV pages that no sequence uses."""

from __future__ import annotations

from collections import OrderedDict, defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field

from memory.errors import require
from memory.page_key import PAGE_TOKENS
from memory.pages import PagePool
from memory.reuse import RecentRatio, Reuse

SECONDS_PER_TOKEN = 1e-3
"""Assumed seconds to prefill one token, until a prefill has been measured."""


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
    children: set[CachedPage] = field(default_factory=set["CachedPage"])
    is_idle: bool = False
    uses: Reuse = field(default_factory=Reuse)
    """Count of recent sequences that used the page and were the last to release it."""


@dataclass(slots=True)
class _OfAccount:
    """Idle pages of one account. order: the one that turned idle first is first. aside: pages that
    were first, but can be evicted only after pages of other accounts."""

    order: OrderedDict[CachedPage, None] = field(default_factory=OrderedDict[CachedPage, None])
    aside: dict[CachedPage, None] = field(default_factory=dict[CachedPage, None])

    @property
    def pages(self) -> list[CachedPage]:
        return [*self.order, *self.aside]


class IdlePages:
    """Pages of a prefix cache that no sequence uses, and that may therefore be evicted, by account
    and least recently used first.

    The pages after an idle page are idle, too, and turned idle before it. Therefore they are
    evicted before it, unless an account holds pages after those of another account.
    """

    def __init__(
        self, pool: PagePool, clock: Callable[[], float], forget: Callable[[CachedPage], None]
    ) -> None:
        """forget: function that removes an evicted page from the cache and releases it."""
        self.pool = pool
        self.num_pages = 0
        self._clock = clock
        self._forget = forget
        self._of_account: defaultdict[str, _OfAccount] = defaultdict(_OfAccount)
        """Idle pages by account. Accounts without idle pages have no entry."""
        self._in_extent: defaultdict[int, dict[CachedPage, None]] = defaultdict(dict)
        self._uses: defaultdict[int, Reuse] = defaultdict(Reuse)
        """Sum of the counts `CachedPage.uses` of the idle pages of each extent."""
        self.token_s = RecentRatio(PAGE_TOKENS * SECONDS_PER_TOKEN, PAGE_TOKENS)
        """Seconds per token of recent prefills, which the scheduler measures."""

    @property
    def page_cost_s(self) -> float:
        """Estimated seconds to compute a page again, based on recent prefills."""
        return PAGE_TOKENS * self.token_s.value

    def loss_s(self, page: CachedPage) -> float:
        """Returns the cost of evicting the page: seconds to compute it, times expected reuse."""
        return self.page_cost_s * page.uses.expected(self._clock())

    @property
    def accounts(self) -> Collection[str]:
        """Accounts that have idle pages."""
        return self._of_account.keys()

    def num_of(self, account: str) -> int:
        """Returns the number of the account's idle pages."""
        own = self._of_account.get(account, _OfAccount())
        return len(own.order) + len(own.aside)

    def oldest(self, account: str) -> CachedPage | None:
        """Returns the account's least recently used page that no other cached page follows. Returns
        None if there is none, because all are followed by pages of other accounts."""
        own = self._of_account.get(account, _OfAccount())
        while own.order:
            page = next(iter(own.order))
            if not page.children:
                return page
            del own.order[page]
            own.aside[page] = None
        return None

    def add(self, page: CachedPage, now: float, *, was_used: bool) -> None:
        """Adds a page that its last sequence has released. was_used: whether this sequence used the
        page. If not, it only looked for its prefix."""
        page.is_idle = True
        page.uses.note(now, float(was_used))
        self.num_pages += 1
        self._of_account[page.account].order[page] = None
        extent = self.pool.extent_of(page.id)
        self._in_extent[extent][page] = None
        self._uses[extent].note(now, page.uses.count)

    def remove(self, page: CachedPage, now: float) -> None:
        """Removes a page that is used again or evicted."""
        page.is_idle = False
        self.num_pages -= 1
        own = self._of_account[page.account]
        del (own.aside if page in own.aside else own.order)[page]
        if not (own.order or own.aside):
            del self._of_account[page.account]
        extent = self.pool.extent_of(page.id)
        del self._in_extent[extent][page]
        self._uses[extent].note(now, -page.uses.expected(now))
        if not self._in_extent[extent]:
            del self._in_extent[extent], self._uses[extent]

    def evict(self, page: CachedPage) -> None:
        """Evicts an idle page that no other cached page follows."""
        require(page.is_idle, f"page {page.id} is evicted while it is in use")
        require(not page.children, f"page {page.id} is evicted before the pages after it")
        self.remove(page, self._clock())
        self._forget(page)
        parent = page.parent
        if parent is not None and not parent.children and parent.is_idle:
            own = self._of_account[parent.account]
            if parent in own.aside:
                del own.aside[parent]
                own.order[parent] = None
                own.order.move_to_end(parent, last=False)

    def evict_each(self, pages: Iterable[CachedPage]) -> None:
        """Evicts the pages, all of which must be idle, and all their descendants."""
        for page in _with_descendants(pages):
            self.evict(page)

    def evict_all(self) -> None:
        self.evict_each([page for own in self._of_account.values() for page in own.pages])

    def drainable(self) -> Mapping[int, float]:
        """Returns the extents whose used pages are all idle, with the cost of evicting these pages.
        The pages after them, in other extents, would be evicted, too, but do not count."""
        now, cost_s = self._clock(), self.page_cost_s
        return {
            extent: cost_s * self._uses[extent].expected(now)
            for extent, pages in self._in_extent.items()
            if len(pages) == self.pool.num_used_in(extent)
        }

    def accounts_in(self, extent: int) -> set[str]:
        """Returns the accounts of the extent's idle pages."""
        return {page.account for page in self._in_extent.get(extent, ())}

    def lost_with(self, extent: int) -> tuple[set[str], float]:
        """Returns the accounts of the pages that `drain` evicts, and the cost of evicting them."""
        pages = _with_descendants(self._in_extent.get(extent, ()))
        return {page.account for page in pages}, sum(map(self.loss_s, pages))

    def drain(self, extent: int) -> None:
        """Evicts the extent's idle pages and all their descendants."""
        self.evict_each(self._in_extent.get(extent, ()))

    def check_integrity(self, idle: set[CachedPage]) -> None:
        """Raises IntegrityError unless exactly the pages in `idle` are filed by account and by
        extent."""
        for filed in ([own.pages for own in self._of_account.values()], self._in_extent.values()):
            pages = [page for each in filed for page in each]
            require(
                set(pages) == idle and len(pages) == len(idle) == self.num_pages,
                f"{len(idle)} pages are idle, {len(pages)} filed, {self.num_pages} counted",
            )
        for account, each in self._of_account.items():
            pages = each.pages
            require(all(page.account == account for page in pages), f"not all of {account!r}")
            require(all(page.children for page in each.aside), "a page without children is aside")
        for extent, pages in self._in_extent.items():
            own = all(self.pool.extent_of(page.id) == extent for page in pages)
            require(own, f"a page is not in extent {extent}")


def _with_descendants(pages: Iterable[CachedPage]) -> list[CachedPage]:
    """Returns the pages and their descendants, descendants first."""
    found: dict[CachedPage, None] = {}
    for page in pages:
        below = [page]
        for each in below:  # `below` grows during the loop.
            below.extend(child for child in each.children if child not in found)
        found.update((each, None) for each in reversed(below))
    return list(found)
