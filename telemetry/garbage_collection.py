"""Settings of Python's garbage collector for a serving process."""

from __future__ import annotations

import gc

COLLECT_EVERY = 20_000
"""Number of unfreed allocations after which the collector searches for cycles among them."""


def look_for_cycles_less() -> None:
    """Freezes the objects that exist at start-up, and makes the collector run only every 20,000
    allocations, because requests create almost no reference cycles and each collection pauses all
    requests."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(COLLECT_EVERY, 20, 20)
