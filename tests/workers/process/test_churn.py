"""Adapters that come and go leave nothing behind in a worker's memory."""

from __future__ import annotations

import ctypes
import gc
from pathlib import Path

import pytest

from tests.doubles import make_adapter
from tests.workers.base_models.test_swapping import StoredModels
from tests.workers.driver import Driver, store_adapter

pytestmark = pytest.mark.full

NUM_ADAPTERS = 8
NUM_SLOTS = 4
NUM_ROUNDS = 12
SPARE_BYTES = 3 << 20
"""What caches and rings of the process may still grow by. 100 kB kept of each load are 7 MB."""


def resident_bytes() -> int:
    """Bytes of this process in memory, without what is free and can be given back."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    status = Path("/proc/self/status").read_text()
    return int(status.split("VmRSS:")[1].split()[0]) << 10


def test_adapter_churn_reaches_a_plateau(tmp_path: Path) -> None:
    stored = StoredModels(tmp_path)
    adapters = [
        make_adapter(tmp_path / "one", tmp_path / f"a{n}", rank=8 + 8 * (n % 4), seed=n)
        for n in range(NUM_ADAPTERS)
    ]
    refs = [store_adapter(stored.store, folder, stored.shapes["one"]) for folder in adapters]
    config = stored.config(
        "one",
        device_memory=None,
        memory=32 << 20,
        max_loaded_adapters=NUM_SLOTS,
        host_adapter_memory=1 << 20,
    )
    with Driver(config) as driver:
        number, resident = 0, list[int]()
        for _ in range(3):
            for _ in range(NUM_ROUNDS):
                for ref in refs:
                    driver.submit(stored.generate(number, "one", [1, 2, 3], 1, ref))
                    number += 1
                    driver.wait()
            assert set(map(str, driver.ended.values())) == {"length"}
            driver.answers.clear()
            driver.outputs.clear()
            driver.ended.clear()
            resident.append(resident_bytes())
        least = NUM_ROUNDS * NUM_ADAPTERS
        driver.await_status(lambda status: status.models[0].num_adapter_evictions >= least)
    assert resident[2] - resident[1] < SPARE_BYTES, resident
