"""Time on a device, taken by its own clock and without the cost of launches."""

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
    """Times work on the device: by replaying it out of a graph, so that no launch is counted."""

    device: torch.device
    tiny: bool
    results: dict[str, Any] = field(default_factory=dict)

    def seconds(
        self, work: Callable[[], object], *, captured: bool = True, most: int = 50
    ) -> float:
        """The median of several runs, each long enough to time."""
        work()
        if self.device.type == "cpu":
            return _clock(work)
        torch.cuda.synchronize()
        run = _capture(work) if captured else work
        once = _events(run, 1)
        count = max(1, min(most, int(0.02 / max(once, 1e-6))))
        return statistics.median(_events(run, count) for _ in range(5))

    def free_memory(self) -> None:
        """Returns to the device what no tensor holds, so that the next measurement finds it."""
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
