"""Estimated seconds to load an adapter from one tier to the next. The cost of an eviction is the
time of the loads that undo the eviction, and a load is charged to its tenant."""

from __future__ import annotations

from adapters.pool.source import AdapterTier
from memory.reuse import RecentRatio

OVERHEAD_S = 1e-3
"""Seconds of a load that do not depend on the adapter's size."""
BYTES_PER_S: dict[AdapterTier, float] = {"host": 2.5e9, "disk": 2e9, "store": 1.2e8}
"""Speeds of loads by the tier that is read, until loads have been measured (one CPU core)."""
FIRST_BYTES = 1 << 16
"""Bytes of a load with the speed in `BYTES_PER_S` that counts as measured at the start."""


class LoadCost:
    """Speeds of the loads of one base model's adapters, as they were recently measured. A load of 0
    bytes takes no time."""

    def __init__(self) -> None:
        self._byte_s = {
            tier: RecentRatio(FIRST_BYTES / speed, FIRST_BYTES)
            for tier, speed in BYTES_PER_S.items()
        }
        """Seconds per byte by the tier that is read."""

    def record(self, tier: AdapterTier, num_bytes: int, seconds: float) -> None:
        """Records how long a load from the tier took, without its time in the queue."""
        self._byte_s[tier].add(max(seconds - OVERHEAD_S, 0.0), num_bytes)

    def copy_s(self, num_bytes: int) -> float:
        """Returns the seconds to copy an image from host to device."""
        return self._seconds("host", num_bytes)

    def fetch_s(self, num_bytes: int) -> float:
        """Returns the seconds to read a cached image to the host."""
        return self._seconds("disk", num_bytes)

    def build_s(self, num_bytes: int) -> float:
        """Returns the seconds to build an image from the store: read, check and pack."""
        return self._seconds("store", num_bytes)

    def _seconds(self, tier: AdapterTier, num_bytes: int) -> float:
        return OVERHEAD_S + num_bytes * self._byte_s[tier].value if num_bytes else 0.0
