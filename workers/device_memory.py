"""The bytes that the arena's extents stand for."""

from __future__ import annotations

import mmap
from collections.abc import Iterable
from itertools import pairwise

import torch


class DeviceMemory:
    """KV pages and adapters lie here. Weights lie where the allocator puts them: on the CPU what
    their extents stand for here goes back to the system, so that no byte is held twice.

    tensor: uint8 [num_bytes].
    """

    def __init__(self, num_bytes: int, device: torch.device) -> None:
        self._pages: mmap.mmap | None = None
        if device.type == "cpu":
            flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
            self._pages = mmap.mmap(-1, num_bytes, flags=flags)
            self.tensor = torch.frombuffer(self._pages, dtype=torch.uint8)
        else:
            self.tensor = torch.empty(num_bytes, dtype=torch.uint8, device=device)

    def give_back(self, extents: Iterable[int], extent_bytes: int) -> None:
        """What lies in these extents is lost; who writes there again gets new memory."""
        if self._pages is None:
            return
        for first, end in _ranges(sorted(extents)):
            start = -(-first * extent_bytes // mmap.PAGESIZE) * mmap.PAGESIZE
            stop = end * extent_bytes // mmap.PAGESIZE * mmap.PAGESIZE
            if start < stop:
                self._pages.madvise(mmap.MADV_DONTNEED, start, stop - start)


def _ranges(numbers: list[int]) -> Iterable[tuple[int, int]]:
    """Neighbours together, as (first, end)."""
    breaks = [i + 1 for i, (a, b) in enumerate(pairwise(numbers)) if b != a + 1]
    edges = [0, *breaks, len(numbers)]
    return [(numbers[a], numbers[b - 1] + 1) for a, b in pairwise(edges) if a < b]
