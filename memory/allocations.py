"""Contiguous allocations of bytes for adapters, of any size, at the high end of the arena."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import pairwise

from memory.accounts import NO_TENANT
from memory.arena import Arena
from memory.errors import require

UNIT_BYTES = 64 << 10


@dataclass(frozen=True, slots=True)
class Allocation:
    """Bytes offset..offset + num_bytes of the arena; num_bytes is whole units."""

    offset: int
    num_bytes: int


class AdapterAllocations:
    """Allocations of 64 KiB units over adjacent adapter extents, each charged to an account. The
    only user of the arena's adapter extents.

    Holes are free units inside adapter extents: sorted, disjoint, coalesced, as [start, end) in
    units. No hole covers a whole extent, because that extent was returned to the arena.
    """

    def __init__(self, arena: Arena) -> None:
        if arena.extent_bytes % UNIT_BYTES:
            raise ValueError(
                f"an extent of {arena.extent_bytes} bytes is not whole units of {UNIT_BYTES}"
            )
        self._arena = arena
        self._extent_units = arena.extent_bytes // UNIT_BYTES
        self._holes: list[tuple[int, int]] = []
        self._runs: dict[Allocation, str] = {}
        """Account that is charged for each allocation."""

    @property
    def capacity_bytes(self) -> int:
        """Size of the largest possible allocation in bytes: the adapter ceiling."""
        return self._arena.adapter_ceiling * self._arena.extent_bytes

    def place_of(self, run: Allocation) -> range:
        """Returns the byte range of the allocation in the device's memory."""
        start = self._arena.first_byte + run.offset
        return range(start, start + run.num_bytes)

    @staticmethod
    def rounded(num_bytes: int) -> int:
        """Rounds a size in bytes up to whole units."""
        return -(-num_bytes // UNIT_BYTES) * UNIT_BYTES

    def by_extent(self) -> dict[int, list[Allocation]]:
        """Returns the allocations that overlap each extent."""
        found: dict[int, list[Allocation]] = {}
        size = self._arena.extent_bytes
        for run in self._runs:
            for extent in range(run.offset // size, -(-(run.offset + run.num_bytes) // size)):
                found.setdefault(extent, []).append(run)
        return found

    def holes(self) -> list[tuple[int, int]]:
        """Returns the free byte ranges inside adapter extents as (start, end), in order."""
        return [(start * UNIT_BYTES, end * UNIT_BYTES) for start, end in self._holes]

    def is_allowed(self, start: int, end: int, num_bytes: int) -> bool:
        """Whether `num_bytes` at one end of start..end need no more new extents than the ceiling
        permits."""
        first, last = start // UNIT_BYTES, end // UNIT_BYTES
        size = -(-num_bytes // UNIT_BYTES)
        allowed = self._arena.adapter_ceiling - self._arena.num_adapter_extents
        places = ((first, first + size), (last - size, last))
        return min(len(self._new_extents(*place)) for place in places) <= allowed

    def held_bytes(self) -> Counter[str]:
        """Returns the allocated bytes by account."""
        held = Counter[str]()
        for run, account in self._runs.items():
            held[account] += run.num_bytes
        return held

    def allocate(self, num_bytes: int, account: str = NO_TENANT.name) -> Allocation | None:
        """Allocates at least `num_bytes` where it needs the fewest new extents, at the highest such
        place.

        Returns None if no free range is long enough; the caller may evict and call again. Raises
        ValueError unless `num_bytes` is positive.
        """
        if num_bytes <= 0:
            raise ValueError(f"a run of {num_bytes} bytes")
        num_units = -(-num_bytes // UNIT_BYTES)
        start = self._find(num_units)
        if start is None:
            return None
        self._take_extents(start, start + num_units)
        self._carve(start, start + num_units)
        run = Allocation(start * UNIT_BYTES, num_units * UNIT_BYTES)
        self._runs[run] = account
        self._arena.bytes_held.charge(account, run.num_bytes)
        return run

    def account_of(self, run: Allocation) -> str:
        return self._runs[run]

    def charge(self, run: Allocation, account: str) -> None:
        """Charges the allocation to another account."""
        self._arena.bytes_held.charge(self._runs[run], -run.num_bytes)
        self._arena.bytes_held.charge(account, run.num_bytes)
        self._runs[run] = account

    def free(self, run: Allocation) -> None:
        """Frees the allocation, and returns each extent without an allocation to the arena."""
        require(run in self._runs, f"{run} is not a live run")
        self._arena.bytes_held.charge(self._runs.pop(run), -run.num_bytes)
        start = run.offset // UNIT_BYTES
        self._return_extents(*self._add_hole(start, start + run.num_bytes // UNIT_BYTES))

    def _find(self, num_units: int) -> int | None:
        """Returns the first unit of the best place, or None if there is none. A place inside a hole
        needs no new extent. Otherwise the place that needs the fewest is at one end of a stretch of
        holes and free extents, because whole free extents are only in its middle."""
        for start, end in reversed(self._holes):
            if end - start >= num_units:
                return end - num_units
        best: tuple[int, int] | None = None
        for start, end in self._spans():
            if end - start < num_units:
                continue
            for place in (start, end - num_units):
                key = (len(self._new_extents(place, place + num_units)), -place)
                best = key if best is None else min(best, key)
        if best is None or best[0] > self._arena.num_adapters_obtainable:
            return None
        return -best[1]

    def _spans(self) -> list[tuple[int, int]]:
        """Returns the maximal intervals of units in holes and free extents."""
        size = self._extent_units
        free = [(r.start * size, r.stop * size) for r in self._arena.free_ranges()]
        return _joined(sorted([*self._holes, *free]))

    def _new_extents(self, start: int, end: int) -> range:
        """Returns the adjacent extents of a free interval that are not adapter extents yet."""
        first, last = start // self._extent_units, (end - 1) // self._extent_units
        while first <= last and self._arena.is_adapter(first):
            first += 1
        while last >= first and self._arena.is_adapter(last):
            last -= 1
        return range(first, last + 1)

    def _take_extents(self, start: int, end: int) -> None:
        extents = self._new_extents(start, end)
        if extents:
            require(self._arena.allocate_adapters(extents), f"extents {extents} are not obtainable")
            size = self._extent_units
            self._add_hole(extents.start * size, extents.stop * size)

    def _carve(self, start: int, end: int) -> None:
        index = bisect_right(self._holes, start, key=lambda hole: hole[0]) - 1
        hole_start, hole_end = self._holes[index]
        rest = ((hole_start, start), (end, hole_end))
        self._holes[index : index + 1] = [hole for hole in rest if hole[0] < hole[1]]

    def _add_hole(self, start: int, end: int) -> tuple[int, int]:
        """Adds free units and returns the bounds of the hole that now contains them."""
        index = bisect_left(self._holes, (start, end))
        first, last = index, index
        if index > 0 and self._holes[index - 1][1] == start:
            first, start = index - 1, self._holes[index - 1][0]
        if index < len(self._holes) and self._holes[index][0] == end:
            last, end = index + 1, self._holes[index][1]
        self._holes[first:last] = [(start, end)]
        return start, end

    def _return_extents(self, start: int, end: int) -> None:
        """Returns the whole extents inside the hole to the arena."""
        size = self._extent_units
        extents = range(-(-start // size), end // size)
        if extents:
            self._carve(extents.start * size, extents.stop * size)
            self._arena.free_adapters(extents)

    def check_integrity(self) -> None:
        """Raises IntegrityError unless allocations and holes tile the adapter extents exactly."""
        size = self._extent_units
        runs = [(run.offset, run.offset + run.num_bytes) for run in self._runs]
        parts = sorted([*runs, *self.holes()])
        for (_, end), (start, _) in pairwise(parts):
            require(end <= start, f"two parts of the adapters' bytes overlap at {start}")
        covered = _joined(parts)
        extent_bytes = self._arena.extent_bytes
        owned = _joined(
            (extent * extent_bytes, (extent + 1) * extent_bytes)
            for extent in range(self._arena.num_extents)
            if self._arena.is_adapter(extent)
        )
        require(covered == owned, f"runs and holes cover {covered}, adapter extents are {owned}")
        for (_, end), (start, _) in pairwise(self._holes):
            require(end < start, f"holes touch at unit {start}")
        for start, end in self._holes:
            require(-(-start // size) >= end // size, f"hole {start}..{end} keeps a whole extent")


def _joined(parts: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    """Joins touching intervals. The input must be sorted."""
    joined: list[tuple[int, int]] = []
    for start, end in parts:
        if joined and joined[-1][1] == start:
            start = joined.pop()[0]
        joined.append((start, end))
    return joined
