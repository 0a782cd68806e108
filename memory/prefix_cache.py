"""Cache of full KV pages for reuse: a radix tree with one page per node."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

from memory.errors import require
from memory.idle_pages import CachedPage, IdlePages
from memory.pages import PagePool

MAX_CHANGES = 1 << 16
"""Maximum number of changes that a journal keeps."""


class Image(NamedTuple):
    """Packed image of an adapter, with which a sequence's pages from `first_page` on are computed.
    The adapter's digest is part of their keys, but the image's checksum is not."""

    adapter: str
    checksum: str
    first_page: int


class PrefixCache:
    """Full KV pages of one model, by key. A page's key is a hash of the page's tokens and of all
    pages before it, so that it identifies the page's node in the tree.

    The cache itself holds one reference to each of its pages. A page without other references is
    *idle* and may be evicted. A sequence that holds a cached page also holds all cached pages
    before it, and releases the last page first. Hence all descendants of an idle page are idle.
    """

    def __init__(self, pool: PagePool, clock: Callable[[], float]) -> None:
        self._pool = pool
        self._clock = clock
        self._by_key: dict[bytes, CachedPage] = {}
        self._by_id: dict[int, CachedPage] = {}
        self._of_adapter: dict[str, tuple[str, set[CachedPage]]] = {}
        """Pages of each adapter that has any, and the checksum of the image that computed them."""
        self.idle = IdlePages(pool, clock, self._forget)
        self.journal = Journal()

    @property
    def keys(self) -> Iterable[bytes]:
        return self._by_key.keys()

    def __contains__(self, key: bytes | None) -> bool:
        return key in self._by_key

    def match(self, keys: Sequence[bytes]) -> list[int]:
        """Returns the pages of the longest cached prefix, with a new reference to each. The caller
        must release the references with `release`."""
        pages: list[int] = []
        for key in keys:
            page = self._by_key.get(key)
            if page is None:
                break
            self._retain(page)
            pages.append(page.id)
        return pages

    def insert(
        self,
        keys: Sequence[bytes],
        pages: Sequence[int],
        parent: bytes | None = None,
        start: int = 0,
        image: Image | None = None,
    ) -> list[int]:
        """Offers full pages to the cache, in order. parent: key of the page before the first one,
        None at the start of a sequence. The caller must hold the cached page of `parent`. start:
        number of the first page in its sequence. image: adapter image of the sequence, if any.

        If a key is new, the cache stores the offered page and adds its own reference. If the cache
        already has another page with the key, it keeps that page, and the offered page stays
        private to the caller. Returns the cached page of each key. If the cached page is not the
        offered page, the caller owns a new reference to the cached page.
        """
        before = None if parent is None else self._by_key[parent]
        cached: list[int] = []
        for number, (key, offered) in enumerate(zip(keys, pages, strict=True), start):
            page = self._by_key.get(key)
            if page is None:
                is_adapted = image is not None and number >= image.first_page
                page = self._add(key, offered, before, image if is_adapted else None)
            elif page.id != offered:
                self._retain(page)
            cached.append(page.id)
            before = page
        return cached

    def release(self, pages: Sequence[int], *, was_used: bool = True) -> None:
        """Releases one reference to each page, last page first. An uncached page without references
        becomes free. was_used: whether the pages were used, and not only looked for."""
        now = self._clock()
        for page in reversed(pages):
            if self._pool.release(page) == 1 and page in self._by_id:
                self.idle.add(self._by_id[page], now, was_used=was_used)

    def use_image(self, image: Image) -> None:
        """Evicts the adapter's pages if another image computed them, for example a damaged one that
        has been replaced. Called before a sequence matches pages of the adapter, when no sequence
        uses the other image any longer."""
        checksum, pages = self._of_adapter.get(image.adapter, (image.checksum, ()))
        if checksum != image.checksum:
            self.idle.evict_each(pages)

    def _retain(self, page: CachedPage) -> None:
        self._pool.retain(page.id)
        if page.is_idle:
            self.idle.remove(page, self._clock())

    def _add(
        self, key: bytes, page_id: int, parent: CachedPage | None, image: Image | None
    ) -> CachedPage:
        account = self._pool.account_of(page_id)
        adapter = None if image is None else image.adapter
        page = CachedPage(key, page_id, account, adapter, parent)
        if image is not None:
            checksum, pages = self._of_adapter.setdefault(image.adapter, (image.checksum, set()))
            require(checksum == image.checksum, f"two images of {image.adapter} compute pages")
            pages.add(page)
        self._pool.retain(page_id)
        self._by_key[key] = self._by_id[page_id] = page
        self.journal.record(key, is_added=True)
        if parent is not None:
            parent.children.add(page)
        return page

    def _forget(self, page: CachedPage) -> None:
        """Removes an evicted page and releases the cache's reference to it."""
        del self._by_key[page.key], self._by_id[page.id]
        self.journal.record(page.key, is_added=False)
        if page.adapter is not None:
            _, pages = self._of_adapter[page.adapter]
            pages.remove(page)
            if not pages:
                del self._of_adapter[page.adapter]
        if page.parent is not None:
            page.parent.children.remove(page)
        self._pool.release(page.id)

    def check_integrity(self, held: Iterable[int]) -> None:
        """Raises IntegrityError unless the tree is consistent, exactly the pages that only the
        cache holds are idle, no used page has an idle ancestor, and the pool's reference counts
        are right. held: page ids, one for each reference outside the cache."""
        require(len(self._by_key) == len(self._by_id), "one page has two keys")
        for key, page in self._by_key.items():
            require(page.key == key and self._by_id.get(page.id) is page, "a page is misfiled")
            parent = page.parent
            if parent is not None:
                require(self._by_key.get(parent.key) is parent, f"page {page.id} lost its parent")
                require(page in parent.children, f"page {page.id} is unknown to its parent")
                is_under_idle = parent.is_idle and not page.is_idle
                require(not is_under_idle, f"used page {page.id} after idle {parent.id}")
        adapted = {(p.adapter, p) for p in self._by_id.values() if p.adapter is not None}
        filed = {(name, page) for name, (_, each) in self._of_adapter.items() for page in each}
        require(filed == adapted, f"{len(adapted)} pages of adapters, {len(filed)} filed")
        num_children = sum(len(page.children) for page in self._by_id.values())
        num_inner = sum(page.parent is not None for page in self._by_id.values())
        require(num_children == num_inner, f"{num_children} children, {num_inner} with a parent")
        pages = self._by_id.values()
        self.idle.check_integrity({p for p in pages if self._pool.num_references(p.id) == 1})
        holders = Counter(held)
        holders.update(list(self._by_id))
        for page, num_holders in holders.items():
            actual = self._pool.num_references(page)
            require(
                actual == num_holders, f"page {page} has {actual} references, {num_holders} holders"
            )
        used = self._pool.num_used
        require(used == len(holders), f"{used} pages are used, {len(holders)} have a holder")


class Journal:
    """Keys that were added to or removed from a set since the last call of `take`. An addition and
    a removal of one key cancel out. If more than `MAX_CHANGES` keys remain, all are dropped."""

    def __init__(self) -> None:
        self._is_added: dict[bytes, bool] = {}
        self._is_lost = False

    def record(self, key: bytes, *, is_added: bool) -> None:
        """Records that the key was added, or removed if `is_added` is false."""
        if self._is_lost:
            return
        if self._is_added.pop(key, is_added) == is_added:
            self._is_added[key] = is_added
        if len(self._is_added) > MAX_CHANGES:
            self._is_added.clear()
            self._is_lost = True

    def take(self) -> tuple[list[bytes], list[bytes]] | None:
        """Returns the added and the removed keys since the last call. Returns None if they were
        dropped."""
        is_added, self._is_added = self._is_added, {}
        if self._is_lost:
            self._is_lost = False
            return None
        removed = [key for key, added in is_added.items() if not added]
        return [key for key, added in is_added.items() if added], removed
