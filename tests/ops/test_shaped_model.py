"""The GPU benchmark on a machine without a GPU: its model is right, and its parts run."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from pathlib import Path

import torch

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


def test_the_gpu_benchmark_runs_from_a_plain_checkout(tmp_path: Path):
    out = tmp_path / "gpu.json"
    code = (
        "import runpy, sys\n"
        f"sys.argv = ['gpu', '--tiny', '--out', {str(out)!r}]\n"
        "sys.modules['msgspec'] = None\n"
        "runpy.run_module('benchmarks.gpu', run_name='__main__')\n"
        "assert not {'litestar', 'asyncpg'} & sys.modules.keys()\n"
    )
    environment = {**os.environ, **({"TRITON_INTERPRET": "1"} if IS_INTERPRETED else {})}
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, env=environment, check=True)
    results = json.loads(out.read_text())
    assert "left_out" not in results
    steps = results["decode tiny"]
    assert [row["adapters"] for row in steps] == [0, 2]
    assert steps[1]["bytes_ms"] > steps[0]["bytes_ms"]
    assert [row["adapters"] for row in results["transformers tiny"]] == [0, 2]
    assert {row["linear"] for row in results["streams, 2 rows"]} == TINY.fused_linears.keys()
    (swap,) = results["swap tiny"]
    assert swap["same"] and swap["of_bytes"] > 0 and swap["first_token_ms"] > 0
    assert "msgspec" in results["engine tiny"][0]["left_out"]


def test_adapters_are_timed_on_their_way_to_the_device():
    from benchmarks.gpu_adapters import adapter_rows

    bench = Bench(torch.device("cpu"), math.inf, True, {"transfer_bytes_per_second": 1e9})
    (row,) = adapter_rows(bench, select("reference"), TINY)
    assert row["copied_ms"] > 0 and row["bytes_ms"] > 0


def test_the_engine_is_timed_in_all_its_forms():
    from benchmarks.gpu_engine import engine_rows

    bench = Bench(torch.device("cpu"), deadline=math.inf, tiny=True)
    rows = list(engine_rows(bench, ShapedModel(select("reference"), TINY, torch.float32, 64)))
    forms = [(row["ahead"], row["graphs"]) for row in rows]
    assert forms == [(False, False), (False, True), (True, False), (True, True)]
    assert all(row["tokens_s"] > 0 and row["host_us"] > 0 for row in rows)
