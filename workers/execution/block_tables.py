"""Block tables of running sequences in one array, updated incrementally from step to step."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from memory.pages import PagePool


class BlockTables:
    """Block tables, one row per sequence slot. A step writes only pages added since the previous
    step, because a sequence's list of pages only grows or is replaced by another list."""

    def __init__(self, pool: PagePool) -> None:
        self._pool = pool
        self._offsets = np.zeros((0, 0), np.int64)
        self._lists: list[list[int]] = []
        self._counts: list[int] = []
        """Number of pages of each list that are already in the array."""

    def rows(self, slots: NDArray[Any], lists: list[list[int]], width: int) -> NDArray[np.int64]:
        """Returns byte offsets of pages, int64 [S, width], of the sequences in these slots. lists:
        each sequence's pages. Entries past a sequence's last page are undefined."""
        self._make_room(int(slots.max()) + 1, max(width, max(map(len, lists))))
        for slot, pages in zip(slots.tolist(), lists, strict=True):
            count = len(pages)
            known = self._counts[slot] if self._lists[slot] is pages else 0
            if known != count:
                new = np.array(pages[known:], np.int64)
                self._offsets[slot, known:count] = self._pool.offsets(new)
                self._lists[slot], self._counts[slot] = pages, count
        return self._offsets[slots, :width]

    def _make_room(self, num_slots: int, width: int) -> None:
        rows, columns = self._offsets.shape
        if num_slots > rows or width > columns:
            larger = np.zeros((max(rows, num_slots), max(columns, 2 * width)), np.int64)
            larger[:rows, :columns] = self._offsets
            self._offsets = larger
        missing = num_slots - len(self._lists)
        self._lists += [[] for _ in range(missing)]
        self._counts += [0] * missing
