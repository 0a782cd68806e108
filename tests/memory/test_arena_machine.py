"""Any order of events on one arena keeps every extent, page and unit in exactly one state."""

from __future__ import annotations

from itertools import accumulate, pairwise

import numpy as np
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    Bundle,
    RuleBasedStateMachine,
    invariant,
    multiple,
    precondition,
    rule,
)

from memory.arena import Arena
from memory.eviction.adapter_memory import UNIT_BYTES, AdapterMemory, Placement
from memory.pages import PagePool

EXTENT = 4 * UNIT_BYTES
WEIGHTS = ("small", "unpaged")
PAGE_BYTES = {"small": 24_000, "large": 80_000, "whole": EXTENT}


class SharedArena(RuleBasedStateMachine):
    """Three models' pages and the adapters' pieces, with the bytes that each thinks are its own."""

    pages = Bundle("pages")
    placements = Bundle("placements")

    def __init__(self) -> None:
        super().__init__()
        self.arena = Arena(12 * EXTENT + 5, EXTENT, 3 * EXTENT - 1, 8 * EXTENT)
        self.adapters = AdapterMemory(self.arena)
        self.pools = {name: PagePool(self.arena, name, size) for name, size in PAGE_BYTES.items()}
        self.references: dict[tuple[str, int], int] = {}
        self.live: set[Placement] = set()
        self.weights: dict[str, int] = dict.fromkeys(WEIGHTS, 0)

    @rule(owner=st.sampled_from(WEIGHTS), count=st.integers(1, 12))
    def allocate_weights(self, owner: str, count: int) -> None:
        num_obtainable = self.arena.num_beside_obtainable + self.arena.num_kv_obtainable
        taken = self.arena.allocate_weights(owner, count)
        assert taken == min(count, num_obtainable)
        self.weights[owner] += taken

    @precondition(lambda self: self.arena.num_beside < 8)
    @rule(count=st.integers(1, 4))
    def extend(self, count: int) -> None:
        """With room beside the arena, its own extents stay as they are."""
        before = self.arena.map()
        self.arena.extend(count)
        assert self.arena.map() == before + "." * count

    @rule(owner=st.sampled_from(WEIGHTS))
    def free_weights(self, owner: str) -> None:
        self.arena.free_weights(owner)
        self.weights[owner] = 0

    @rule(target=pages, name=st.sampled_from(sorted(PAGE_BYTES)), count=st.integers(0, 25))
    def allocate_pages(self, name: str, count: int):
        pool = self.pools[name]
        num_free = pool.num_free
        pages = pool.allocate(count)
        if pages is None:
            assert count > num_free and pool.num_free == num_free
            return multiple()
        assert len(pages) == count <= num_free and pool.num_free == num_free - count
        assert not set(pages) & {page for owner, page in self.references if owner == name}
        self.references.update({(name, page): 1 for page in pages})
        return multiple(*((name, page) for page in pages))

    @rule(item=pages)
    def retain(self, item: tuple[str, int]) -> None:
        if item in self.references:
            self.pools[item[0]].retain(item[1])
            self.references[item] += 1

    @rule(item=pages)
    def release(self, item: tuple[str, int]) -> None:
        if item in self.references:
            self.references[item] -= 1
            left = self.pools[item[0]].release(item[1])
            assert left == self.references[item]
            if not left:
                del self.references[item]

    @rule(target=placements, sizes=st.lists(st.integers(1, EXTENT), min_size=1, max_size=9))
    def allocate_adapter(self, sizes: list[int]):
        before, holes = self.arena.map(), self.adapters.num_hole_bytes
        placement = self.adapters.allocate([*accumulate(sizes)])
        if placement is None:
            assert (self.arena.map(), self.adapters.num_hole_bytes) == (before, holes)
            return multiple()
        assert [piece.start for piece in placement.pieces][1:] == [
            piece.stop for piece in placement.pieces[:-1]
        ]
        assert {piece.stop for piece in placement.pieces} <= {*accumulate(sizes)}
        self.live.add(placement)
        return placement

    @rule(target=placements, size=st.integers(EXTENT + 1, 4 * EXTENT))
    def allocate_large_factor(self, size: int):
        """It is in one piece, with a small one beside it."""
        placement = self.adapters.allocate([100, size + 100])
        if placement is None:
            return multiple()
        assert [piece.stop for piece in placement.pieces][-2:] == [100, size + 100]
        self.live.add(placement)
        return placement

    @rule(placement=placements)
    def free_adapter(self, placement: Placement) -> None:
        if placement in self.live:
            self.live.remove(placement)
            self.adapters.free(placement)

    @rule()
    def free_all_adapters(self) -> None:
        """The floor is then one piece, whatever KV does."""
        for placement in self.live:
            self.adapters.free(placement)
        self.live.clear()
        placement = self.adapters.allocate([3 * EXTENT])
        assert placement is not None and self.adapters.num_hole_bytes == 0
        self.adapters.free(placement)

    @invariant()
    def every_byte_has_one_holder(self) -> None:
        pieces = [piece for placement in self.live for piece in placement.pieces]
        spans = [(piece.offset, piece.stop - piece.start) for piece in pieces]
        for name, pool in self.pools.items():
            pages = np.array([p for owner, p in self.references if owner == name], dtype=np.int64)
            spans += [(int(offset), pool.page_bytes) for offset in pool.offsets(pages)]
        spans.sort()
        for (start, length), (following, _) in pairwise(spans):
            assert start + length <= following
        assert not spans or sum(spans[-1]) <= self.arena.num_bytes

    @invariant()
    def accounts_agree(self) -> None:
        self.arena.check_integrity()
        self.adapters.check_integrity()
        for pool in self.pools.values():
            pool.check_integrity()
        extents = self.arena.map()[:12]
        assert extents.count("k") + extents.count("w") <= 9 and extents.count("a") <= 8
        for owner, count in self.weights.items():
            assert self.arena.num_weight_extents(owner) == count
        owned = {extent for owner in WEIGHTS for extent in self.arena.weight_extents(owner)}
        assert owned == {extent for extent, mark in enumerate(extents) if mark == "w"}

    def teardown(self) -> None:
        for owner in self.weights:
            self.arena.free_weights(owner)
        for (name, page), count in self.references.items():
            for _ in range(count):
                self.pools[name].release(page)
        for placement in self.live:
            self.adapters.free(placement)
        assert self.arena.map() == "." * (12 + self.arena.num_beside)


TestSharedArena = SharedArena.TestCase
TestSharedArena.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
