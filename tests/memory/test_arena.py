"""Extents, floors and ceilings; images in pieces; pages that drain them."""

from __future__ import annotations

import numpy as np
import pytest

from memory.arena import Arena
from memory.errors import IntegrityError
from memory.eviction.adapter_memory import UNIT_BYTES, AdapterMemory, Piece
from memory.pages import PagePool
from tests.memory.holder import num_placements, units

EXTENT = 4 * UNIT_BYTES


def test_kv_grows_from_the_low_end_and_adapters_from_the_high_end() -> None:
    arena = Arena(6 * EXTENT, EXTENT)
    memory = AdapterMemory(arena)
    pool = PagePool(arena, "m", EXTENT)
    assert pool.allocate(2) == [0, 1]
    placement = memory.allocate([EXTENT, EXTENT + 1])
    assert placement is not None and placement.num_bytes == EXTENT + UNIT_BYTES
    assert placement.pieces == ((5 * EXTENT - UNIT_BYTES, 0, EXTENT + 1),)
    assert arena.map() == "kk..aa"


def test_kv_leaves_the_floor_and_adapters_keep_to_the_ceiling() -> None:
    arena = Arena(6 * EXTENT, EXTENT, EXTENT + 1, 3 * EXTENT)
    memory = AdapterMemory(arena)
    pool = PagePool(arena, "m", EXTENT)
    assert pool.num_free == 4 and pool.allocate(5) is None
    assert pool.allocate(4) is not None and arena.map() == "kkkk.."
    assert memory.allocate([2 * EXTENT]) is not None
    assert memory.allocate([1]) is None
    for page in range(4):
        pool.release(page)
    assert memory.allocate([EXTENT]) is not None and memory.allocate([1]) is None
    assert memory.capacity_bytes == 3 * EXTENT


@pytest.mark.parametrize(
    ("num_bytes", "floor", "ceiling"),
    [(EXTENT - 1, 0, None), (4 * EXTENT, 3 * EXTENT, 2 * EXTENT), (EXTENT, 2 * EXTENT, None)],
)
def test_sizes_that_contradict_each_other_are_refused(
    num_bytes: int, floor: int, ceiling: int | None
) -> None:
    with pytest.raises(ValueError, match=str(EXTENT)):
        Arena(num_bytes, EXTENT, floor, ceiling)


def test_an_extent_that_is_not_whole_units_or_a_page_larger_than_one_is_refused() -> None:
    with pytest.raises(ValueError, match="units"):
        AdapterMemory(Arena(EXTENT, UNIT_BYTES - 1))
    with pytest.raises(ValueError, match="page"):
        PagePool(Arena(EXTENT, EXTENT), "m", EXTENT + 1)


def test_small_images_share_an_extent_and_the_last_gives_it_back() -> None:
    arena = Arena(4 * EXTENT, EXTENT)
    memory = AdapterMemory(arena)
    small = [memory.allocate([UNIT_BYTES]) for _ in range(4)]
    assert arena.map() == "...a"
    for placement in small:
        assert placement is not None and arena.map() == "...a"
        memory.free(placement)
    assert arena.map() == "...." and num_placements(memory) == 0


def test_an_image_is_cut_between_factors_to_fill_holes() -> None:
    """The smallest hole that fits the rest, otherwise the largest; then a new extent."""
    arena = Arena(4 * EXTENT, EXTENT)
    memory = AdapterMemory(arena)
    one = [memory.allocate(units(1)) for _ in range(12)]
    assert arena.map() == ".aaa"
    for index in (1, 4, 5, 8, 9, 10):
        freed = one[index]
        assert freed is not None
        memory.free(freed)
    sizes = [piece.stop - piece.start for piece in _pieces(memory, units(4))]
    assert sizes == [3 * UNIT_BYTES, UNIT_BYTES]
    assert len(_pieces(memory, units(2))) == 1
    assert (arena.map(), memory.num_hole_bytes) == (".aaa", 0)
    memory.check_integrity()


def _pieces(memory: AdapterMemory, ends: list[int]) -> tuple[Piece, ...]:
    placement = memory.allocate(ends)
    return () if placement is None else placement.pieces


def test_new_pages_come_from_the_fullest_extent_so_that_others_drain() -> None:
    arena = Arena(4 * EXTENT, EXTENT)
    pool = PagePool(arena, "m", UNIT_BYTES)
    pages = pool.allocate(12)
    assert pages == list(range(12))
    for page in (0, 1, 2, 4):
        pool.release(page)
    assert pool.allocate(1) == [4]
    pool.release(3)
    assert arena.map() == ".kk."


def test_offsets_follow_extents_and_keep_the_shape() -> None:
    pool = PagePool(Arena(2 * EXTENT, EXTENT), "m", 100_000)
    assert pool.pages_per_extent == 2
    offsets = pool.offsets(np.array([[0, 1], [2, 3]], dtype=np.int32))
    assert offsets.dtype == np.int64
    assert offsets.tolist() == [[0, 100_000], [EXTENT, EXTENT + 100_000]]


def test_giving_back_what_is_not_held_is_a_named_error() -> None:
    arena = Arena(2 * EXTENT, EXTENT)
    memory, pool = AdapterMemory(arena), PagePool(arena, "m", UNIT_BYTES)
    placement = memory.allocate([1])
    assert placement is not None
    memory.free(placement)
    with pytest.raises(IntegrityError, match="is not allocated"):
        memory.free(placement)
    with pytest.raises(IntegrityError, match="page 3"):
        pool.release(3)
    with pytest.raises(IntegrityError, match="page 3"):
        pool.retain(3)


def test_integrity_check_finds_a_page_that_was_lost() -> None:
    arena = Arena(2 * EXTENT, EXTENT)
    pool, stranger = PagePool(arena, "m", UNIT_BYTES), PagePool(arena, "m", UNIT_BYTES)
    assert pool.allocate(1)
    with pytest.raises(IntegrityError, match="extents"):
        stranger.check_integrity()
