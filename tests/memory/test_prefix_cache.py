"""What is reused, what stays private, and in which order cached pages leave."""

from __future__ import annotations

import pytest

from memory.accounts import NO_TENANT, Tenant
from memory.arena import Arena
from memory.block_table import BlockTable
from memory.errors import IntegrityError
from memory.eviction.adapter_memory import UNIT_BYTES, AdapterMemory
from memory.eviction.broker import MemoryBroker
from memory.kv_cache import KVCache
from memory.page_key import PAGE_TOKENS, PageHasher
from memory.prefix_cache import Image
from memory.reuse import HALF_LIFE_S
from tests.memory.holder import evict, page_keys

HASHER = PageHasher(model="m", domain="acme")


def make_kv(num_extents: int = 4, pages_per_extent: int = 4) -> KVCache:
    return KVCache(Arena(num_extents * UNIT_BYTES, UNIT_BYTES), "m", UNIT_BYTES // pages_per_extent)


def keys_of(*words: int) -> list[bytes]:
    return page_keys(HASHER, [word for word in words for _ in range(PAGE_TOKENS)])


def compute(kv: KVCache, keys: list[bytes], tenant: Tenant = NO_TENANT) -> BlockTable:
    """A sequence that has all these pages computed and shared."""
    table = BlockTable(kv, tenant)
    table.match_prefix(keys)
    assert table.grow(len(keys) * PAGE_TOKENS)
    table.commit(keys)
    return table


def num_matched(kv: KVCache, keys: list[bytes]) -> int:
    pages = kv.prefix_cache.match(keys)
    kv.prefix_cache.release(pages)
    return len(pages)


def test_a_finished_sequence_is_reused_up_to_the_allowed_tokens() -> None:
    kv = make_kv()
    keys = keys_of(1, 2, 3)
    first = compute(kv, keys)
    pages = list(first.pages)
    first.free()
    assert (kv.idle.num_pages, kv.num_free, kv.num_total) == (3, 16, 16)
    table = BlockTable(kv)
    assert table.match_prefix(keys[:2]) == 2 * PAGE_TOKENS
    assert table.pages == pages[:2] and kv.idle.num_pages == 1
    table.free()
    assert table.match_prefix(keys_of(1, 9, 3)) == PAGE_TOKENS
    table.free()
    kv.check_integrity(held=())


def test_running_sequences_share_pages_at_once() -> None:
    kv = make_kv()
    keys = keys_of(1, 2)
    first, second = compute(kv, keys), compute(kv, keys)
    assert first.pages == second.pages and kv.pool.num_used == 2
    first.free()
    assert kv.idle.num_pages == 0
    second.free()
    assert kv.idle.num_pages == 2


def compute_with(kv: KVCache, image: Image, *words: int) -> BlockTable:
    """A sequence whose first pages are of the base model, and that has all its pages shared."""
    hasher = PageHasher(
        model="m",
        domain="acme",
        adapter=image.adapter,
        activation=image.first_page * PAGE_TOKENS,
    )
    keys = page_keys(hasher, [word for word in words for _ in range(PAGE_TOKENS)])
    table = BlockTable(kv)
    table.use_image(image)
    table.match_prefix(keys)
    assert table.grow(len(keys) * PAGE_TOKENS)
    table.commit(keys[:1])
    table.commit(keys)
    return table


@pytest.mark.parametrize("first_page", [0, 1, 2])
def test_pages_of_a_replaced_image_leave_and_no_others(first_page: int) -> None:
    kv = make_kv()
    wrong, right = Image("a", "wrong", first_page), Image("a", "right", first_page)
    other = compute_with(kv, Image("b", "wrong", 0), 1, 2, 3)
    other.free()
    compute_with(kv, wrong, 1, 2, 3).free()
    used = compute(kv, keys_of(1, 2))
    num_before = len(list(kv.prefix_cache.keys))
    table = BlockTable(kv)
    table.use_image(wrong)
    kv.prefix_cache.journal.take()
    assert len(list(kv.prefix_cache.keys)) == num_before
    table.use_image(right)
    changes = kv.prefix_cache.journal.take()
    assert changes is not None and len(changes[1]) == 3 - first_page
    assert len(list(kv.prefix_cache.keys)) == num_before - (3 - first_page)
    kv.check_integrity(held=used.held_pages)
    used.free()
    assert num_matched(kv, keys_of(1, 2)) == 2
    compute_with(kv, right, 1, 2, 3).free()
    assert len(list(kv.prefix_cache.keys)) == num_before
    assert evict(kv, 16) == num_before
    compute_with(kv, wrong, 1, 2, 3).free()
    kv.check_integrity(held=())


def test_pages_in_use_are_of_the_image_in_use() -> None:
    kv = make_kv()
    compute_with(kv, Image("a", "one", 0), 1, 2)
    with pytest.raises(IntegrityError, match="in use"):
        kv.prefix_cache.use_image(Image("a", "other", 0))


def test_a_page_computed_twice_stays_private_and_what_follows_it_is_cached() -> None:
    kv = make_kv()
    first, second = BlockTable(kv), BlockTable(kv)
    keys = keys_of(1, 2)
    for table in (first, second):
        assert table.grow(2 * PAGE_TOKENS)
    first.commit(keys[:1])
    second.commit(keys[:1])
    second.commit(keys)
    assert first.pages[0] != second.pages[0]
    kv.check_integrity([*first.held_pages, *second.held_pages])
    first.free()
    assert kv.idle.num_pages == 0, "the cached twin is held as long as the page cached after it"
    second.free()
    assert kv.idle.num_pages == 2 and kv.pool.num_used == 2
    assert num_matched(kv, keys) == 2
    assert evict(kv, 1) == 1 and num_matched(kv, keys) == 1


def test_eviction_takes_leaves_of_the_least_recently_used_prefix_first() -> None:
    kv = make_kv()
    old, new = keys_of(1, 2, 3), keys_of(1, 5)
    for keys in (old, new):
        compute(kv, keys).free()
    assert evict(kv, 2) == 2
    assert num_matched(kv, old) == 1 and num_matched(kv, new) == 2
    assert evict(kv, 9) == 2 and num_matched(kv, new) == 0


def test_who_has_only_pages_before_those_of_another_gives_way_after_it() -> None:
    """Of one sharing group: the page after acme's is of globex."""
    kv = make_kv()
    compute(kv, keys_of(1), Tenant("acme", 1)).free()
    compute(kv, keys_of(1, 2), Tenant("globex", 1)).free()
    assert evict(kv, 2) == 2 and kv.idle.num_pages == 0


def test_each_page_of_a_sharing_group_is_evicted_from_the_account_that_holds_the_most() -> None:
    """A page of globex becomes a leaf when the page of acme after it is evicted."""
    now = 0.0
    arena = Arena(2 * UNIT_BYTES, UNIT_BYTES, clock=lambda: now)
    broker = MemoryBroker(arena, AdapterMemory(arena))
    kv = KVCache(arena, "m", UNIT_BYTES // 4, source=broker, clock=lambda: now)
    acme, globex = Tenant("acme", 1), Tenant("globex", 1)
    prompts = [(globex, [1]), (acme, [1, 2]), (globex, [3]), (globex, [4])]
    prompts += [(acme, [5]), (acme, [6]), (acme, [7])]
    for tenant, words in prompts:
        now += 1.0
        compute(kv, keys_of(*words), tenant).free()
    num_free = kv.pool.num_free + 3
    assert broker.make_room(kv.idle, NO_TENANT, num_free, 0, is_first=True)
    assert kv.pool.num_free == num_free
    page_bytes = kv.pool.page_bytes
    assert arena.bytes_held.held == {"acme": 2 * page_bytes, "globex": 2 * page_bytes}


def test_allocation_evicts_what_is_idle_and_never_what_is_used() -> None:
    kv = make_kv(num_extents=1)
    used = compute(kv, keys_of(1, 2))
    compute(kv, keys_of(3, 4)).free()
    table = BlockTable(kv)
    assert not table.grow(3 * PAGE_TOKENS) and table.pages == [] and kv.idle.num_pages == 2
    assert table.grow(2 * PAGE_TOKENS) and kv.idle.num_pages == 0
    assert not set(table.pages) & set(used.pages)
    assert not table.grow(2 * PAGE_TOKENS + 1) and table.grow(1)


def test_a_prefix_that_was_found_lately_outlives_newer_ones() -> None:
    kv = make_kv()
    for word in (1, 2, 3, 1):
        compute(kv, keys_of(word, 9)).free()
    assert evict(kv, 4) == 4
    assert num_matched(kv, keys_of(1, 9)) == 2


def test_draining_an_extent_evicts_the_pages_after_it_too() -> None:
    now = 0.0
    arena = Arena(3 * UNIT_BYTES, UNIT_BYTES, clock=lambda: now)
    kv = KVCache(arena, "m", UNIT_BYTES // 4, clock=lambda: now)
    kv.idle.token_s.add(1e9, 10**9)
    acme, globex = Tenant("acme", 1), Tenant("globex", 1)
    compute(kv, keys_of(1, 2, 3), acme).free()
    compute(kv, keys_of(1, 2, 3, 4, 5, 6), globex).free()
    assert kv.idle.accounts_in(0) == {"acme", "globex"} == kv.idle.lost_with(0)[0]
    assert kv.idle.accounts_in(1) == {"globex"} == kv.idle.lost_with(1)[0]
    now += HALF_LIFE_S
    compute(kv, keys_of(1)).free()
    num_uses = {0: (1 + 2 / 2) + 2 * 2 / 2 + 1 / 2, 1: 2 / 2}
    assert kv.idle.drainable() == {
        extent: pytest.approx(uses * PAGE_TOKENS, rel=1e-3) for extent, uses in num_uses.items()
    }
    total = pytest.approx(sum(num_uses.values()) * PAGE_TOKENS, rel=1e-3)
    assert kv.idle.lost_with(0)[1] == total
    kv.idle.drain(0)
    assert kv.idle.num_pages == 0 and kv.idle.drainable() == {}


def test_a_match_that_is_given_back_at_once_is_no_use() -> None:
    """A sequence that waits for room looks for its prefix in every step."""
    kv = make_kv()
    compute(kv, keys_of(1, 2)).free()
    cost_s = kv.idle.drainable()[0]
    table = BlockTable(kv)
    for _ in range(100):
        assert table.match_prefix(keys_of(1, 2))
        table.free()
    assert kv.idle.drainable()[0] == pytest.approx(cost_s, rel=1e-3)


def test_the_reference_count_of_a_forgotten_page_does_not_add_up() -> None:
    kv = make_kv()
    pages = kv.pool.allocate(1)
    assert pages
    kv.check_integrity(held=pages)
    with pytest.raises(IntegrityError, match="1 pages are used, 0 have a holder"):
        kv.check_integrity(held=())
