"""Measures copies of adapters from host memory to the device, as the adapter pool makes them."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from statistics import median
from typing import Any

import torch
from torch import Tensor

from benchmarks.gpu_timing import Bench
from benchmarks.shaped_model import Shape
from ops.base import Ops


def adapter_rows(bench: Bench, ops: Ops, shape: Shape) -> Iterator[dict[str, Any]]:
    """Yields a row for each rank. `copied_ms` is the measured time of a copy, and `bytes_ms` the
    time of its bytes at the rate of a pinned transfer."""
    for rank in (2,) if bench.tiny else (8, 16, 64):
        num_bytes = 2 * rank * shape.rank_elements
        payload = torch.randint(0, 256, (num_bytes,), dtype=torch.uint8)
        if bench.device.type == "cuda":
            payload = payload.pin_memory()
        there = torch.empty(num_bytes, dtype=torch.uint8, device=bench.device)

        def copy(payload: Tensor = payload, there: Tensor = there) -> None:
            with ops.side_stream("adapters"):
                there.copy_(payload, non_blocking=True)
                copied = ops.record_event()
            copied.synchronize()

        yield {
            "model": shape.name,
            "rank": rank,
            "MB": num_bytes / 1e6,
            "bytes_ms": 1e3 * num_bytes / bench.results["transfer_bytes_per_second"],
            "copied_ms": 1e3 * timed(copy, 2 if bench.tiny else 10),
        }


def timed(work: Callable[[], object], count: int) -> float:
    """Returns the median seconds of one call on the host's clock. The call must wait for the
    device."""
    work()
    times: list[float] = []
    for _ in range(count):
        begin = time.perf_counter()
        work()
        times.append(time.perf_counter() - begin)
    return median(times)
