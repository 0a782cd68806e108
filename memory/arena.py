"""A device's memory, divided into equal extents that KV, adapters and weights share."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable
from copy import copy
from threading import Lock

from memory.accounts import Accounts, Holdings
from memory.errors import require


class Arena:
    """Extents of a device's memory and their owners. Each extent belongs to one KV cache, to the
    adapters, to one model's weights, or is free.

        extent   0   1   2   3   4   5   6   7
                 w   w   k   .   .   a   a   a      KV from the low end, adapters from the high
                                         `--+--'
                                floor: for adapters alone, always contiguous

    The adapters' floor is the memory that only adapters may use, and their ceiling is the maximum
    that they may use. The floor is rounded up to whole extents, the ceiling is rounded down. KV and
    weights may use any extents outside the floor, adjacent or not. Extents outside the arena (see
    `extend`) hold only weights and have no number. Sets of extents are bit masks, in which bit i
    stands for extent i. Not thread-safe.
    """

    def __init__(
        self,
        num_bytes: int,
        extent_bytes: int,
        adapter_floor_bytes: int = 0,
        adapter_ceiling_bytes: int | None = None,
        *,
        first_byte: int = 0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """first_byte: offset of extent 0 in the device's memory. The bytes before it are not part
        of the arena. Raises ValueError for sizes that contradict each other."""
        if extent_bytes <= 0 or num_bytes < extent_bytes:
            raise ValueError(f"an arena of {num_bytes} bytes has no extent of {extent_bytes} bytes")
        self.first_byte = first_byte
        self.extent_bytes = extent_bytes
        self.num_extents = num_bytes // extent_bytes
        self.num_bytes = self.num_extents * extent_bytes
        ceiling_bytes = self.num_bytes if adapter_ceiling_bytes is None else adapter_ceiling_bytes
        self.adapter_floor = -(-adapter_floor_bytes // extent_bytes)
        self.adapter_ceiling = min(ceiling_bytes // extent_bytes, self.num_extents)
        if not 0 <= self.adapter_floor <= self.adapter_ceiling:
            raise ValueError(
                f"adapters need {adapter_floor_bytes} bytes or more ({self.adapter_floor} extents) "
                f"and may have {ceiling_bytes} ({self.adapter_ceiling} extents of {extent_bytes})"
            )
        self.lock = Lock()
        """Must be held while reading or changing the owners of the arena's bytes. The engine thread
        does not hold this lock while it computes a step, because bytes in use are never evicted."""
        self.num_caches = 0
        """Number of KV caches that use the arena."""
        self.bytes_held = Holdings(Accounts(clock))
        """Bytes of KV pages and adapters, by account."""
        self._all = (1 << self.num_extents) - 1
        self._kv_zone = (1 << (self.num_extents - self.adapter_floor)) - 1
        self._free = self._all
        self._adapters = 0
        self._kv: dict[int, str] = {}
        self._weights: dict[int, str] = {}
        self.num_beside = 0
        """Number of extents that `extend` has added outside the arena, used and free."""
        self._weights_beside: Counter[str] = Counter()

    @property
    def num_adapter_extents(self) -> int:
        return self._adapters.bit_count()

    @property
    def num_kv_extents(self) -> int:
        """Number of extents that KV and weights may use (the arena without the adapters' floor)."""
        return self.num_extents - self.adapter_floor

    @property
    def num_beside_obtainable(self) -> int:
        """Number of free extents among the extents that `extend` has added outside the arena. They
        can hold only weights."""
        return self.num_beside - self._weights_beside.total()

    def extend(self, num_extents: int) -> None:
        """Adds extents outside the arena, which can hold only weights. The caller must have
        allocated their memory."""
        self.num_beside += num_extents

    @property
    def num_kv_obtainable(self) -> int:
        """Number of free extents that a KV cache may allocate now."""
        return (self._free & self._kv_zone).bit_count()

    @property
    def num_free(self) -> int:
        """Number of free extents inside the arena."""
        return self._free.bit_count()

    def allocate_kv(self, owner: str) -> int | None:
        """Allocates the lowest free extent to the owner. Returns None if no extent that KV may use
        is free."""
        extent = self._take_lowest()
        if extent is not None:
            self._kv[extent] = owner
        return extent

    def free_kv(self, extent: int, owner: str) -> None:
        require(self._kv.get(extent) == owner, f"extent {extent} is not KV of {owner!r}")
        del self._kv[extent]
        self._free |= 1 << extent

    def allocate_weights(self, owner: str, num_extents: int) -> int:
        """Allocates up to `num_extents` free extents to the owner: first those that only weights
        use, then the lowest shared ones that weights may use. Returns the number allocated."""
        num_taken = min(num_extents, self.num_beside_obtainable)
        self._weights_beside[owner] += num_taken
        while num_taken < num_extents and (extent := self._take_lowest()) is not None:
            self._weights[extent] = owner
            num_taken += 1
        return num_taken

    def free_weights(self, owner: str) -> None:
        """Frees all extents of the owner."""
        self._weights_beside.pop(owner, None)
        for extent in self.weight_extents(owner):
            del self._weights[extent]
            self._free |= 1 << extent

    def _take_lowest(self) -> int | None:
        candidates = self._free & self._kv_zone
        if not candidates:
            return None
        extent = (candidates & -candidates).bit_length() - 1
        self._free ^= 1 << extent
        return extent

    def allocate_adapters(self, least: int, most: int) -> range | None:
        """Allocates `least` to `most` adjacent free extents to the adapters, as many as possible.
        Of equally long runs of free extents, chooses the highest. Returns None if no run has
        `least` extents, or if `least` extents would exceed the adapters' ceiling."""
        most = min(most, self.adapter_ceiling - self.num_adapter_extents)
        starts, length = self._all, 0
        while length < most and (longer := starts & self._free >> length):
            starts, length = longer, length + 1
        if length < least:
            return None
        first = starts.bit_length() - 1
        mask = ((1 << length) - 1) << first
        self._free ^= mask
        self._adapters |= mask
        return range(first, first + length)

    def free_adapters(self, extents: range) -> None:
        mask = ((1 << len(extents)) - 1) << extents.start
        require(not mask & ~self._adapters, f"extents {extents} are not all adapter extents")
        self._adapters ^= mask
        self._free |= mask

    def trial(self) -> Arena:
        """Returns a copy. Changes of the copy have no effect here."""
        trial = copy(self)
        trial.bytes_held = Holdings(self.bytes_held.accounts, self.bytes_held.held.items())
        trial._kv = dict(self._kv)
        return trial

    def kv_owner(self, extent: int) -> str:
        return self._kv[extent]

    def kv_extents(self, owner: str) -> set[int]:
        return {extent for extent, name in self._kv.items() if name == owner}

    def weight_extents(self, owner: str) -> set[int]:
        """Returns the extents in the arena that hold the owner's weights."""
        return {extent for extent, name in self._weights.items() if name == owner}

    def num_weight_extents(self, owner: str) -> int:
        """Returns the number of the owner's extents, including those outside the arena."""
        return self._weights_beside[owner] + len(self.weight_extents(owner))

    def is_for_kv(self, extent: int) -> bool:
        """Whether KV and weights may use the extent, because it is outside the adapters' floor."""
        return bool(self._kv_zone >> extent & 1)

    def is_free(self, extent: int) -> bool:
        return bool(self._free >> extent & 1)

    def is_adapter(self, extent: int) -> bool:
        return bool(self._adapters >> extent & 1)

    def map(self) -> str:
        """Returns one character per extent: '.' free, 'k' KV, 'a' adapters, 'w' weights. Extents
        outside the arena come last."""
        marks = dict.fromkeys(self._kv, "k") | dict.fromkeys(self._weights, "w")
        inside = "".join(
            marks.get(i) or ("a" if self.is_adapter(i) else ".") for i in range(self.num_extents)
        )
        return inside + "w" * self._weights_beside.total() + "." * self.num_beside_obtainable

    def check_integrity(self) -> None:
        """Raises IntegrityError unless each extent has exactly one state, and the adapters' floor
        and ceiling are respected."""
        kv = sum(1 << extent for extent in self._kv)
        weights = sum(1 << extent for extent in self._weights)
        states = (self._free, kv, self._adapters, weights)
        counts = f"free {self._free:b}, kv {kv:b}, adapters {self._adapters:b}, weights {weights:b}"
        union = self._free | kv | self._adapters | weights
        num_states = sum(state.bit_count() for state in states)
        require(num_states == union.bit_count(), f"extents in two states: {counts}")
        require(self.num_beside_obtainable >= 0, f"{self._weights_beside} of {self.num_beside}")
        require(union == self._all, f"extents in no state, of {self.num_extents}: {counts}")
        require(not (kv | weights) & ~self._kv_zone, f"KV or weights on the floor: {counts}")
        num_adapters = self.num_adapter_extents
        require(
            num_adapters <= self.adapter_ceiling,
            f"{num_adapters} adapter extents, ceiling {self.adapter_ceiling}",
        )
