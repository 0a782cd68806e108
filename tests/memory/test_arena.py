"""Extents, floors and ceilings; runs that span extents; pages that drain them."""

from __future__ import annotations

import numpy as np
import pytest

from memory.allocations import UNIT_BYTES, AdapterAllocations
from memory.arena import Arena
from memory.errors import IntegrityError
from memory.pages import PagePool
from tests.memory.holder import num_runs

EXTENT = 4 * UNIT_BYTES


def test_kv_grows_from_the_low_end_and_adapters_from_the_high_end() -> None:
    arena = Arena(6 * EXTENT, EXTENT)
    runs = AdapterAllocations(arena)
    pool = PagePool(arena, "m", EXTENT)
    assert pool.allocate(2) == [0, 1]
    run = runs.allocate(EXTENT + 1)
    assert run is not None and run.offset == arena.num_bytes - run.num_bytes
    assert run.num_bytes == EXTENT + UNIT_BYTES
    assert arena.map() == "kk..aa"


def test_kv_leaves_the_floor_and_adapters_keep_to_the_ceiling() -> None:
    arena = Arena(6 * EXTENT, EXTENT, EXTENT + 1, 3 * EXTENT)
    runs = AdapterAllocations(arena)
    pool = PagePool(arena, "m", EXTENT)
    assert pool.num_free == 4 and pool.allocate(5) is None
    assert pool.allocate(4) is not None and arena.map() == "kkkk.."
    assert runs.allocate(2 * EXTENT) is not None
    assert runs.allocate(1) is None
    for page in range(4):
        pool.release(page)
    assert runs.allocate(EXTENT) is not None and runs.allocate(1) is None
    assert runs.capacity_bytes == 3 * EXTENT


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
        AdapterAllocations(Arena(EXTENT, UNIT_BYTES - 1))
    with pytest.raises(ValueError, match="page"):
        PagePool(Arena(EXTENT, EXTENT), "m", EXTENT + 1)


def test_small_runs_share_an_extent_and_the_last_gives_it_back() -> None:
    arena = Arena(4 * EXTENT, EXTENT)
    runs = AdapterAllocations(arena)
    small = [runs.allocate(UNIT_BYTES) for _ in range(4)]
    assert arena.map() == "...a"
    for run in small:
        assert run is not None and arena.map() == "...a"
        runs.free(run)
    assert arena.map() == "...." and num_runs(runs) == 0


def test_a_run_prefers_the_place_that_takes_no_new_extent() -> None:
    arena = Arena(4 * EXTENT, EXTENT)
    runs = AdapterAllocations(arena)
    three, hole, rest = (runs.allocate(n * UNIT_BYTES) for n in (3, 2, 3))
    assert three and hole and rest and arena.map() == "..aa"
    runs.free(hole)
    again = runs.allocate(2 * UNIT_BYTES)
    assert again == hole
    runs.check_integrity()


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
    runs, pool = AdapterAllocations(arena), PagePool(arena, "m", UNIT_BYTES)
    run = runs.allocate(1)
    assert run is not None
    runs.free(run)
    with pytest.raises(IntegrityError, match="not a live run"):
        runs.free(run)
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
