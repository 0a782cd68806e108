"""Pinned host memory for adapter images, registered with the device once and divided among them.

An allocator that pins each image separately rounds it up to a power of two, and blocks the device
during the driver call.
"""

from __future__ import annotations

import weakref
from collections import deque
from threading import Lock
from typing import Any

import numpy as np
from numpy.typing import NDArray

UNIT_BYTES = 1 << 16


class HostSlab:
    """Memory for images. Units become free when their arrays are garbage. Thread-safe."""

    def __init__(self, memory: NDArray[np.uint8]) -> None:
        """memory: uint8 [bytes], pinned."""
        self._memory = memory
        self._lock = Lock()
        self._holes = [(0, len(memory) // UNIT_BYTES)]
        """Free units as [start, end), sorted and not adjacent."""
        self._returned: deque[tuple[int, int]] = deque()
        """Units of garbage arrays, not in `_holes` yet. The collector frees arrays on any thread at
        any time, even on one that holds the lock, so the finalizer must not need the lock."""

    def copy(self, payload: NDArray[np.uint8]) -> NDArray[np.uint8] | None:
        """Returns a copy of the payload in the slab, or None if no hole is large enough."""
        num_units = -(-len(payload) // UNIT_BYTES)
        with self._lock:
            while self._returned:
                self._add_hole(*self._returned.popleft())
            start = self._take(num_units)
        if start is None:
            return None
        begin = start * UNIT_BYTES
        placed: NDArray[Any] = self._memory[begin : begin + len(payload)]
        placed[:] = payload
        units = (start, start + num_units)
        weakref.finalize(placed, self._returned.append, units).atexit = False
        return placed

    def _take(self, num_units: int) -> int | None:
        for index, (start, end) in enumerate(self._holes):
            if end - start >= num_units:
                rest = [(start + num_units, end)] if end - start > num_units else []
                self._holes[index : index + 1] = rest
                return start
        return None

    def _add_hole(self, start: int, end: int) -> None:
        before = [hole for hole in self._holes if hole[1] <= start]
        after = self._holes[len(before) :]
        if before and before[-1][1] == start:
            start = before.pop()[0]
        if after and after[0][0] == end:
            end = after.pop(0)[1]
        self._holes = [*before, (start, end), *after]
