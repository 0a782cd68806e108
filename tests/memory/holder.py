"""Adapters as the broker sees them: placements with a cost, some in use."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from memory.accounts import NO_TENANT, Tenant
from memory.eviction.adapter_memory import UNIT_BYTES, AdapterMemory, Placement
from memory.kv_cache import KVCache
from memory.page_key import PAGE_TOKENS, PageHasher
from memory.page_source import OwnPages


class IdleAdapters:
    """costs: of the idle placements. awaited: those among them that somebody is about to lease."""

    def __init__(self, memory: AdapterMemory) -> None:
        self._memory = memory
        self.num_evictions = 0
        self.costs: dict[Placement, float] = {}
        self.awaited: set[Placement] = set()
        self.in_use: dict[Placement, float] = {}

    def idle(self, *, with_awaited: bool) -> Mapping[Placement, float]:
        hidden = set() if with_awaited else self.awaited
        return {each: cost for each, cost in self.costs.items() if each not in hidden}

    def evict(self, placement: Placement) -> None:
        del self.costs[placement]
        self.awaited.discard(placement)
        self._memory.free(placement)

    def go_idle(self, index: int, *, is_awaited: bool) -> None:
        placement = list(self.in_use)[index % len(self.in_use)]
        self.costs[placement] = self.in_use.pop(placement)
        if is_awaited:
            self.awaited.add(placement)

    def lease(self, index: int) -> None:
        placement = list(self.costs)[index % len(self.costs)]
        self.in_use[placement] = self.costs.pop(placement)
        self.awaited.discard(placement)


def units(num_units: int) -> list[int]:
    """Ends of factors of one unit each."""
    return [UNIT_BYTES * (number + 1) for number in range(num_units)]


def num_placements(memory: AdapterMemory) -> int:
    return len({each for found in memory.by_extent().values() for each in found})


def evict(kv: KVCache, num_pages: int) -> int:
    """Evicts pages of any account, and returns their number."""
    num_pages = min(num_pages, kv.idle.num_pages)
    num_free = kv.pool.num_free + num_pages
    assert OwnPages().make_room(kv.idle, NO_TENANT, num_free, 0, is_first=True)
    return num_pages


def make_room(kv: KVCache, num_pages: int, tenant: Tenant = NO_TENANT) -> bool:
    """Makes room for a tenant that has other sequences."""
    return kv.source.make_room(kv.idle, tenant, num_pages, 0, is_first=False)


def page_keys(hasher: PageHasher, tokens: Sequence[int]) -> list[bytes]:
    """Keys of all full pages of the tokens."""
    keys: list[bytes] = []
    hasher.extend(keys, tokens, len(tokens) // PAGE_TOKENS)
    return keys
