"""A backend that refuses addresses that a GPU's kernels could not access, and a worker with it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import fields, is_dataclass
from typing import Any

from torch import Tensor

from ops.base import Ops
from ops.registry import select
from tests.workers.driver_double import DriverDouble
from tests.workers.formed_worker import FormedWorker
from workers.device.virtual_memory import VirtualMemory

COMPUTES = (
    *("linear", "embed", "rms_norm", "rope_write_kv", "paged_attention", "gated_activation"),
    *("add_lora", "sample", "log_softmax_top"),
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


class WorkerOnDouble(FormedWorker):
    """Its weights and its arena are mapped by the double of a GPU's driver."""

    driver: DriverDouble
    checked: CheckedOps

    def _select_ops(self) -> Ops:
        self.driver = DriverDouble()
        self.checked = CheckedOps(self.driver)
        return self.checked  # pyright: ignore

    def _virtual_memory(self) -> VirtualMemory:
        return self.driver.virtual_memory()
