"""Full pages kept for reuse: a radix tree with one page to a node."""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from memory.errors import require
from memory.pages import PagePool


@dataclass(eq=False, slots=True)
class _Node:
    key: bytes
    page: int
    parent: _Node | None
    children: set[_Node] = field(default_factory=set["_Node"])


class PrefixCache:
    """Pages by key. A key is chained (it names all pages before it), so a key alone finds its node.

    The cache has one reference of its own to each page in it. A page with no other reference is
    *idle* and may be evicted. Whoever holds a cached page holds all cached pages before it too, and
    releases them last page first: hence an idle page's descendants are idle and went idle earlier,
    and the least recently used is a leaf.
    """

    def __init__(self, pool: PagePool) -> None:
        self._pool = pool
        self._nodes: dict[bytes, _Node] = {}
        self._by_page: dict[int, _Node] = {}
        self._idle: OrderedDict[int, _Node] = OrderedDict()
        """Idle pages in the order of eviction; `_victim` alone decides by it."""

    @property
    def num_pages(self) -> int:
        return len(self._nodes)

    @property
    def num_idle(self) -> int:
        return len(self._idle)

    def match(self, keys: Sequence[bytes]) -> list[int]:
        """Pages of the longest cached prefix. Each has a new reference, the caller's, to be given
        back with `release`."""
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
        """Offers full pages, each after the one before and the first after `parent` (None: a first
        page).

        A new key: the cache keeps the page, with a reference of its own. A known key: the cache
        keeps the page it has. Returns the cached page of each key; where that is not the offered
        one (which stays the caller's alone), the caller has a new reference to it, to be given back
        like its own. The caller must hold `parent`'s cached page.
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

    def release(self, pages: Sequence[int]) -> None:
        """Gives back one reference to each page, the last first. Pages not cached become free at
        once."""
        for page in reversed(pages):
            if self._pool.release(page) == 1 and page in self._by_page:
                self._idle[page] = self._by_page[page]

    def evict(self, num_pages: int) -> int:
        """Frees up to so many idle pages, leaves first, the least recently used first. Returns how
        many."""
        count = min(num_pages, len(self._idle))
        for _ in range(count):
            self._remove(self._victim())
        return count

    def evict_pages(self, pages: Iterable[int]) -> None:
        """Frees these idle pages and all after them, which are idle too."""
        given = {self._by_page[page] for page in pages}
        nodes = [node for node in given if node.parent not in given]
        for node in nodes:  # grows as it goes: each node stands before those after it
            nodes.extend(node.children)
        for node in reversed(nodes):
            if node.page in self._idle:
                self._remove(node)

    def idle_by_extent(self) -> dict[int, list[int]]:
        """Idle pages of each extent that has any."""
        extents: dict[int, list[int]] = {}
        for page in self._idle:
            extents.setdefault(self._pool.extent_of(page), []).append(page)
        return extents

    def _retain(self, page: int) -> None:
        self._pool.retain(page)
        self._idle.pop(page, None)

    def _add(self, key: bytes, page: int, parent: _Node | None) -> _Node:
        node = _Node(key, page, parent)
        self._pool.retain(page)
        self._nodes[key] = self._by_page[page] = node
        if parent is not None:
            parent.children.add(node)
        return node

    def _victim(self) -> _Node:
        return next(iter(self._idle.values()))

    def _remove(self, node: _Node) -> None:
        require(not node.children, f"page {node.page} is evicted before the pages after it")
        if node.parent is not None:
            node.parent.children.remove(node)
        del self._nodes[node.key], self._by_page[node.page], self._idle[node.page]
        self._pool.release(node.page)

    def check_integrity(self, held: Iterable[int] | None = None) -> None:
        """Raises IntegrityError unless the tree is whole, the idle pages are those only the cache
        holds, and nothing in use lies under something idle. With `held` (each page once per
        reference outside the cache), also unless the reference counts of the pool add up.
        """
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
        idle = {page for page in self._by_page if self._pool.num_references(page) == 1}
        require(idle == set(self._idle), f"{len(idle)} pages are idle, {len(self._idle)} filed so")
        if held is not None:
            self._check_references(Counter(held))

    def _check_references(self, held: Counter[int]) -> None:
        held.update(list(self._by_page))
        for page, count in held.items():
            actual = self._pool.num_references(page)
            require(actual == count, f"page {page} has {actual} references, {count} holders")
        used = self._pool.num_used
        require(used == len(held), f"{used} pages are used, {len(held)} have a holder")
