"""What is lent to weights goes back to the system, and nothing else does."""

from __future__ import annotations

import sys

import pytest
import torch

from workers.device_memory import DeviceMemory
from workers.model_loader import resident_bytes

EXTENT = 1 << 20


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_extents_given_back_are_not_resident_and_others_stay() -> None:
    memory = DeviceMemory(64 * EXTENT, torch.device("cpu"))
    memory.tensor.fill_(7)
    before = resident_bytes()
    memory.give_back([*range(8, 40), 50], EXTENT)
    assert before - resident_bytes() > 24 * EXTENT
    kept = torch.ones(64, dtype=torch.bool)
    kept[[*range(8, 40), 50]] = False
    by_extent = memory.tensor.view(64, EXTENT)
    assert bool((by_extent[kept] == 7).all())
    assert not by_extent[~kept].any(), "whoever writes there again begins with new memory"


def test_extents_that_are_no_whole_pages_lose_no_byte_of_others() -> None:
    size = 10_000
    memory = DeviceMemory(8 * size, torch.device("cpu"))
    memory.tensor.fill_(7)
    memory.give_back([3, 4], size)
    assert bool((memory.tensor[: 3 * size] == 7).all() and (memory.tensor[5 * size :] == 7).all())
