"""Kernels are given addresses that they may access, in a worker whose weights come and go."""

from __future__ import annotations

from pathlib import Path

from tests.workers.base_models.test_swapping import StoredModels, models
from tests.workers.device.checked_ops import WorkerOnDouble
from tests.workers.driver import Driver


def test_every_base_of_a_kernel_is_mapped_while_models_swap(tmp_path: Path) -> None:
    """Weights take the lowest extents of the arena, whose memory lies elsewhere then; what kernels
    are given as the arena stays accessible."""
    stored = StoredModels(tmp_path)
    names = ("one", "two")
    config = stored.config(*names, ops="reference", device_memory=64 << 20, uses_graphs=True)
    with Driver(config, WorkerOnDouble) as driver:
        for number in range(6):
            name = names[number % 2]
            adapter = stored.refs[name][number // 2 % 2]
            driver.run(stored.generate(number, name, [1, 2, 3], 4, adapter))
        status = driver.await_status(lambda s: models(s)["two"].num_swaps > 0)
    assert len(driver.answers) == 6
    assert all(len(answer) == 4 for answer in driver.answers.values()), driver.ended
    assert driver.worker.checked.num_checked > 100  # pyright: ignore
    assert "w" in status.extents
