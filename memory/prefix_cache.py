"""Cache of full KV pages for reuse: a radix tree with one page per node."""

from __future__ import annotations

import math
from collections import Counter, OrderedDict
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field
from heapq import heapify, heappop, heappush
from itertools import count

from memory.accounts import Ask
from memory.errors import require
from memory.eviction.journal import Journal
from memory.pages import PagePool
from memory.reuse import Reuse

MAX_GONE = 1 << 14
"""Maximum number of evicted keys whose reuse is remembered."""


@dataclass(eq=False, slots=True)
class _Node:
    key: bytes
    page: int
    account: str
    parent: _Node | None
    reuse: Reuse
    """Recent matches of the page. Until the first match, the insertion counts as one use."""
    was_found: bool = False
    children: set[_Node] = field(default_factory=set["_Node"])
    idle_order: int = 0
    """Position in the order in which pages turned idle."""


@dataclass(slots=True)
class _IdleInExtent:
    """Idle pages of one extent. `reuse` (of pages never matched) and `found_reuse` (of matched
    pages) are separate sums, because only `reuse` is multiplied by the chance of a first match."""

    pages: set[int] = field(default_factory=set[int])
    num_of: Counter[str] = field(default_factory=Counter[str])
    """Number of pages by account."""
    reuse: Reuse = field(default_factory=Reuse)
    found_reuse: Reuse = field(default_factory=Reuse)

    def add(self, node: _Node, now: float) -> None:
        self.pages.add(node.page)
        self.num_of[node.account] += 1
        self._note(node, now, 1)

    def remove(self, node: _Node, now: float) -> None:
        self.pages.remove(node.page)
        self.num_of[node.account] -= 1
        if not self.num_of[node.account]:
            del self.num_of[node.account]
        self._note(node, now, -1)

    def _note(self, node: _Node, now: float, sign: int) -> None:
        reuse = self.found_reuse if node.was_found else self.reuse
        reuse.note(now, sign * node.reuse.expected(now))


@dataclass(slots=True)
class _IdleOfAccount:
    num_pages: int = 0
    leaves: dict[bool, list[tuple[float, int, _Node]]] = field(
        default_factory=lambda: {False: [], True: []}
    )
    """Heaps of idle leaves by `was_found`, ordered by least reuse, then by longest idle. Stale
    entries, whose node is in use or was in use since, are skipped."""


_Turn = tuple[float, bool, float, str]
"""Sort key of an account for eviction: eviction priority, whether it is not the requesting account,
expected reuse of its least reused leaf, account name."""


