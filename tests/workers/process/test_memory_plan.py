"""How memory is divided, case by case; sizes in bytes."""

from __future__ import annotations

from pathlib import Path

import pytest

from workers.process.config import WorkerConfig
from workers.process.errors import CannotServe
from workers.process.memory_plan import (
    DEFAULT_PAGE_BYTES,
    MAX_EXTENTS,
    PAGES_PER_EXTENT,
    Footprint,
    MemoryPlan,
    plan_memory,
)

GRAIN = 64
SMALL, LARGE = Footprint(8, 200), Footprint(16, 1000)
"""Extents of 64 bytes hold eight pages of the small one, of 128 bytes those of the large one."""


def config(**sizes: int | None) -> WorkerConfig:
    needed = {"models": {}, "store": "/none", "cache_dir": Path("/none"), "listen": ""}
    return WorkerConfig(**(needed | sizes))  # pyright: ignore


CASES = {
    "beside the weights of one": (
        config(memory=640), [SMALL], 0,
        MemoryPlan(64, 10 + 4, 640, 10, 4),
    ),
    "beside the weights of two": (
        config(memory=1280), [SMALL, LARGE], 0,
        MemoryPlan(128, 10 + 2 + 8, 1280, 10, 10),
    ),
    "beside the weights graphs do not count": (
        config(memory=640), [SMALL], 320,
        MemoryPlan(64, 14, 640, 10, 4),
    ),
    "with the weights of one": (
        config(device_memory=640), [SMALL], 0,
        MemoryPlan(64, 10, 6 * 64, 6, 4),
    ),
    "with the weights of the smaller of two": (
        config(device_memory=2560), [SMALL, LARGE], 0,
        MemoryPlan(128, 20, 18 * 128, 18, 10),
    ),
    "with the weights and graphs": (
        config(device_memory=640), [SMALL], 128,
        MemoryPlan(64, 8, 4 * 64, 4, 4),
    ),
    "a floor is not for KV, a ceiling as given": (
        config(memory=640, adapter_memory_min=65, adapter_memory_max=300), [SMALL], 0,
        MemoryPlan(64, 14, 300, 8, 4),
    ),
    "no model is known": (
        config(memory=10 * PAGES_PER_EXTENT * DEFAULT_PAGE_BYTES), [], 0,
        MemoryPlan(8 << 20, 10, 80 << 20, 10, 0),
    ),
    "much memory has larger extents, not more": (
        config(memory=64 * MAX_EXTENTS * 100), [Footprint(8, 0)], 0,
        MemoryPlan(6400, 1024, 64 * MAX_EXTENTS * 100, 1024, 0),
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_the_division_of_memory(case: str) -> None:
    settings, models, buffer_bytes, plan = CASES[case]
    assert plan_memory(settings, models, granularity=GRAIN, buffer_bytes=buffer_bytes) == plan


@pytest.mark.parametrize(
    ("sizes", "models", "buffer_bytes", "least"),
    [
        ({"memory": 63}, [SMALL], 0, 64),
        ({"memory": 127, "adapter_memory_min": 1}, [SMALL], 0, 128),
        ({"device_memory": 319}, [SMALL], 0, 320),
        ({"device_memory": 319}, [SMALL], 64, 384),
        ({"device_memory": 1000}, [SMALL, LARGE], 0, 9 * 128),
    ],
)
def test_too_little_is_refused_with_the_least(
    sizes: dict[str, int], models: list[Footprint], buffer_bytes: int, least: int
) -> None:
    name = next(iter(sizes))
    with pytest.raises(CannotServe, match=f"^{name}: .* the least is {least}$"):
        plan_memory(config(**sizes), models, granularity=GRAIN, buffer_bytes=buffer_bytes)
    enough = config(**(sizes | {name: least}))
    assert plan_memory(enough, models, granularity=GRAIN, buffer_bytes=buffer_bytes)
