"""The KV pages of one sequence."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence

from memory.accounts import NO_TENANT, Tenant
from memory.kv_cache import KVCache
from memory.page_key import PAGE_TOKENS, pages_of
from memory.prefix_cache import Image


class BlockTable:
    """Page ids of one sequence: pages[i] holds the KV of tokens 16 i .. 16 i + 15. After `free`,
    the table can be used for another sequence.

    pages    0        1        2        3
             matched  computed computed being filled
             `- num_committed -'                        in the prefix cache, under their keys
    """

    def __init__(self, kv: KVCache, tenant: Tenant = NO_TENANT) -> None:
        """tenant: tenant that is charged for the pages that `grow` allocates."""
        self._kv = kv
        self.tenant = tenant
        self.pages: list[int] = []
        self.num_committed = 0
        self._has_grown = False
        """Whether `grow` succeeded since the table was empty. If not, no step used its pages."""
        self._image: Image | None = None
        self._duplicates: dict[int, int] = {}
        """Cached pages with the same content as private pages, by the private page's index. The
        table has a reference to each, so that none is evicted before cached pages that follow."""

    def make_room(self, num_pages: int, *, num_beside: int = 0) -> bool:
        """Makes `num_pages` pages free for `grow`, evicting idle items that may be evicted for the
        tenant. Returns False if too few can be freed. num_beside: number of additional pages to
        free for other tenants' sequences."""
        asked = self._kv.idle, self.tenant, num_pages, num_beside
        return self._kv.source.make_room(*asked, is_first=self._is_first)

    def may_displace(self, other: BlockTable) -> bool:
        """Whether idle pages of the table `other` could be evicted for this table."""
        tenants = self.tenant, other.tenant
        return self._kv.source.may_displace(self._kv.idle, *tenants, is_first=self._is_first)

    def use_image(self, image: Image) -> None:
        """Sets the adapter image of the sequence, before the table gets pages. Evicts cached pages
        that another image of the adapter computed."""
        self._image = image
        self._kv.prefix_cache.use_image(image)

    @property
    def held_pages(self) -> list[int]:
        """Pages that this table has a reference to, once per reference, in token order."""
        held = list(self.pages)
        for index in reversed(self._duplicates):
            held.insert(index + 1, self._duplicates[index])
        return held

    def num_found(self, key: Callable[[int], bytes | None], num_pages: int) -> int:
        """Returns how many of the first `num_pages` pages are cached. key: function that returns a
        page's key. All pages before a cached page are cached, so the search doubles the number of
        pages, and a prompt whose first page is uncached costs one key."""
        cache, end = self._kv.prefix_cache, 1
        while end <= num_pages and key(end - 1) in cache:
            end *= 2
        pages = range(min(end - 1, num_pages))
        return bisect_left(pages, True, lo=end // 2, key=lambda index: key(index) not in cache)

    def match_prefix(self, keys: Sequence[bytes]) -> int:
        """Adds the longest cached prefix of the pages with these keys, which are those of the
        sequence's first full pages. Returns its number of tokens. The table must be empty."""
        assert not self.pages, "match_prefix on a table that has pages"
        self.pages = self._kv.prefix_cache.match(keys)
        self._count(bool(self.pages))
        self.num_committed = len(self.pages)
        return len(self.pages) * PAGE_TOKENS

    def grow(self, num_tokens: int) -> bool:
        """Extends the table to `num_tokens` tokens. Returns False and changes nothing if memory is
        short."""
        missing = pages_of(num_tokens) - len(self.pages)
        if missing > 0:
            has_room = self.make_room(missing)
            pages = self._kv.pool.allocate(missing, self.tenant.name) if has_room else None
            if pages is None:
                return False
            self._count(not self.pages)
            self.pages += pages
        self._has_grown = True
        return True

    def commit(self, keys: Sequence[bytes]) -> None:
        """Offers the table's full pages to the prefix cache.

        keys[i] is the key of page i. Pages committed earlier are skipped. The table keeps all its
        pages. If the cache already has another page with a key, the table's page stays private.
        """
        start, end = self.num_committed, len(keys)
        if start >= end:
            return
        assert end <= len(self.pages), f"{end} keys for {len(self.pages)} pages"
        own = self.pages[start:end]
        parent = keys[start - 1] if start else None
        cached = self._kv.prefix_cache.insert(keys[start:], own, parent, start, self._image)
        for index, (page, duplicate) in enumerate(zip(own, cached, strict=True), start):
            if duplicate != page:
                self._duplicates[index] = duplicate
        self.num_committed = end

    def free(self) -> None:
        """Releases all pages. Cached pages become idle once no other sequence holds them."""
        self._kv.prefix_cache.release(self.held_pages, was_used=self._has_grown)
        self._count(-bool(self.pages))
        self.pages, self._duplicates = [], {}
        self.num_committed = 0
        self._has_grown = False
        self._image = None

    def _count(self, change: int) -> None:
        """Adds `change` to the number of the tenant's tables that have pages."""
        self._kv.tables.charge(self.tenant.name, change)

    @property
    def _is_first(self) -> bool:
        """Whether the tenant's other tables are empty."""
        return self._kv.tables.held.get(self.tenant.name, 0) == bool(self.pages)
