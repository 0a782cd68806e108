"""The KV memory of one model: its page pool and its prefix cache, as one."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from threading import Lock

from memory.accounts import NO_TENANT, Ask, BytesHeld, Tenant
from memory.arena import Arena
from memory.broker import MemoryBroker
from memory.page_key import PAGE_TOKENS
from memory.pages import PagePool
from memory.places import NO_LIMIT, Idle, Loss
from memory.prefix_cache import PrefixCache

SECONDS_PER_TOKEN = 1e-3
"""To prefill one token, until it is measured."""
MEMORY = 0.9
"""Part that is kept, at each new measurement, of what was measured before."""


class KVCache:
    """Every page is free, used by sequences, or idle in the prefix cache (counted as obtainable).

    Sequences allocate here and give back through `prefix_cache.release`, never to the pool itself.
    """

    def __init__(
        self,
        arena: Arena,
        owner: str,
        page_bytes: int,
        *,
        broker: MemoryBroker | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """broker: of all caches of the arena; none if there are no others."""
        self._arena = arena
        self._broker = broker or MemoryBroker(arena)
        self._broker.add_cache(owner, self)
        self.pool = PagePool(arena, owner, page_bytes)
        self.prefix_cache = PrefixCache(self.pool, clock)
        self._bytes_held = arena.bytes_held
        self.tables = BytesHeld(arena.bytes_held.accounts)
        """Block tables that have pages."""
        self._prefill = (float(PAGE_TOKENS), PAGE_TOKENS * SECONDS_PER_TOKEN)
        """Tokens and seconds of late."""

    @property
    def lock(self) -> Lock:
        """That of the arena."""
        return self._broker.lock

    @property
    def has_neighbours(self) -> bool:
        """Other models share the arena."""
        return self._broker.num_caches > 1

    @property
    def num_free(self) -> int:
        """Pages without a user, idle cached ones included. A caller may find fewer: not
        everybody gives way to everybody."""
        return self.pool.num_free + self.prefix_cache.num_idle

    @property
    def num_total(self) -> int:
        """Pages in use and obtainable ones; changes as extents move to and from others."""
        return self.pool.num_used + self.pool.num_free

    @property
    def num_cached(self) -> int:
        """Idle pages in the prefix cache: without a user, kept for reuse."""
        return self.prefix_cache.num_idle

    @property
    def page_cost_s(self) -> float:
        """Seconds to compute a page again, as prefill goes of late."""
        num_tokens, seconds = self._prefill
        return PAGE_TOKENS * seconds / num_tokens

    def note_prefill(self, num_tokens: int, seconds: float) -> None:
        """Records how long the prefill of `num_tokens` tokens took."""
        old_tokens, old_seconds = self._prefill
        self._prefill = MEMORY * old_tokens + num_tokens, MEMORY * old_seconds + seconds

    def ask(self, num_pages: int, tenant: Tenant, *, is_first: bool) -> Ask:
        """For so many pages more."""
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
        """Sees to it that so many pages are free, at the cost of what is idle here or at others and
        gives way to the tenant. False if that does not suffice. num_beside: pages more, for others.
        is_first: none of the tenant's other sequences has pages here."""
        self._bytes_held.accounts.note(tenant)
        ask = self.ask(num_pages, tenant, is_first=is_first)
        return self._broker.free_pages(self, num_pages + num_beside, ask)

    def allocate(
        self, num_pages: int, tenant: Tenant = NO_TENANT, *, is_first: bool = False
    ) -> list[int] | None:
        """New pages with one reference each, the caller's; None if even `make_room` does not
        help."""
        if not self.make_room(num_pages, tenant, is_first=is_first):
            return None
        return self.pool.allocate(num_pages, tenant.name)

    def num_evictable(self, ask: Ask) -> int:
        """Idle pages that give way to the ask."""
        return self.prefix_cache.num_evictable(ask)

    def evict(self, num_pages: int, ask: Ask | None = None, limit: Loss = NO_LIMIT) -> int:
        """Frees up to so many idle pages in the order of their loss, and only while that is at most
        the limit, in seconds a byte. Returns how many. ask: the account it is for; None: none,
        and any may lose pages."""
        ask = ask or self._broker.at_any_cost()
        max_reuse = limit.cost_s * self.pool.page_bytes / self.page_cost_s
        return self.prefix_cache.evict(num_pages, ask, (limit.priority, max_reuse))

    def drainable(self) -> dict[int, Idle]:
        """Extents that `drain` could free, with what the loss of the pages in them costs: seconds
        to compute them again, times their expected reuse."""
        cost = self.page_cost_s
        return {
            extent: Idle(accounts, cost * reuse)
            for extent, (accounts, reuse) in self.prefix_cache.drainable().items()
        }

    def lost_with(self, extents: Iterable[int]) -> Idle:
        """The same for all that draining these together loses, pages after theirs included."""
        accounts, reuse = self.prefix_cache.lost_with(extents)
        return Idle(accounts, reuse * self.page_cost_s)

    def drain(self, extent: int) -> None:
        """Gives a drainable extent back to the arena, for adapters or another model."""
        self.prefix_cache.evict_extent(extent)

    def check_integrity(self, held: Iterable[int] | None = None) -> None:
        """Raises IntegrityError unless every page is in exactly one state.

        `held`: the pages of all block tables (`BlockTable.held_pages`), each once per reference;
        given, the reference counts must add up too. An idle engine holds none:
        `check_integrity(held=())`.
        """
        self._arena.check_integrity()
        self.pool.check_integrity()
        self.prefix_cache.check_integrity(held)
        self._broker.check_integrity()
