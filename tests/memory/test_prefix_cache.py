"""What is reused, what stays private, and in which order cached pages leave."""

from __future__ import annotations

import pytest

from memory.accounts import NO_TENANT, Ask, Tenant
from memory.arena import Arena
from memory.block_table import BlockTable
from memory.errors import IntegrityError
from memory.eviction.adapter_memory import UNIT_BYTES
from memory.eviction.loss import Loss
from memory.kv_cache import KVCache
from memory.page_key import PAGE_TOKENS, PageHasher
from memory.prefix_cache import Image
from tests.memory.holder import evict, page_keys

HASHER = PageHasher(model="m", domain="acme")


def make_kv(num_extents: int = 4, pages_per_extent: int = 4) -> KVCache:
    arena = Arena(num_extents * UNIT_BYTES, UNIT_BYTES)
    return KVCache(arena, "m", UNIT_BYTES // pages_per_extent)


def keys_of(*words: int) -> list[bytes]:
    return page_keys(HASHER, [word for word in words for _ in range(PAGE_TOKENS)])


def compute(kv: KVCache, keys: list[bytes], tenant: Tenant = NO_TENANT) -> BlockTable:
    """A sequence that has all these pages computed and shared."""
    table = BlockTable(kv, tenant)
    table.match_prefix(keys, len(keys) * PAGE_TOKENS)
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
    assert table.match_prefix(keys, 3 * PAGE_TOKENS - 1) == 2 * PAGE_TOKENS
    assert table.pages == pages[:2] and kv.idle.num_pages == 1
    table.free()
    assert table.match_prefix(keys_of(1, 9, 3), 3 * PAGE_TOKENS) == PAGE_TOKENS
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
    table.match_prefix(keys, len(keys) * PAGE_TOKENS)
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
    assert changes is not None and len(changes.removed) == 3 - first_page
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
    kv = KVCache(arena, "m", UNIT_BYTES // 4, clock=lambda: now)
    acme, globex = Tenant("acme", 1), Tenant("globex", 1)
    prompts = [(globex, [1]), (acme, [1, 2]), (globex, [3]), (globex, [4])]
    prompts += [(acme, [5]), (acme, [6]), (acme, [7])]
    for tenant, words in prompts:
        now += 1.0
        compute(kv, keys_of(*words), tenant).free()
    assert evict(kv, 3) == 3
    page_bytes = kv.pool.page_bytes
    assert arena.bytes_held.held == {"acme": 2 * page_bytes, "globex": 2 * page_bytes}


def test_what_is_worth_as_much_as_the_limit_goes_and_what_is_worth_more_does_not() -> None:
    arena = Arena(UNIT_BYTES, UNIT_BYTES)
    kv = KVCache(arena, "m", UNIT_BYTES // 4, clock=lambda: 0.0)
    compute(kv, keys_of(1)).free()
    ask = Ask(arena.bytes_held, NO_TENANT.name, 0, is_first=True)
    priority, chance = ask.priority(NO_TENANT.name), 1 / (1 + 2)
    cost_s = chance * kv.idle.page_cost_s / kv.pool.page_bytes
    assert kv.idle.evict(1, ask, Loss(priority, 0.99 * cost_s)) == 0
    assert kv.idle.evict(1, ask, Loss(priority, cost_s * (1 + 1e-9))) == 1


def test_allocation_evicts_what_is_idle_and_never_what_is_used() -> None:
    kv = make_kv(num_extents=1)
    used = compute(kv, keys_of(1, 2))
    compute(kv, keys_of(3, 4)).free()
    table = BlockTable(kv)
    assert not table.grow(3 * PAGE_TOKENS) and table.pages == [] and kv.idle.num_pages == 2
    assert table.grow(2 * PAGE_TOKENS) and kv.idle.num_pages == 0
    assert not set(table.pages) & set(used.pages)
    assert not table.grow(2 * PAGE_TOKENS + 1) and table.grow(1)


def test_a_prefix_found_often_outlives_newer_ones() -> None:
    now = 0.0
    arena = Arena(4 * UNIT_BYTES, UNIT_BYTES)
    kv = KVCache(arena, "m", UNIT_BYTES // 4, clock=lambda: now)
    popular = keys_of(1, 2)
    for _ in range(4):
        compute(kv, [*popular, *keys_of(1, 2, 3)[2:]]).free()
    for word in range(10, 16):
        now += 1.0
        compute(kv, keys_of(word)).free()
    assert evict(kv, 6) == 6
    assert num_matched(kv, popular) == 2 and num_matched(kv, keys_of(15)) == 0
    now += 3600.0
    compute(kv, keys_of(20)).free()
    assert evict(kv, kv.idle.num_pages - 1) and num_matched(kv, keys_of(20)) == 1


def test_a_page_that_is_computed_anew_was_asked_for_again() -> None:
    """Where memory is short a page may always leave before anybody comes back to it."""
    kv = make_kv()
    compute(kv, keys_of(1)).free()
    assert evict(kv, 1) == 1
    for word in (1, 2, 3):
        compute(kv, keys_of(word)).free()
    assert evict(kv, 2) == 2
    assert num_matched(kv, keys_of(1)) == 1


def test_of_pages_that_were_found_the_one_found_least_goes_first() -> None:
    kv = make_kv()
    for word in (1, 1, 1, 1, 2, 2):
        compute(kv, keys_of(word)).free()
    assert evict(kv, 1) == 1 and num_matched(kv, keys_of(1)) == 1


def test_a_page_that_is_computed_anew_is_as_popular_as_it_was() -> None:
    kv = make_kv()
    for _ in range(4):
        compute(kv, keys_of(1)).free()
    compute(kv, keys_of(2)).free()
    assert evict(kv, 2) == 2
    for word in (1, 2):
        compute(kv, keys_of(word)).free()
    assert evict(kv, 1) == 1 and num_matched(kv, keys_of(1)) == 1


def test_a_match_that_is_given_back_at_once_is_no_use() -> None:
    """A sequence that waits for room looks for its prefix in every step."""
    kv = make_kv()
    waiting, used = keys_of(1, 2), keys_of(3, 4)
    for keys in (used, waiting):
        compute(kv, keys).free()
    table = BlockTable(kv)
    assert table.match_prefix(used, 32) and table.grow(33)
    table.free()
    for _ in range(100):
        table.match_prefix(waiting, 32)
        table.free()
    assert evict(kv, 2) == 2 and num_matched(kv, waiting) == 0
    assert evict(kv, 1) == 1 and num_matched(kv, used) == 1


def test_draining_an_extent_costs_the_pages_after_it_too() -> None:
    kv = make_kv(num_extents=3)
    kv.idle.record_prefill(10**9, 1e9)
    compute(kv, keys_of(1, 2, 3, 4, 5, 6)).free()
    chance = 1 / (6 + 2)
    own = {extent: lost.cost_s for extent, lost in kv.idle.drainable().items()}
    assert own == {
        0: pytest.approx(4 * 16 * chance, rel=1e-3),
        1: pytest.approx(2 * 16 * chance, rel=1e-3),
    }
    assert kv.idle.lost_with(0).cost_s == pytest.approx(6 * 16 * chance, rel=1e-3)
    assert kv.idle.lost_with(1).cost_s == pytest.approx(2 * 16 * chance, rel=1e-3)
    kv.idle.drain(0)
    assert kv.idle.num_pages == 0 and kv.idle.drainable() == {}


def test_an_extent_costs_what_is_idle_in_it_and_is_of_those_alone() -> None:
    """A page that was found counts as often, one that never was by the chance that it will be."""
    kv = make_kv()
    kv.idle.record_prefill(10**9, 1e9)
    acme, globex = Tenant("acme", 1), Tenant("globex", 1)
    compute(kv, keys_of(1), globex).free()
    for _ in range(4):
        compute(kv, keys_of(2), acme).free()
    chance = (1 + 1) / (2 + 2)
    lost = kv.idle.drainable()[0]
    assert set(lost.accounts) == {"acme", "globex"}
    assert lost.cost_s == pytest.approx((3 + chance) * 16, rel=1e-3)
    assert evict(kv, 1) == 1
    lost = kv.idle.drainable()[0]
    assert set(lost.accounts) == {"acme"}
    assert lost.cost_s == pytest.approx(3 * 16, rel=1e-3)


def test_the_reference_count_of_a_forgotten_page_does_not_add_up() -> None:
    kv = make_kv()
    pages = kv.pool.allocate(1)
    assert pages
    kv.check_integrity(held=pages)
    with pytest.raises(IntegrityError, match="1 pages are used, 0 have a holder"):
        kv.check_integrity(held=())
