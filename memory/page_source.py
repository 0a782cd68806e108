"""Sources from which a KV cache gets more free pages."""

from __future__ import annotations

from collections.abc import Callable
from threading import Lock
from typing import Protocol

from memory.accounts import Ask
from memory.eviction.loss import NO_LIMIT, Idle, Loss
from memory.pages import PagePool


class PageHolder(Protocol):
    """KV pages of one model, implemented by `KVCache`."""

    pool: PagePool

    def num_evictable(self, ask: Ask) -> int:
        """Returns the number of idle pages that may be evicted for the request."""
        ...

    def evict(self, num_pages: int, ask: Ask, limit: Loss = NO_LIMIT) -> int:
        """Frees up to `num_pages` idle pages, least loss first, whose loss does not exceed the
        limit (with its cost in seconds per byte). Returns the number of pages freed."""
        ...

    def drainable(self) -> dict[int, Idle]:
        """Returns the extents that `drain` could free, each with a lower bound of its cost."""
        ...

    def lost_with(self, extent: int) -> Idle:
        """Returns the exact cost of draining the extent."""
        ...

    def drain(self, extent: int) -> None:
        """Returns a drainable extent to the arena."""
        ...


class PageSource(Protocol):
    """Source of free pages for KV caches. A cache does not know which items the source evicts."""

    lock: Lock
    """Held while reading or changing the owners of the arena's bytes."""

    @property
    def is_shared(self) -> bool:
        """Whether more than one cache uses the source."""
        ...

    def add_cache(self, owner: str, cache: PageHolder) -> Callable[[], None]:
        """Adds a cache that may call `make_room`, and whose idle pages may be evicted. Returns the
        function that removes it."""
        ...

    def make_room(self, cache: PageHolder, num_pages: int, ask: Ask) -> bool:
        """Makes `num_pages` pages free in the cache's pool. Returns False if too few can be freed.
        ask: the account's request, which decides what may be evicted."""
        ...

    def check_integrity(self) -> None:
        """Raises IntegrityError unless each account is charged for exactly what it holds."""
        ...


class OwnPages:
    """Simplest `PageSource`, which evicts only idle pages of the requesting cache."""

    is_shared = False

    def __init__(self) -> None:
        self.lock = Lock()

    def add_cache(self, owner: str, cache: PageHolder) -> Callable[[], None]:
        return lambda: None

    def make_room(self, cache: PageHolder, num_pages: int, ask: Ask) -> bool:
        missing = num_pages - cache.pool.num_free
        if missing > cache.num_evictable(ask):
            return False
        return missing <= 0 or cache.evict(missing, ask) == missing

    def check_integrity(self) -> None:
        pass
