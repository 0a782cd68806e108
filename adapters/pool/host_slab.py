"""Pinned host memory for adapter images, registered with the device once and divided among the
images.

Pinning each image separately would round its size up to a power of two, and would block the device
during the driver call.
"""

from __future__ import annotations

import weakref
from collections import deque
from threading import Lock
from typing import Any

import numpy as np
from numpy.typing import NDArray

from memory.eviction.adapter_memory import UNIT_BYTES
from memory.eviction.holes import Holes


class HostSlab:
    """Allocator of memory for images, in units of `UNIT_BYTES`. The units of an image's array
    become free when the array is garbage-collected. Thread-safe."""

    def __init__(self, memory: NDArray[np.uint8]) -> None:
        """memory: pinned host memory, uint8 [bytes]."""
        self._memory = memory
        self._lock = Lock()
        self._holes = Holes()
        """Free units of the memory."""
        self._holes.add(0, len(memory) // UNIT_BYTES)
        self._returned: deque[tuple[int, int]] = deque()
        """Units of garbage-collected arrays that are not in `_holes` yet. Arrays may be collected
        on any thread at any time, even on a thread that holds the lock, so the finalizer must not
        need the lock."""

    def copy(self, payload: NDArray[np.uint8]) -> NDArray[np.uint8] | None:
        """Returns a copy of the payload in the slab, or None if no hole is large enough."""
        num_units = -(-len(payload) // UNIT_BYTES)
        with self._lock:
            while self._returned:
                self._holes.add(*self._returned.popleft())
            start, end = self._holes.best(num_units) or (0, 0)
            if end - start < num_units:
                return None
            self._holes.remove(start, start + num_units)
        begin = start * UNIT_BYTES
        placed: NDArray[Any] = self._memory[begin : begin + len(payload)]
        placed[:] = payload
        units = (start, start + num_units)
        weakref.finalize(placed, self._returned.append, units).atexit = False
        return placed
