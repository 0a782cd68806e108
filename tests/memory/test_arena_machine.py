"""Any order of events on one arena keeps every extent, page and unit in exactly one state."""

from __future__ import annotations

from itertools import pairwise

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

from memory.allocations import UNIT_BYTES, AdapterAllocations, Allocation
from memory.arena import Arena
from memory.pages import PagePool

EXTENT = 4 * UNIT_BYTES
WEIGHTS = ("small", "unpaged")
PAGE_BYTES = {"small": 24_000, "large": 80_000, "whole": EXTENT}


class Lent(set[int]):
    """Extents that weights have, as the bytes behind them are told."""

    def lend(self, extent: int) -> None:
        assert extent not in self
        self.add(extent)

    def restore(self, extent: int) -> None:
        self.remove(extent)


class SharedArena(RuleBasedStateMachine):
    """Three models' pages and the adapters' runs, with the bytes each holder thinks are its own."""

    pages = Bundle("pages")
    runs = Bundle("runs")

    def __init__(self) -> None:
        super().__init__()
        self.arena = Arena(12 * EXTENT + 5, EXTENT, 3 * EXTENT - 1, 8 * EXTENT)
        self.lent = self.arena.backing = Lent()
        self.adapter_runs = AdapterAllocations(self.arena)
        self.pools = {name: PagePool(self.arena, name, size) for name, size in PAGE_BYTES.items()}
        self.references: dict[tuple[str, int], int] = {}
        self.live_runs: set[Allocation] = set()
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

    @rule()
    def sink_weights(self) -> None:
        """They lie below all that is free afterwards, but for the floor."""
        self.arena.sink_weights()
        extents = self.arena.map()[:9]
        assert "." not in extents[: extents.rfind("w") + 1]
        assert not self.arena.sink_weights()

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

    @rule(target=runs, num_bytes=st.integers(1, 4 * EXTENT))
    def allocate_run(self, num_bytes: int):
        before = self.arena.map()
        run = self.adapter_runs.allocate(num_bytes)
        if run is None:
            assert self.arena.map() == before
            return multiple()
        assert run.num_bytes >= num_bytes > run.num_bytes - UNIT_BYTES
        self.live_runs.add(run)
        return run

    @rule(run=runs)
    def free_run(self, run: Allocation) -> None:
        if run in self.live_runs:
            self.live_runs.remove(run)
            self.adapter_runs.free(run)

    @rule()
    def free_all_runs(self) -> None:
        """Evicting all adapters is compaction: the floor is then one piece, whatever KV does."""
        for run in self.live_runs:
            self.adapter_runs.free(run)
        self.live_runs.clear()
        run = self.adapter_runs.allocate(3 * EXTENT)
        assert run is not None
        self.adapter_runs.free(run)

    @invariant()
    def every_byte_has_one_holder(self) -> None:
        spans = [(run.offset, run.num_bytes) for run in self.live_runs]
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
        self.adapter_runs.check_integrity()
        for pool in self.pools.values():
            pool.check_integrity()
        extents = self.arena.map()[:12]
        assert extents.count("k") + extents.count("w") <= 9 and extents.count("a") <= 8
        for owner, count in self.weights.items():
            assert self.arena.num_weight_extents(owner) == count
        assert self.lent == {extent for extent, mark in enumerate(extents) if mark == "w"}

    def teardown(self) -> None:
        for owner in self.weights:
            self.arena.free_weights(owner)
        for (name, page), count in self.references.items():
            for _ in range(count):
                self.pools[name].release(page)
        for run in self.live_runs:
            self.adapter_runs.free(run)
        assert self.arena.map() == "." * (12 + self.arena.num_beside)


TestSharedArena = SharedArena.TestCase
TestSharedArena.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
