"""Kernels are given addresses that they may access, in a worker whose weights come and go."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from ops.base import Ops
from ops.registry import select
from tests.workers.base_models.test_swapping import House, models
from tests.workers.driver import Driver
from tests.workers.driver_double import DriverDouble
from workers.device.virtual_memory import VirtualMemory
from workers.process.worker import Worker

COMPUTES = (
    *("linear", "embed", "rms_norm", "rope_write_kv", "paged_attention", "gated_activation"),
    *("add_lora", "sample", "log_softmax_top", "block_hashes"),
)


def tensors(value: object) -> Iterator[Tensor]:
    """All that the arguments of an op lead to."""
    if isinstance(value, Tensor):
        yield value
    elif is_dataclass(value):
        for field in fields(value):
            yield from tensors(getattr(value, field.name))
    elif isinstance(value, list | tuple):
        for item in value:  # pyright: ignore
            yield from tensors(item)
    elif hasattr(value, "__dict__"):
        yield from tensors(list(vars(value).values()))


class CheckedOps:
    """The reference backend; as Triton, it refuses a tensor whose first byte is not mapped."""

    def __init__(self, driver: DriverDouble) -> None:
        self._ops = select("reference")
        self._driver = driver
        self.num_checked = 0
        """Tensors in reserved addresses."""

    def __getattr__(self, name: str) -> Any:
        value: Callable[..., Any] = getattr(self._ops, name)
        if name not in COMPUTES:
            return value

        def checked(*arguments: Any, **options: Any) -> Any:
            for tensor in tensors([*arguments, *options.values()]):
                if tensor.numel():
                    self._check(tensor.data_ptr())
            return value(*arguments, **options)

        return checked

    def _check(self, address: int) -> None:
        if _lies_in(address, self._driver.reserved.items()):
            self.num_checked += 1
            mapped = ((start, size) for start, (_, size) in self._driver.mapped.items())
            assert _lies_in(address, mapped), "Pointer argument cannot be accessed from Triton"


def _lies_in(address: int, ranges: Any) -> bool:
    return any(start <= address < start + size for start, size in ranges)


class WorkerOnDouble(Worker):
    """Its weights and its arena are mapped by the double of a GPU's driver."""

    driver: DriverDouble
    checked: CheckedOps

    def _select_ops(self) -> Ops:
        self.driver = DriverDouble()
        self.checked = CheckedOps(self.driver)
        return self.checked  # pyright: ignore

    def _virtual_memory(self) -> VirtualMemory:
        return self.driver.virtual_memory()


def test_every_base_of_a_kernel_is_mapped_while_models_swap(tmp_path: Path) -> None:
    """Weights take the lowest extents of the arena, whose memory lies elsewhere then; what kernels
    are given as the arena stays accessible."""
    house = House(tmp_path)
    names = ("one", "two")
    config = house.config(*names, ops="reference", device_memory=64 << 20, uses_graphs=True)
    with Driver(config, WorkerOnDouble) as driver:
        for number in range(6):
            name = names[number % 2]
            adapter = house.refs[name][number // 2 % 2]
            driver.submit(house.generate(number, name, [1, 2, 3], 4, adapter))
            driver.wait()
        status = driver.await_status(lambda s: models(s)["two"].num_swaps > 0)
    assert len(driver.answers) == 6
    assert all(len(answer) == 4 for answer in driver.answers.values()), driver.ended
    assert driver.worker.checked.num_checked > 100  # pyright: ignore
    assert "w" in status.extents
