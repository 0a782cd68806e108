"""Measures swaps: a model is unloaded from the device and loaded to the same addresses again, and
computes its first layers while later ones are copied."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from functools import partial
from statistics import median
from typing import Any

import torch

from benchmarks.gpu_timing import Bench
from benchmarks.shaped_model import Batch, Shape, ShapedModel
from ops.base import Ops
from tests.workers.host_virtual_memory import HostVirtualMemory
from workers.device.cuda_memory import CudaVirtualMemory
from workers.device.device_memory import MappedMemory
from workers.device.weight_image import WeightImage

MAX_EXTENTS = 512
PROMPT = 32
PART_PADDING = 1 << 16
"""Bytes that are added for each part. They are more than the alignment of its tensors takes."""


def swap_rows(bench: Bench, ops: Ops, shape: Shape) -> Iterator[dict[str, Any]]:
    """Yields a row with the median times of swaps. `bytes_ms` is the time of the weights' bytes at
    the rate of a pinned transfer. `first_token_ms` is the time from the start of the load to the
    logits of a prompt. `same` tells whether a graph that was captured before the first swap returns
    equal logits after each swap."""
    swap = Swap(bench, ops, shape)
    swap.come()
    swap.prompt()
    swap.arrive()
    replay = swap.capture()
    expected = replay().clone()
    same: list[bool] = []
    times: list[list[float]] = []
    for _ in range(2 if bench.tiny else 10):
        parts = [swap.leave, swap.come, swap.arrive, swap.prompt]
        row = [timed(bench, part) for part in parts]
        same.append(torch.equal(replay(), expected))
        swap.leave()
        row.append(timed(bench, swap.come_and_prompt))
        times.append(row)
    out, come, arrive, prompt, first = (1e3 * median(column) for column in zip(*times, strict=True))
    bytes_ms = 1e3 * swap.num_bytes / bench.results["transfer_bytes_per_second"]
    yield {
        "model": shape.name,
        "extents": swap.num_extents,
        "swap_out_ms": out,
        "mapped_ms": come,
        "swap_in_ms": come + arrive,
        "bytes_ms": bytes_ms,
        "of_bytes": (come + arrive) / bytes_ms,
        "first_token_ms": first,
        "prompt_ms": prompt,
        "same": all(same),
    }


class Swap:
    def __init__(self, bench: Bench, ops: Ops, shape: Shape) -> None:
        on_gpu = bench.device.type == "cuda"
        virtual = CudaVirtualMemory.of(bench.device) if on_gpu else HostVirtualMemory()
        most = 2 * (shape.linear_parameters + shape.hidden * shape.vocab)
        most += (shape.layers + 2) * PART_PADDING
        granules = -(-most // virtual.granularity)
        extent_bytes = -(-granules // MAX_EXTENTS) * virtual.granularity
        self.num_extents = -(-most // extent_bytes)
        self.memory = MappedMemory(virtual, self.num_extents, extent_bytes)
        self.image = WeightImage(self.memory.reserve(self.num_extents), ops)
        self.image.begin()
        self.model = ShapedModel(ops, shape, torch.bfloat16, PROMPT + 1, self.image)
        self.num_bytes = self.image.parts[-1].stop
        cache = self.model.cache(1, PROMPT)
        ids = torch.arange(PROMPT, dtype=torch.int32, device=bench.device) % shape.vocab
        self._prompt = Batch(ids, *cache(PROMPT, PROMPT), None)
        step = Batch(ids[:1], *cache(1, PROMPT), None)
        self.capture = partial(ops.capture, partial(self.model.forward, step))
        self.arrive = self.image.arrival.synchronize

    def come(self) -> None:
        """Maps the memory and starts the copy of the weights. Does not wait for the copy."""
        for extent in range(self.num_extents):
            self.memory.lend(extent)
        self.image.bring()

    def prompt(self) -> None:
        self.model.forward(self._prompt)

    def come_and_prompt(self) -> None:
        """Starts the copy, and computes a prompt whose first layers overlap with the copy of later
        ones."""
        self.come()
        self.prompt()

    def leave(self) -> None:
        self.image.leave()
        for extent in range(self.num_extents):
            self.memory.restore(extent)


def timed(bench: Bench, work: Callable[[], object]) -> float:
    """Returns the seconds until the device has completed the work on its current stream. Copies on
    other streams may still run."""
    begin = time.perf_counter()
    work()
    if bench.device.type == "cuda":
        torch.cuda.current_stream(bench.device).synchronize()
    return time.perf_counter() - begin
