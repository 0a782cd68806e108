"""The KV memory of one model: its page pool and its prefix cache, as one."""

from __future__ import annotations

from collections.abc import Iterable

from memory.arena import Arena
from memory.pages import PagePool
from memory.prefix_cache import PrefixCache


class KVCache:
    """Every page is free, used by sequences, or idle in the prefix cache (counted as obtainable).

    Sequences allocate here and give back through `prefix_cache.release`, never to the pool itself.
    """

    def __init__(self, arena: Arena, owner: str, page_bytes: int) -> None:
        self._arena = arena
        self.pool = PagePool(arena, owner, page_bytes)
        self.prefix_cache = PrefixCache(self.pool)

    @property
    def num_free(self) -> int:
        """Pages `allocate` would find now, idle cached ones included."""
        return self.pool.num_free + self.prefix_cache.num_idle

    @property
    def num_total(self) -> int:
        """Pages in use and obtainable ones; changes as extents move to and from others."""
        return self.pool.num_used + self.pool.num_free

    @property
    def num_cached(self) -> int:
        """Idle pages in the prefix cache: used by nobody, kept for reuse."""
        return self.prefix_cache.num_idle

    def allocate(self, num_pages: int) -> list[int] | None:
        """New pages with one reference each, the caller's; evicts idle cached pages if it must.

        None, and nothing changed, if they are too few.
        """
        missing = num_pages - self.pool.num_free
        if missing > self.prefix_cache.num_idle:
            return None
        if missing > 0:
            self.prefix_cache.evict(missing)
        return self.pool.allocate(num_pages)

    def drain_extent(self) -> bool:
        """Gives one extent back to the arena by evicting the idle cached pages in it (and those
        after them).

        Only an extent whose used pages are all idle; the one with the fewest of them, then the
        highest. False if there is none. The extent is then free for adapters or another model.
        """
        drainable = [
            (len(pages), -extent, pages)
            for extent, pages in self.prefix_cache.idle_by_extent().items()
            if len(pages) == self.pool.num_used_in(extent)
        ]
        if not drainable:
            return False
        self.prefix_cache.evict_pages(min(drainable)[2])
        return True

    def check_integrity(self, held: Iterable[int] | None = None) -> None:
        """Raises IntegrityError unless every page is in exactly one state.

        `held`: the pages of all block tables (`BlockTable.held_pages`), each once per reference;
        given, the reference counts must add up too. An idle engine holds none:
        `check_integrity(held=())`.
        """
        self._arena.check_integrity()
        self.pool.check_integrity()
        self.prefix_cache.check_integrity(held)
