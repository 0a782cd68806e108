"""Free parts of a range of integers, such as the units of a memory."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterator
from itertools import pairwise

from memory.errors import require


class Holes:
    """Free intervals [start, end): sorted, disjoint and not adjacent."""

    def __init__(self) -> None:
        self._holes: list[tuple[int, int]] = []

    def __iter__(self) -> Iterator[tuple[int, int]]:
        return iter(self._holes)

    @property
    def size(self) -> int:
        """Total size of the holes."""
        return sum(end - start for start, end in self._holes)

    def best(self, size: int) -> tuple[int, int] | None:
        """Returns the smallest hole of at least `size`, or the largest hole if none is large
        enough. Of equal holes, returns the highest. Returns None if there are no holes."""
        large = [hole for hole in self._holes if hole[1] - hole[0] >= size]
        if large:
            return min(large, key=lambda hole: (hole[1] - hole[0], -hole[0]))
        return max(self._holes, key=lambda hole: (hole[1] - hole[0], hole[0]), default=None)

    def add(self, start: int, end: int) -> tuple[int, int]:
        """Adds a free interval and returns the bounds of the hole that now contains it."""
        index = bisect_left(self._holes, (start, end))
        first, last = index, index
        if index > 0 and self._holes[index - 1][1] == start:
            first, start = index - 1, self._holes[index - 1][0]
        if index < len(self._holes) and self._holes[index][0] == end:
            last, end = index + 1, self._holes[index][1]
        self._holes[first:last] = [(start, end)]
        return start, end

    def remove(self, start: int, end: int) -> None:
        """Marks an interval as no longer free. The interval must be inside one hole."""
        index = bisect_right(self._holes, start, key=lambda hole: hole[0]) - 1
        hole_start, hole_end = self._holes[index]
        require(end <= hole_end, f"{start}..{end} is not free")
        rest = ((hole_start, start), (end, hole_end))
        self._holes[index : index + 1] = [hole for hole in rest if hole[0] < hole[1]]

    def check_integrity(self) -> None:
        """Raises IntegrityError unless the holes are sorted, disjoint and not adjacent."""
        for (_, end), (start, _) in pairwise(self._holes):
            require(end < start, f"holes touch at {start}")
