"""Settings of Python's garbage collector for a serving process."""

from __future__ import annotations

import gc

COLLECT_EVERY = 20_000
"""Number of unfreed allocations after which the collector searches for cycles among them."""


def look_for_cycles_less() -> None:
    """Freezes objects that exist at start-up and collects every 20,000 allocations: requests create
    almost no reference cycles, and each collection pauses all of them."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(COLLECT_EVERY, 20, 20)
