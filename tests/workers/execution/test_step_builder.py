"""Rows that are kept from step to step are those that each step would make anew."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from memory.arena import Arena
from memory.block_table import BlockTable
from memory.eviction.adapter_memory import UNIT_BYTES
from memory.kv_cache import KVCache
from memory.page_key import PAGE_TOKENS, PageHasher
from tests.memory.holder import page_keys
from workers.execution.step_builder import BlockTables

NUM_SLOTS = 4
MAX_PAGES = 6
HASHER = PageHasher(model="m", domain="acme")

slots = st.integers(0, NUM_SLOTS - 1)
events = st.one_of(
    st.tuples(st.just("begin"), slots, st.integers(0, 1)),
    st.tuples(st.just("resume"), slots, st.integers(0, 1)),
    st.tuples(st.just("grow"), slots, st.integers(1, 3)),
    st.tuples(st.just("step"), st.lists(slots, min_size=1, unique=True), st.integers(0, 3)),
)


class Slots:
    """Sequences whose tokens are all the same word, so that prefixes are often shared."""

    def __init__(self) -> None:
        self.kv = KVCache(Arena(4 * UNIT_BYTES, UNIT_BYTES), "m", UNIT_BYTES // 8)
        self.kept = BlockTables(self.kv.pool)
        self.tables = [BlockTable(self.kv) for _ in range(NUM_SLOTS)]
        self.words = [0] * NUM_SLOTS

    def begin(self, slot: int, word: int) -> None:
        """The slot's sequence ends, and another one's first tokens are looked for."""
        self.tables[slot].free()
        self.tables[slot] = BlockTable(self.kv)
        self.resume(slot, word)

    def resume(self, slot: int, word: int) -> None:
        """The sequence is preempted and begins again."""
        self.tables[slot].free()
        self.words[slot] = word
        self.tables[slot].match_prefix(self._keys(slot, MAX_PAGES))

    def grow(self, slot: int, num_pages: int) -> None:
        table = self.tables[slot]
        count = min(len(table.pages) + num_pages, MAX_PAGES)
        if table.grow(count * PAGE_TOKENS):
            table.commit(self._keys(slot, count))

    def step(self, running: list[int], extra: int) -> None:
        """The sequences of these slots that have pages."""
        running = [slot for slot in running if self.tables[slot].pages]
        if not running:
            return
        lists = [self.tables[slot].pages for slot in running]
        width = max(map(len, lists)) + extra
        rows = self.kept.rows(np.array(running), lists, width)
        assert rows.shape == (len(running), width)
        for row, pages in zip(rows, lists, strict=True):
            assert row[: len(pages)].tolist() == self.kv.pool.offsets(np.array(pages)).tolist()

    def _keys(self, slot: int, num_pages: int) -> list[bytes]:
        return page_keys(HASHER, [self.words[slot]] * (num_pages * PAGE_TOKENS))


@given(st.lists(events, max_size=40))
def test_rows_are_those_of_the_sequences(happened: list[tuple]) -> None:
    slots = Slots()
    for kind, target, number in happened:
        getattr(slots, kind)(target, number)
    slots.step(list(range(NUM_SLOTS)), 0)