class PrefixCache:
    """Cached pages by key. A page's key covers all pages before it, so the key alone identifies the
    node.

    The cache itself holds one reference to each of its pages. A page without other references is
    *idle* and may be evicted. A holder of a cached page also holds all cached pages before it, and
    releases them last page first. Hence an idle page's descendants are idle.

    The expected reuse of a page is its number of recent matches. For a page never matched, it is
    the fraction of recent pages that were ever matched, decaying with the page's age. The reuse of
    an evicted page is remembered. If the page is inserted again, that counts as a match, because
    the page would have been found if it had stayed in the cache.
    """

    def __init__(self, pool: PagePool, clock: Callable[[], float]) -> None:
        self._pool = pool
        self._clock = clock
        self._nodes: dict[bytes, _Node] = {}
        self._by_page: dict[int, _Node] = {}
        self._idle: dict[int, _Node] = {}
        self._idle_in: dict[int, _IdleInExtent] = {}
        """Keyed by extent. Contains only extents with idle pages."""
        self._idle_of: dict[str, _IdleOfAccount] = {}
        """Keyed by account. Contains only accounts with idle pages."""
        self._orders = count(1)
        self._added, self._found = Reuse(), Reuse()
        """Recent numbers of pages added, and of pages matched for the first time."""
        self._gone: OrderedDict[bytes, Reuse] = OrderedDict()
        """Reuse of evicted keys, in the order of their eviction."""
        self.journal = Journal()

    @property
    def keys(self) -> Iterable[bytes]:
        return self._nodes.keys()

    @property
    def num_idle(self) -> int:
        return len(self._idle)

    def num_idle_of(self, account: str) -> int:
        return self._idle_of[account].num_pages if account in self._idle_of else 0

    def __contains__(self, key: bytes) -> bool:
        return key in self._nodes

    def match(self, keys: Sequence[bytes]) -> list[int]:
        """Returns the pages of the longest cached prefix, with a new reference to each. The caller
        must release the references with `release`."""
        pages: list[int] = []
        for key in keys:
            node = self._nodes.get(key)
            if node is None:
                break
            self._retain(node.page)
            pages.append(node.page)
        return pages

    def insert(
        self, keys: Sequence[bytes], pages: Sequence[int], parent: bytes | None = None
    ) -> list[int]:
        """Offers full pages to the cache, in order. parent: key of the page before the first one,
        None at the start of a sequence. The caller must hold the cached page of `parent`.

        If a key is new, the cache stores the offered page and adds its own reference. If a key is
        known, the cache keeps its page, and a different offered page stays private to the caller.
        Returns the cached page of each key. If it is not the offered page, the caller owns a new
        reference to it.
        """
        before = None if parent is None else self._nodes[parent]
        cached: list[int] = []
        for key, page in zip(keys, pages, strict=True):
            node = self._nodes.get(key)
            if node is None:
                node = self._add(key, page, before)
            elif node.page != page:
                self._retain(node.page)
            cached.append(node.page)
            before = node
        return cached

    def release(self, pages: Sequence[int], num_found: int = 0) -> None:
        """Releases one reference to each page, last page first. An uncached page without references
        becomes free. The first `num_found` pages are counted as matched."""
        now = self._clock()
        for page in pages[:num_found]:
            self._note_found(self._by_page[page], now)
        for page in reversed(pages):
            if self._pool.release(page) == 1 and page in self._by_page:
                self._add_idle(self._by_page[page], now)

    def num_evictable(self, ask: Ask) -> int:
        """Returns the number of idle pages that `evict` could free for the request."""
        page_bytes = self._pool.page_bytes
        return sum(
            math.ceil(min(ask.most(name) / page_bytes, idle.num_pages))
            for name, idle in self._idle_of.items()
        )

    def evict(
        self, num_pages: int, ask: Ask, limit: tuple[float, float] = (math.inf, math.inf)
    ) -> int:
        """Frees up to `num_pages` idle pages that may be evicted for the request, and returns their
        number. Evicts from the account with the lowest eviction priority, and there the least
        reused leaf first.

        limit: greatest tuple (eviction priority, expected reuse) of a page to evict.
        """
        now = self._clock()
        num_freed = 0
        turns: list[_Turn] = []
        for account in self._idle_of:
            self._file_turn(turns, account, ask, now)
        while num_freed < num_pages and turns:
            priority, _, reuse, account = turns[0]
            if (priority, reuse) > limit or not ask.may_take(account):
                break
            heappop(turns)
            node = self._least_leaf(account, now)
            if node is not None:
                self._remove(node, now)
                num_freed += 1
                self._file_turn(turns, account, ask, now)
                if node.parent is not None and node.parent.account != account:
                    self._file_turn(turns, node.parent.account, ask, now)
        return num_freed

    def evict_extent(self, extent: int) -> None:
        """Frees the extent's idle pages and all their descendants, which are idle too."""
        now = self._clock()
        for node in self._with_descendants(extent):
            self._remove(node, now)

    def drainable(self) -> dict[int, tuple[Collection[str], float]]:
        """Returns extents whose used pages are all idle, with the pages' accounts and reuse."""
        now = self._clock()
        chance = self._chance(now)
        num_used_in = self._pool.num_used_in
        return {
            extent: (
                idle.num_of,
                chance * idle.reuse.expected(now) + idle.found_reuse.expected(now),
            )
            for extent, idle in self._idle_in.items()
            if len(idle.pages) == num_used_in(extent)
        }

    def lost_with(self, extent: int) -> tuple[Collection[str], float]:
        """Returns the accounts and the expected reuse of all pages that `evict_extent` would free,
        including descendants in other extents."""
        now = self._clock()
        nodes = self._with_descendants(extent)
        return {node.account for node in nodes}, sum(self._reuse(node, now) for node in nodes)

    def _chance(self, now: float) -> float:
        """Estimates the probability that a page is ever matched; 1/2 without observations."""
        return min((self._found.expected(now) + 1) / (self._added.expected(now) + 2), 1.0)

    def _reuse(self, node: _Node, now: float) -> float:
        return node.reuse.expected(now) * (1.0 if node.was_found else self._chance(now))

    def _retain(self, page: int) -> None:
        self._pool.retain(page)
        node = self._idle.get(page)
        if node is not None:
            self._remove_idle(node, self._clock())

    def _add(self, key: bytes, page: int, parent: _Node | None) -> _Node:
        now = self._clock()
        self._added.note(now)
        node = _Node(key, page, self._pool.account_of(page), parent, Reuse(1.0, now))
        gone = self._gone.pop(key, None)
        if gone is not None:
            self._note_found(node, now)
            node.reuse.note(now, gone.expected(now))
        self._pool.retain(page)
        self._nodes[key] = self._by_page[page] = node
        self.journal.add(key)
        if parent is not None:
            parent.children.add(node)
        return node

    def _note_found(self, node: _Node, now: float) -> None:
        if not node.was_found:
            node.reuse, node.was_found = Reuse(), True
            self._found.note(now)
        node.reuse.note(now)

    def _add_idle(self, node: _Node, now: float) -> None:
        node.idle_order = next(self._orders)
        self._idle[node.page] = node
        self._idle_of.setdefault(node.account, _IdleOfAccount()).num_pages += 1
        idle = self._idle_in.setdefault(self._pool.extent_of(node.page), _IdleInExtent())
        idle.add(node, now)
        self._file_leaf(node)

    def _remove_idle(self, node: _Node, now: float) -> None:
        del self._idle[node.page]
        extent = self._pool.extent_of(node.page)
        idle = self._idle_in[extent]
        idle.remove(node, now)
        if not idle.pages:
            del self._idle_in[extent]
        of_account = self._idle_of[node.account]
        of_account.num_pages -= 1
        if not of_account.num_pages:
            del self._idle_of[node.account]

    def _file_leaf(self, node: _Node) -> None:
        idle = self._idle_of[node.account]
        heap = idle.leaves[node.was_found]
        if not node.children:
            heappush(heap, (node.reuse.rank, node.idle_order, node))
        if len(heap) > 2 * idle.num_pages + 64:
            heap[:] = [entry for entry in heap if self._is_idle_leaf(*entry)]
            heapify(heap)

    def _is_idle_leaf(self, _: float, order: int, node: _Node) -> bool:
        """Whether the heap entry is up to date. A node that gets a child is in use at that time. It
        is pushed again, with a new `idle_order`, when it turns idle."""
        return self._idle.get(node.page) is node and node.idle_order == order

    def _least_leaf(self, account: str, now: float) -> _Node | None:
        """Returns the account's idle leaf with the least expected reuse. Returns None if there is
        none, for example because each idle page of the account has a child of another account."""
        if account not in self._idle_of:
            return None
        leaves: list[_Node] = []
        for heap in self._idle_of[account].leaves.values():
            while heap and not self._is_idle_leaf(*heap[0]):
                heappop(heap)
            leaves += [node for _, _, node in heap[:1]]
        return min(leaves, key=lambda node: self._reuse(node, now), default=None)

    def _file_turn(self, turns: list[_Turn], account: str, ask: Ask, now: float) -> None:
        node = self._least_leaf(account, now)
        if node is not None:
            is_other = account != ask.name
            heappush(turns, (ask.priority(account), is_other, self._reuse(node, now), account))

    def _with_descendants(self, extent: int) -> list[_Node]:
        """Returns the idle pages of the extent and their descendants, descendants first."""
        found: dict[_Node, None] = {}
        for page in self._idle_in[extent].pages:
            below = [self._idle[page]]
            for node in below:  # grows during the loop
                below.extend(child for child in node.children if child not in found)
            found.update((node, None) for node in reversed(below))
        return list(found)

    def _remove(self, node: _Node, now: float) -> None:
        require(not node.children, f"page {node.page} is evicted before the pages after it")
        self._remove_idle(node, now)
        del self._nodes[node.key], self._by_page[node.page]
        self.journal.remove(node.key)
        self._gone[node.key] = node.reuse if node.was_found else Reuse()
        if len(self._gone) > MAX_GONE:
            self._gone.popitem(last=False)
        self._pool.release(node.page)
        if node.parent is not None:
            node.parent.children.remove(node)
            if node.parent.page in self._idle:
                self._file_leaf(node.parent)

    def check_integrity(self, held: Iterable[int] | None = None) -> None:
        """Raises IntegrityError unless the tree is consistent, the idle pages are exactly those
        that only the cache holds, and no used page has an idle ancestor. held: pages, once per
        reference outside the cache. If given, the pool's reference counts are checked, too."""
        require(len(self._nodes) == len(self._by_page), "one page has two keys")
        for key, node in self._nodes.items():
            require(node.key == key and self._by_page.get(node.page) is node, "a node is misfiled")
            parent = node.parent
            if parent is not None:
                require(self._nodes.get(parent.key) is parent, f"page {node.page} lost its parent")
                require(node in parent.children, f"page {node.page} is unknown to its parent")
                is_under_idle = parent.page in self._idle and node.page not in self._idle
                require(not is_under_idle, f"used page {node.page} after idle {parent.page}")
        num_children = sum(len(node.children) for node in self._nodes.values())
        num_inner = sum(node.parent is not None for node in self._nodes.values())
        require(num_children == num_inner, f"{num_children} children, {num_inner} with a parent")
        self._check_idle()
        if held is not None:
            self._check_references(Counter(held))

    def _check_idle(self) -> None:
        idle = {page for page in self._by_page if self._pool.num_references(page) == 1}
        require(idle == set(self._idle), f"{len(idle)} pages are idle, {len(self._idle)} filed so")
        by_extent = [page for filed in self._idle_in.values() for page in filed.pages]
        require(sorted(by_extent) == sorted(idle), f"{len(by_extent)} idle pages filed by extent")
        num_of = Counter(node.account for node in self._idle.values())
        filed_of = {name: of_account.num_pages for name, of_account in self._idle_of.items()}
        require(num_of == filed_of, f"idle pages by account are {num_of}, filed {filed_of}")
        for name, of_account in self._idle_of.items():
            entries = [*of_account.leaves[False], *of_account.leaves[True]]
            filed = {entry[2] for entry in entries if self._is_idle_leaf(*entry)}
            leaves = {n for n in self._idle.values() if n.account == name and not n.children}
            require(filed == leaves, f"{len(leaves)} idle leaves of {name!r}, {len(filed)} filed")
        for extent, filed in self._idle_in.items():
            require(
                filed.num_of == Counter(self._idle[page].account for page in filed.pages),
                f"the idle pages of extent {extent} are filed under others' names",
            )

    def _check_references(self, held: Counter[int]) -> None:
        held.update(list(self._by_page))
        for page, count_ in held.items():
            actual = self._pool.num_references(page)
            require(actual == count_, f"page {page} has {actual} references, {count_} holders")
        used = self._pool.num_used
        require(used == len(held), f"{used} pages are used, {len(held)} have a holder")
