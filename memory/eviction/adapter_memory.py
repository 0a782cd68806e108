"""Memory for adapter images. An image is stored in pieces, at the high end of the arena."""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

from memory.accounts import NO_TENANT
from memory.arena import Arena
from memory.errors import require
from memory.eviction.holes import Holes

UNIT_BYTES = 64 << 10


class Piece(NamedTuple):
    """Bytes [start, stop) of an image, stored at byte `offset` of the device's memory."""

    offset: int
    start: int
    stop: int


@dataclass(frozen=True, eq=False, slots=True)
class Placement:
    """Memory of one image. pieces: parts of the image, in order. num_bytes: total size, a multiple
    of `UNIT_BYTES`."""

    pieces: tuple[Piece, ...]
    num_bytes: int


class AdapterMemory:
    """Placements of images in 64 KiB units of adapter extents. Each placement is charged to an
    account. No other object allocates adapter extents from the arena.

    An image consists of factors (the adapter's LoRA matrices). It is cut between factors if no hole
    can hold all of it. Each part is placed into the smallest hole that is large enough for the rest
    of the image, or else into the largest hole. If the next factor fits into no hole, the longest
    available run of adjacent extents is added, up to the size of the rest of the image. Only a
    factor that is larger than an extent requires adjacent extents.

    Holes are free units inside adapter extents. No hole covers a whole extent, because an extent
    without placements is returned to the arena.
    """

    def __init__(self, arena: Arena) -> None:
        if arena.extent_bytes % UNIT_BYTES:
            raise ValueError(
                f"an extent of {arena.extent_bytes} bytes is not whole units of {UNIT_BYTES}"
            )
        self._arena = arena
        self._extent_units = arena.extent_bytes // UNIT_BYTES
        self._holes = Holes()
        self._placements: dict[Placement, str] = {}
        """Account that is charged for each placement."""

    @property
    def capacity_bytes(self) -> int:
        """Maximum number of bytes of all adapters together (the arena's adapter ceiling)."""
        return self._arena.adapter_ceiling * self._arena.extent_bytes

    @property
    def num_hole_bytes(self) -> int:
        """Free bytes inside adapter extents."""
        return self._holes.size * UNIT_BYTES

    @property
    def needs_extents(self) -> bool:
        """Whether adapters could use more extents than are free."""
        return self._num_addable > self._arena.num_free

    @property
    def num_free_bytes(self) -> int:
        """Bytes that adapters can still use, in holes and in free extents."""
        num_extents = min(self._num_addable, self._arena.num_free)
        return self.num_hole_bytes + num_extents * self._arena.extent_bytes

    @property
    def _num_addable(self) -> int:
        """Number of extents by which the adapters may grow."""
        return self._arena.adapter_ceiling - self._arena.num_adapter_extents

    def trial(self) -> AdapterMemory:
        """Returns a copy, in a copy of the arena. Changes of the copy have no effect here."""
        trial = AdapterMemory(self._arena.trial())
        for hole in self._holes:
            trial._holes.add(*hole)
        trial._placements = dict(self._placements)
        return trial

    def free_extent(self, extent: int) -> None:
        """Frees an extent of KV pages. Only for trials."""
        self._arena.free_kv(extent, self._arena.kv_owner(extent))

    @staticmethod
    def rounded(num_bytes: int) -> int:
        """Rounds a size in bytes up to whole units."""
        return _num_units(num_bytes) * UNIT_BYTES

    def could_hold(self, ends: Sequence[int]) -> bool:
        """Whether an image would fit if the memory contained no other image. ends: position in the
        image, in bytes, at which each factor ends."""
        arena = Arena(self.capacity_bytes, self._arena.extent_bytes)
        return AdapterMemory(arena).allocate(ends) is not None

    def by_extent(self) -> dict[int, list[Placement]]:
        """Returns, for each adapter extent, the placements that have bytes in it."""
        found: dict[int, dict[Placement, None]] = {}
        size = self._extent_units
        for placement in self._placements:
            for start, end in map(self._units, placement.pieces):
                for extent in range(start // size, -(-end // size)):
                    found.setdefault(extent, {})[placement] = None
        return {extent: list(placements) for extent, placements in found.items()}

    def held_bytes(self) -> Counter[str]:
        """Returns the allocated bytes by account."""
        held = Counter[str]()
        for placement, account in self._placements.items():
            held[account] += placement.num_bytes
        return held

    def allocate(self, ends: Sequence[int], account: str = NO_TENANT.name) -> Placement | None:
        """Allocates memory for an image. Returns None, and changes nothing, if there is too little
        memory. Then the caller may evict items and call again.

        ends: position in the image, in bytes, at which each factor ends, in order.
        """
        bounds = [0, *ends]
        pieces: list[Piece] = []
        for first, last in self._sections(bounds):
            while first < last:
                rest = _num_units(bounds[last] - bounds[first])
                start, end = self._holes.best(rest) or (0, 0)
                limit = bounds[first] + (end - start) * UNIT_BYTES
                stop = bisect_right(bounds, limit, first, last + 1) - 1
                if stop > first:
                    num_units = _num_units(bounds[stop] - bounds[first])
                    self._holes.remove(end - num_units, end)
                    self._return_extents(start, end - num_units)
                    offset = self._arena.first_byte + (end - num_units) * UNIT_BYTES
                    pieces.append(Piece(offset, bounds[first], bounds[stop]))
                    first = stop
                elif not self._add_extents(
                    bounds[first + 1] - bounds[first], bounds[last] - bounds[first]
                ):
                    self._free(pieces)
                    return None
        pieces.sort(key=lambda piece: piece.start)
        placement = Placement(tuple(pieces), sum(self.rounded(p.stop - p.start) for p in pieces))
        self._placements[placement] = account
        self._arena.bytes_held.charge(account, placement.num_bytes)
        return placement

    def account_of(self, placement: Placement) -> str:
        return self._placements[placement]

    def charge(self, placement: Placement, account: str) -> None:
        """Charges the placement to another account."""
        self._arena.bytes_held.charge(self._placements[placement], -placement.num_bytes)
        self._arena.bytes_held.charge(account, placement.num_bytes)
        self._placements[placement] = account

    def free(self, placement: Placement) -> None:
        """Frees the placement. Extents without another placement are returned to the arena."""
        require(placement in self._placements, f"{placement} is not allocated")
        self._arena.bytes_held.charge(self._placements.pop(placement), -placement.num_bytes)
        self._free(placement.pieces)

    def _units(self, piece: Piece) -> tuple[int, int]:
        """Returns the units that the piece occupies, as [start, end)."""
        first = (piece.offset - self._arena.first_byte) // UNIT_BYTES
        return first, first + _num_units(piece.stop - piece.start)

    def _sections(self, bounds: Sequence[int]) -> Iterator[tuple[int, int]]:
        """Yields ranges [first, last) of factors, in the order in which memory is allocated for
        them. Each factor that is larger than an extent is a range of its own, and these ranges are
        first, because such a factor needs adjacent extents."""
        size = self._arena.extent_bytes
        large = [i for i, (start, end) in enumerate(pairwise(bounds)) if end - start > size]
        yield from ((i, i + 1) for i in large)
        for before, after in pairwise([-1, *large, len(bounds) - 1]):
            yield before + 1, after

    def _add_extents(self, least: int, most: int) -> bool:
        """Adds adjacent extents for at least `least` and up to `most` bytes. Returns False if too
        few are available."""
        size = self._arena.extent_bytes
        extents = self._arena.allocate_adapters(-(-least // size), -(-most // size))
        if extents is None:
            return False
        self._holes.add(extents.start * self._extent_units, extents.stop * self._extent_units)
        return True

    def _free(self, pieces: Sequence[Piece]) -> None:
        for piece in pieces:
            self._return_extents(*self._holes.add(*self._units(piece)))

    def _return_extents(self, start: int, end: int) -> None:
        """Returns the whole extents inside a hole to the arena."""
        size = self._extent_units
        extents = range(-(-start // size), end // size)
        if extents:
            self._holes.remove(extents.start * size, extents.stop * size)
            self._arena.free_adapters(extents)

    def check_integrity(self) -> None:
        """Raises IntegrityError unless placements and holes together cover the adapter extents
        exactly, without overlap."""
        size = self._extent_units
        pieces = [self._units(piece) for each in self._placements for piece in each.pieces]
        covered = Holes()
        for (_, end), (start, _) in pairwise(sorted([*pieces, *self._holes])):
            require(end <= start, f"two parts of the adapters' memory overlap at unit {start}")
        for part in [*pieces, *self._holes]:
            covered.add(*part)
        owned = Holes()
        for extent in range(self._arena.num_extents):
            if self._arena.is_adapter(extent):
                owned.add(extent * size, (extent + 1) * size)
        require(list(covered) == list(owned), f"covered {[*covered]}, extents {[*owned]}")
        self._holes.check_integrity()
        for start, end in self._holes:
            require(-(-start // size) >= end // size, f"hole {start}..{end} keeps a whole extent")
        for placement in self._placements:
            ends = [piece.stop for piece in placement.pieces]
            starts = [piece.start for piece in placement.pieces]
            require(starts == [0, *ends[:-1]], f"pieces of {placement} do not follow each other")


def _num_units(num_bytes: int) -> int:
    return -(-num_bytes // UNIT_BYTES)
