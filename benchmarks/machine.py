"""Describes the machine and measures its speed, for the reports of benchmarks."""

from __future__ import annotations

import platform
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch


def describe() -> str:
    """Returns a line with the CPU model, number of threads, relevant instruction sets, and the
    versions of Python and PyTorch."""
    info = Path("/proc/cpuinfo").read_text() if Path("/proc/cpuinfo").exists() else ""
    name = next(
        (line.split(":")[1].strip() for line in info.splitlines() if "model name" in line), ""
    )
    flags = [f for f in ("avx2", "avx512f", "avx512_bf16", "amx_bf16") if f" {f}" in info]
    return (
        f"{name or platform.processor()}, {torch.get_num_threads()} threads, {' '.join(flags)}, "
        f"Python {platform.python_version()}, torch {torch.__version__}"
    )


def read_bandwidth(num_bytes: int = 512 << 20) -> float:
    """Returns the bytes per second that all threads together read: the fastest of several sums over
    a large array."""
    data = torch.ones(num_bytes // 4, dtype=torch.float32)
    data.sum()
    return num_bytes / min(_seconds(data.sum) for _ in range(7))


@dataclass(frozen=True, slots=True)
class Speed:
    """Speed of the machine at one moment, of all threads together: bytes read and floating-point
    operations, each per second."""

    read: float
    multiply: float


class SpeedProbe:
    """Short measurement of the machine's speed. It keeps its arrays, because allocating them takes
    longer than the measurement."""

    BUDGET_S = 0.04
    """Seconds after which a measurement is not repeated again."""

    def __init__(self) -> None:
        self._data = torch.ones(64 << 20)
        self._left, self._right = torch.randn(2, 1024, 1024).bfloat16()
        self()

    def __call__(self) -> Speed:
        """Returns the speed now: the fastest of several sums over 256 MiB, and of several bfloat16
        products of 1024 x 1024 matrices."""
        read = self._data.nbytes / self._best_seconds(self._data.sum)
        return Speed(read, 2 * 1024**3 / self._best_seconds(lambda: self._left @ self._right))

    def _best_seconds(self, work: Callable[[], object]) -> float:
        end, best = time.perf_counter() + self.BUDGET_S, float("inf")
        while time.perf_counter() < end:
            best = min(best, _seconds(work))
        return best


def _seconds(work: Callable[[], object]) -> float:
    begin = time.perf_counter()
    work()
    return time.perf_counter() - begin
