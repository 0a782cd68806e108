"""What the machine can do, measured in the same run as everything else."""

from __future__ import annotations

import platform
import time
from pathlib import Path

import torch


def describe() -> str:
    """CPU model, instruction sets that matter, cores, and the versions in use."""
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
    """Bytes a second that all threads read together: the best sum of a large array."""
    data = torch.ones(num_bytes // 4, dtype=torch.float32)
    data.sum()
    best = min(_seconds(lambda: data.sum()) for _ in range(7))
    return num_bytes / best


def _seconds(work: object) -> float:
    assert callable(work)
    begin = time.perf_counter()
    work()
    return time.perf_counter() - begin
