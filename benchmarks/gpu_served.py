"""Measures the warm-up of a worker: the time to compile kernels and capture graphs, and the memory
that the graphs need."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import torch

from benchmarks.gpu_engine import make_engine, timed
from benchmarks.gpu_timing import Bench
from benchmarks.shaped_model import ShapedModel
from workers.execution.model_runner import ModelRunner
from workers.execution.warm_up import warm_up_runner


def warm_up_rows(bench: Bench, model: ShapedModel) -> Iterator[dict[str, Any]]:
    """Yields a row for a model that serves 64 sequences and 32 adapters of up to rank 64.
    `graph_MB` is the device memory that all graphs take, including their pool and executables.
    `late_kernels` is the number of kernels that were compiled or read after the warm-up."""
    rows, max_len, max_tokens = (2, 40, 32) if bench.tiny else (64, 2048, 2048)
    ranks = (4, 2) if bench.tiny else (8, 16, 32, 64) * 8
    engine, ring = make_engine(model, rows, max_len, True, not bench.tiny, ranks)
    runner = engine.runner
    assert isinstance(runner, ModelRunner)
    bench.free_memory()
    free, begin = _free_bytes(bench), time.perf_counter()
    num_graphs = warm_up_runner(runner, max(ranks), max_tokens)
    seconds = time.perf_counter() - begin
    bench.free_memory()
    taken, num_kernels = free - _free_bytes(bench), model.ops.num_compiled
    timed(engine, ring, rows, max_len // 4, 2, num_adapters=len(ranks))
    yield {
        "sequences": rows,
        "seconds": seconds,
        "graphs": num_graphs,
        "kernels": num_kernels,
        "graph_MB": taken / 1e6,
        "late_kernels": model.ops.num_compiled - num_kernels,
    }


def _free_bytes(bench: Bench) -> int:
    return torch.cuda.mem_get_info(bench.device)[0] if bench.device.type == "cuda" else 0
