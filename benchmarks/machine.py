"""Describes the machine and measures its memory bandwidth, for the reports of benchmarks."""

from __future__ import annotations

import platform
import time
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
    best = min(_seconds(lambda: data.sum()) for _ in range(7))
    return num_bytes / best


def _seconds(work: object) -> float:
    assert callable(work)
    begin = time.perf_counter()
    work()
    return time.perf_counter() - begin
