"""What every source of pages does, whatever it evicts from."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from memory.accounts import Tenant
from memory.arena import Arena
from memory.block_table import BlockTable
from memory.eviction.adapter_memory import UNIT_BYTES, AdapterMemory
from memory.eviction.broker import MemoryBroker
from memory.kv_cache import KVCache
from memory.page_key import PAGE_TOKENS
from memory.page_source import OwnPages, PageSource
from tests.memory.holder import make_room
from tests.memory.test_prefix_cache import compute, keys_of, num_matched

PAGE_BYTES = UNIT_BYTES // 4
NUM_PAGES = 8
ACME = Tenant("acme", 1)


@pytest.fixture(
    params=[lambda _: OwnPages(), lambda arena: MemoryBroker(arena, AdapterMemory(arena))]
)
def kv(request: pytest.FixtureRequest) -> KVCache:
    make: Callable[[Arena], PageSource] = request.param
    arena = Arena(NUM_PAGES * PAGE_BYTES, 4 * PAGE_BYTES)
    return KVCache(arena, "m", PAGE_BYTES, source=make(arena))


def test_nothing_is_evicted_while_pages_are_free(kv: KVCache) -> None:
    compute(kv, keys_of(1, 2, 3)).free()
    assert make_room(kv, NUM_PAGES - 3) and kv.idle.num_pages == 3
    assert not kv.is_shared


def test_idle_pages_are_evicted_as_far_as_needed(kv: KVCache) -> None:
    compute(kv, keys_of(1, 2, 3)).free()
    compute(kv, keys_of(4)).free()
    assert make_room(kv, 6, ACME) and kv.idle.num_pages == 2
    assert kv.pool.num_free == 6 and num_matched(kv, keys_of(4)) == 1


def test_too_few_idle_pages_are_not_evicted_in_vain(kv: KVCache) -> None:
    in_use = compute(kv, keys_of(1, 2, 3))
    compute(kv, keys_of(4, 5)).free()
    table = BlockTable(kv, ACME)
    assert not table.make_room(6) and not table.grow(6 * PAGE_TOKENS)
    assert kv.idle.num_pages == 2
    assert table.make_room(3, num_beside=2) and kv.idle.num_pages == 0
    assert table.grow(5 * PAGE_TOKENS)
    table.free()
    in_use.free()
    kv.check_integrity(held=())
