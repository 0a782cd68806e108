"""KV memory of one model: its page pool and its prefix cache."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from threading import Lock

from memory.accounts import NO_TENANT, Ask, BytesHeld, Tenant
from memory.arena import Arena
from memory.eviction.loss import NO_LIMIT, Idle, Loss
from memory.page_key import PAGE_TOKENS
from memory.page_source import OwnPages, PageSource
from memory.pages import PagePool
from memory.prefix_cache import PrefixCache

SECONDS_PER_TOKEN = 1e-3
"""Assumed seconds to prefill one token, until it is measured."""
MEMORY = 0.9
"""Factor by which earlier prefill measurements are multiplied at each new one."""


class KVCache:
    """KV pages of one model. Every page is free, used by sequences, or idle in the prefix cache;
    idle pages count as obtainable.

    Sequences allocate pages here and release them with `prefix_cache.release`, not with the pool.
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
        self._source = source or OwnPages()
        self._leave_source = self._source.add_cache(owner, self)
        self.pool = PagePool(arena, owner, page_bytes)
        self.prefix_cache = PrefixCache(self.pool, clock)
        self._bytes_held = arena.bytes_held
        self.tables = BytesHeld(arena.bytes_held.accounts)
        """Number of block tables with pages, by tenant."""
        self._prefill = (float(PAGE_TOKENS), PAGE_TOKENS * SECONDS_PER_TOKEN)
        """Decaying sums of the tokens and of the seconds of prefills."""

    @property
    def lock(self) -> Lock:
        """Lock of the arena, shared by all its caches."""
        return self._source.lock

    @property
    def has_neighbours(self) -> bool:
        """Whether other models share the arena."""
        return self._source.is_shared

    @property
    def num_free(self) -> int:
        """Number of free pages plus idle cached pages. A tenant may get fewer, because some idle
        pages may not be evicted for it."""
        return self.pool.num_free + self.prefix_cache.num_idle

    @property
    def num_total(self) -> int:
        """Number of used plus free pages. Changes as extents move to and from other owners."""
        return self.pool.num_used + self.pool.num_free

    @property
    def num_cached(self) -> int:
        """Number of idle pages in the prefix cache: unused, but kept for reuse."""
        return self.prefix_cache.num_idle

    @property
    def page_cost_s(self) -> float:
        """Estimated seconds to compute a page again, based on recent prefills."""
        num_tokens, seconds = self._prefill
        return PAGE_TOKENS * seconds / num_tokens

    def note_prefill(self, num_tokens: int, seconds: float) -> None:
        """Records how long the prefill of `num_tokens` tokens took."""
        old_tokens, old_seconds = self._prefill
        self._prefill = MEMORY * old_tokens + num_tokens, MEMORY * old_seconds + seconds

    def ask(self, num_pages: int, tenant: Tenant, *, is_first: bool) -> Ask:
        """Returns the tenant's request for `num_pages` pages, which decides what may be evicted."""
        size = self.pool.page_bytes
        spare = self.prefix_cache.num_idle_of(tenant.name) * size
        return Ask(self._bytes_held, tenant.name, num_pages * size, is_first=is_first, spare=spare)

    def make_room(
        self,
        num_pages: int,
        tenant: Tenant = NO_TENANT,
        *,
        num_beside: int = 0,
        is_first: bool = False,
    ) -> bool:
        """Makes `num_pages` pages free, evicting idle items that may be evicted for the tenant.
        Returns False if too few can be freed. num_beside: number of additional pages to free for
        other users. is_first: whether no other sequence of the tenant has pages here."""
        self._bytes_held.accounts.note(tenant)
        ask = self.ask(num_pages, tenant, is_first=is_first)
        return self._source.make_room(self, num_pages + num_beside, ask)

    def allocate(
        self, num_pages: int, tenant: Tenant = NO_TENANT, *, is_first: bool = False
    ) -> list[int] | None:
        """Allocates pages, each with one reference owned by the caller. Returns None if memory is
        short."""
        if not self.make_room(num_pages, tenant, is_first=is_first):
            return None
        return self.pool.allocate(num_pages, tenant.name)

    def num_evictable(self, ask: Ask) -> int:
        """Implements `PageHolder.num_evictable`."""
        return self.prefix_cache.num_evictable(ask)

    def evict(self, num_pages: int, ask: Ask, limit: Loss = NO_LIMIT) -> int:
        """Implements `PageHolder.evict`."""
        max_reuse = limit.cost_s * self.pool.page_bytes / self.page_cost_s
        return self.prefix_cache.evict(num_pages, ask, (limit.priority, max_reuse))

    def drainable(self) -> dict[int, Idle]:
        """Returns the extents that `drain` could free. Their cost is the seconds to compute their
        pages again, times the pages' expected reuse."""
        cost = self.page_cost_s
        return {
            extent: Idle(accounts, cost * reuse)
            for extent, (accounts, reuse) in self.prefix_cache.drainable().items()
        }

    def lost_with(self, extent: int) -> Idle:
        """Returns the cost of draining the extent, including pages in other extents that follow its
        pages. The cost is the seconds to compute the pages again, times their expected reuse."""
        accounts, reuse = self.prefix_cache.lost_with(extent)
        return Idle(accounts, reuse * self.page_cost_s)

    def drain(self, extent: int) -> None:
        """Returns a drainable extent to the arena, for adapters or another model."""
        self.prefix_cache.evict_extent(extent)

    def close(self) -> None:
        """Frees idle pages and removes the cache from its source. Pages in use are not freed."""
        self.evict(self.num_cached, self.ask(0, NO_TENANT, is_first=True))
        self._leave_source()

    def check_integrity(self, held: Iterable[int] | None = None) -> None:
        """Raises IntegrityError unless every page is in exactly one state.

        held: pages of all block tables (see `BlockTable.held_pages`), once per reference. If given,
        the reference counts are checked, too. For an idle engine pass `held=()`.
        """
        self._arena.check_integrity()
        self.pool.check_integrity()
        self.prefix_cache.check_integrity(held)
        self._source.check_integrity()
