"""The pinned slab of adapter images: no two share bytes, and what is garbage comes back."""

from __future__ import annotations

import gc

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from adapters.pool.host_slab import UNIT_BYTES, HostSlab

NUM_UNITS = 12


@given(st.lists(st.tuples(st.integers(1, 5 * UNIT_BYTES), st.integers(0, 3)), max_size=30))
def test_images_keep_their_bytes_and_holes_join(arrivals: list[tuple[int, int]]) -> None:
    """Each image of a key takes the place of the one before."""
    slab = HostSlab(np.zeros(NUM_UNITS * UNIT_BYTES, np.uint8))
    kept: dict[int, tuple[int, np.ndarray]] = {}
    for number, (num_bytes, key) in enumerate(arrivals, start=1):
        kept.pop(key, None)
        placed = slab.copy(np.full(num_bytes, number % 251, np.uint8))
        if placed is not None:
            kept[key] = number % 251, placed
        assert all((each == value).all() for value, each in kept.values())
        del placed
    kept.clear()
    whole = slab.copy(np.ones(NUM_UNITS * UNIT_BYTES, np.uint8))
    assert whole is not None, "the holes are one again"
    assert slab.copy(np.ones(1, np.uint8)) is None


@pytest.mark.timeout(120)
def test_the_collector_may_free_images_while_one_is_placed() -> None:
    """An image in a cycle of garbage is freed by whichever thread allocates next, which can be the
    one that searches the slab."""
    slab = HostSlab(np.zeros(NUM_UNITS * UNIT_BYTES, np.uint8))
    payload = np.ones(UNIT_BYTES, np.uint8)
    cycle: list[object] = []
    threshold = gc.get_threshold()
    gc.set_threshold(1)
    try:
        for _ in range(20 * NUM_UNITS):
            cycle = [slab.copy(payload)]
            cycle.append(cycle)
    finally:
        gc.set_threshold(*threshold)
    del cycle
    gc.collect()
    assert slab.copy(np.ones(NUM_UNITS * UNIT_BYTES, np.uint8)) is not None
