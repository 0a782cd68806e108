"""Measures time on a device with the device's clock, without the cost of launches."""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch


@dataclass
class Bench:
    """Timer of work on a device. It captures the work in a graph and times replays, so that the
    cost of launches does not count."""

    device: torch.device
    tiny: bool
    results: dict[str, Any] = field(default_factory=dict)

    def seconds(
        self, work: Callable[[], object], *, captured: bool = True, most: int = 50
    ) -> float:
        """Returns the median seconds of the work over several runs. A run repeats the work, at most
        `most` times, to be long enough for the clock. Without `captured`, launches count too."""
        work()
        if self.device.type == "cpu":
            return _clock(work)
        torch.cuda.synchronize()
        run = _capture(work) if captured else work
        once = _events(run, 1)
        count = max(1, min(most, int(0.02 / max(once, 1e-6))))
        return statistics.median(_events(run, count) for _ in range(5))

    def free_memory(self) -> None:
        """Releases unused memory of PyTorch's cache to the device."""
        gc.collect()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()


def _capture(work: Callable[[], object]) -> Callable[[], None]:
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        work()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        work()
    return graph.replay


def _events(run: Callable[[], object], count: int) -> float:
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    for _ in range(count):
        run()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) / 1000 / count


def _clock(work: Callable[[], object]) -> float:
    begin = time.perf_counter()
    work()
    return time.perf_counter() - begin
