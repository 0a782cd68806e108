"""Sources from which a KV cache gets more free pages."""

from __future__ import annotations

from collections.abc import Callable
from threading import Lock
from typing import Protocol

from memory.accounts import Ask
from memory.eviction.idle_pages import IdlePages


class PageSource(Protocol):
    """Source of free pages for KV caches. It decides which idle items it evicts to free pages."""

    lock: Lock
    """Must be held while reading or changing the owners of the arena's bytes."""

    @property
    def is_shared(self) -> bool:
        """Whether more than one cache uses the source."""
        ...

    def add_cache(self, idle: IdlePages) -> Callable[[], None]:
        """Adds a cache that may call `make_room`, and whose idle pages may be evicted. Returns a
        function that removes the cache."""
        ...

    def make_room(self, idle: IdlePages, num_pages: int, ask: Ask) -> bool:
        """Evicts items until `num_pages` pages are free in the page pool of one cache. Returns
        False if too few pages can be freed. idle: the cache's idle pages. ask: request of the
        account that needs the pages. It determines the items that may be evicted."""
        ...

    def check_integrity(self) -> None:
        """Raises IntegrityError unless each account is charged for exactly what it holds."""
        ...


class OwnPages:
    """`PageSource` of a single cache, which evicts only that cache's idle pages."""

    is_shared = False

    def __init__(self) -> None:
        self.lock = Lock()

    def add_cache(self, idle: IdlePages) -> Callable[[], None]:
        return lambda: None

    def make_room(self, idle: IdlePages, num_pages: int, ask: Ask) -> bool:
        missing = num_pages - idle.pool.num_free
        if missing > idle.num_evictable(ask):
            return False
        return missing <= 0 or idle.evict(missing, ask) == missing

    def check_integrity(self) -> None:
        pass
