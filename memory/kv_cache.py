"""KV memory of one model: its page pool and its prefix cache."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable

from memory.accounts import Holdings
from memory.arena import Arena
from memory.page_source import OwnPages, PageSource
from memory.pages import PagePool
from memory.prefix_cache import PrefixCache


class KVCache:
    """KV pages of one model. Every page is free, used by sequences, or idle in the prefix cache.
    `num_free` includes idle pages.

    Block tables allocate pages from `pool`, but release them with `prefix_cache.release`.
    """

    def __init__(
        self,
        arena: Arena,
        owner: str,
        page_bytes: int,
        *,
        source: PageSource | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """source: page source shared by all caches of the arena. None if this is the only cache."""
        self._arena = arena
        self.pool = PagePool(arena, owner, page_bytes)
        self.prefix_cache = PrefixCache(self.pool, clock)
        self.idle = self.prefix_cache.idle
        self.source = source or OwnPages()
        self._leave_source = self.source.add_cache(self.idle)
        self.lock = arena.lock
        """Lock of the arena, shared by all KV caches of the arena."""
        arena.num_caches += 1
        self.tables = Holdings(arena.bytes_held.accounts)
        """Number of block tables with pages, by tenant."""

    @property
    def num_free(self) -> int:
        """Number of free pages plus idle cached pages. A tenant may get fewer pages, because some
        idle pages may not be evicted for its requests."""
        return self.pool.num_free + self.idle.num_pages

    @property
    def num_total(self) -> int:
        """Number of used plus free pages. Changes as extents move to and from other owners."""
        return self.pool.num_used + self.pool.num_free

    @property
    def is_shared(self) -> bool:
        """Whether other caches use the arena, too."""
        return self._arena.num_caches > 1

    def close(self) -> None:
        """Frees idle pages and unregisters the cache from its `PageSource`. Keeps pages in use."""
        self.idle.evict_all()
        self._leave_source()
        self._arena.num_caches -= 1

    def check_integrity(self, held: Iterable[int]) -> None:
        """Raises IntegrityError unless every page is in exactly one state and has one reference for
        each of its holders.

        held: pages of all block tables (see `BlockTable.held_pages`), once per reference.
        """
        self._arena.check_integrity()
        self.pool.check_integrity()
        self.prefix_cache.check_integrity(held)
