"""Sources from which a KV cache gets more free pages."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from memory.accounts import Tenant
from memory.idle_pages import IdlePages


class PageSource(Protocol):
    """Source of free pages for KV caches. It decides which idle items it evicts to free pages, and
    therefore how much memory a tenant may take from others."""

    def add_cache(self, idle: IdlePages) -> Callable[[], None]:
        """Adds a cache that may call `make_room`, and whose idle pages may be evicted. Returns a
        function that removes the cache."""
        ...

    def make_room(
        self, idle: IdlePages, tenant: Tenant, num_pages: int, num_beside: int, *, is_first: bool
    ) -> bool:
        """Evicts items until `num_pages` + `num_beside` pages are free in the page pool of one
        cache. Returns False if too few pages can be freed for the tenant. idle: the cache's idle
        pages. num_pages: number of pages that the tenant will hold. num_beside: number of pages for
        other tenants. is_first: whether the tenant's other sequences have no pages in the cache."""
        ...

    def may_displace(
        self, idle: IdlePages, tenant: Tenant, other: Tenant, *, is_first: bool
    ) -> bool:
        """Whether idle pages of the tenant `other` could be evicted for the first tenant."""
        ...


class OwnPages:
    """`PageSource` of a single cache, which evicts only that cache's least recently used pages, for
    any tenant."""

    def add_cache(self, idle: IdlePages) -> Callable[[], None]:
        return lambda: None

    def make_room(
        self, idle: IdlePages, tenant: Tenant, num_pages: int, num_beside: int, *, is_first: bool
    ) -> bool:
        missing = num_pages + num_beside - idle.pool.num_free
        if missing > idle.num_pages:
            return False
        for _ in range(missing):
            oldest = (page for name in idle.accounts if (page := idle.oldest(name)) is not None)
            idle.evict(min(oldest, key=lambda page: page.uses.at_s))
        return True

    def may_displace(
        self, idle: IdlePages, tenant: Tenant, other: Tenant, *, is_first: bool
    ) -> bool:
        return True
