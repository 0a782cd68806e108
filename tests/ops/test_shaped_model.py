"""The GPU benchmark on a machine without a GPU: its model is right, and its parts run."""

from __future__ import annotations

import gc
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.gpu_engine import make_engine, timed
from benchmarks.gpu_report import STAGES, Limits, run
from benchmarks.gpu_stages import Stage
from benchmarks.gpu_timing import Bench
from benchmarks.shaped_model import TINY, Batch, ShapedModel
from ops.base import Ops
from ops.registry import select
from tests.ops.interpreter import IS_INTERPRETED

ROOT = Path(__file__).parents[2]


def logits(ops: Ops) -> torch.Tensor:
    """A prompt of 9 tokens in two chunks, the way that the engine would run it."""
    model = ShapedModel(ops, TINY, torch.float32, 16)
    cache = model.cache(1, 16)
    ids = torch.arange(9, dtype=torch.int32, device=ops.device)
    parts = [
        model.forward(Batch(chunk, *cache(len(chunk), end), None))
        for chunk, end in ((ids[:5], 5), (ids[5:], 9))
    ]
    return torch.cat(parts).cpu()


def test_a_step_gives_the_same_logits_on_every_backend():
    if IS_INTERPRETED:
        from ops.cuda import CudaOps

        ops: Ops = CudaOps(torch.device("cpu"))
        expected = logits(select("reference"))
        torch.testing.assert_close(logits(ops), expected, rtol=1e-4, atol=1e-4)
    else:
        assert logits(select("cuda")).isfinite().all()


@pytest.mark.full
def test_the_report_runs_without_a_gpu(tmp_path: Path):
    """Each stage in its own process; one that cannot run is noted, and the next one does."""
    command = [sys.executable, "-m", "benchmarks.gpu_report", "--out", str(tmp_path), "--tiny"]
    stages = ("smoke", "sanitizer", "engine", "kernels")
    environment = {**os.environ, **({"TRITON_INTERPRET": "1"} if IS_INTERPRETED else {})}
    subprocess.run([*command, "--only", ",".join(stages)], cwd=ROOT, env=environment, check=True)

    def rows(name: str) -> list[dict[str, Any]]:
        return [json.loads(line) for line in (tmp_path / f"{name}.jsonl").read_text().splitlines()]

    ended = {row["stage"]: row for row in rows("report")}
    assert tuple(ended) == stages
    for name in stages:
        if name != "sanitizer":
            assert ended[name]["rc"] == 0, ended[name]
            assert not any("error" in row for row in rows(name))
    assert ended["sanitizer"].get("rc") != 0, "there is none here"
    served = [row for row in rows("engine") if "ms" in row]
    assert [(row["adapters"], row["ahead"]) for row in served] == [
        *((0, True), (0, False), (2, True), (2, False))
    ]
    assert all(row["tokens_s"] > 0 and row["of_bytes"] > 0 for row in served)
    assert {row["linear"] for row in rows("kernels") if "by_row_us" in row} == set(
        TINY.fused_linears
    )


def test_a_stage_that_raises_hangs_or_lacks_time_loses_nothing(tmp_path: Path):
    stage = Stage(tmp_path, "smoke", tiny=True)

    def broken() -> Iterator[dict[str, Any]]:
        yield {"us": 1}
        raise RuntimeError("out of memory")

    stage.part("broken", broken)
    stage.part("next", lambda: iter([{"us": 2}]))
    rows = [json.loads(line) for line in (tmp_path / "smoke.jsonl").read_text().splitlines()]
    assert [row.get("us") for row in rows] == [1, None, None, 2, None]
    assert rows[1]["error"] == "RuntimeError: out of memory" and stage.failed
    assert "skipped" in run("smoke", STAGES["smoke"], 5, tmp_path, True)
    hung = run("engine", Limits(0.2, 0, 0), 100, tmp_path, True)
    assert hung["error"] == "its time was over"


def test_adapters_are_timed_on_their_way_to_the_device():
    from benchmarks.gpu_adapters import adapter_rows

    bench = Bench(torch.device("cpu"), True, {"transfer_bytes_per_second": 1e9})
    (row,) = adapter_rows(bench, select("reference"), TINY)
    assert row["copied_ms"] > 0 and row["bytes_ms"] > 0


def tensor_bytes() -> int:
    return sum(each.nbytes for each in gc.get_objects() if type(each) is torch.Tensor)


def test_dropped_engines_leave_nothing_on_the_device():
    """Arenas and graphs are freed without the collector of cycles, so that the measurements of ten
    engines in one process fit on a card."""
    model = ShapedModel(select("reference"), TINY, torch.float32, 64)
    gc.collect()
    gc.disable()
    try:
        before = tensor_bytes()
        for number in range(10):
            engine, ring = make_engine(model, 2, 26, bool(number % 2), True, (4, 2))
            timed(engine, ring, 2, 20, 2, num_adapters=2)
            assert tensor_bytes() > before
            del engine
            assert tensor_bytes() == before
    finally:
        gc.enable()
