"""Stub of Triton's driver for an sm_90 device. Kernels are compiled for the device and never
run."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from triton.backends.compiler import GPUTarget
from triton.runtime.driver import driver

SHARED_BYTES = 232_448
"""Maximum bytes of shared memory of a thread block on sm_90."""


class Launcher:
    """Launcher that ignores every launch of a compiled kernel."""

    def __init__(self, source: Any, metadata: Any) -> None:
        pass

    def __call__(self, *arguments: Any) -> None:
        pass


class Utilities:
    """Loader that does not load a kernel. It calls `on_load` with the kernel's name, machine code
    and bytes of shared memory."""

    def __init__(self, on_load: Callable[[str, bytes, int], None]) -> None:
        self._on_load = on_load

    def load_binary(self, name: str, binary: bytes, shared: int, device: int) -> tuple:
        self._on_load(name, binary, shared)
        return 1, 1, 0, 0, 1024

    def get_device_properties(self, device: int) -> dict[str, int]:
        return {"max_shared_mem": SHARED_BYTES}


class DriverDouble:
    launcher_cls = Launcher

    def __init__(self, on_load: Callable[[str, bytes, int], None]) -> None:
        self.utils = Utilities(on_load)

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0


def run_nothing(on_load: Callable[[str, bytes, int], None] = lambda *_: None) -> None:
    """Makes the stub Triton's driver in this process. `on_load`: function that is called for each
    compiled kernel with its name, machine code and bytes of shared memory."""
    driver.set_active(DriverDouble(on_load))  # pyright: ignore[reportArgumentType]
