"""The model of the GPU benchmarks is right, and what they measure leaves nothing behind."""

from __future__ import annotations

import gc

import pytest
import torch

from benchmarks.gpu_engine import make_engine, timed
from benchmarks.gpu_timing import Bench
from benchmarks.shaped_model import TINY, Batch, ShapedModel
from ops.base import Ops
from ops.registry import select
from tests.ops.interpreter import IS_INTERPRETED


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


def test_adapters_are_timed_on_their_way_to_the_device():
    from benchmarks.gpu_adapters import adapter_rows

    bench = Bench(torch.device("cpu"), True, {"transfer_bytes_per_second": 1e9})
    (row,) = adapter_rows(bench, select("reference"), TINY)
    assert row["copied_ms"] > 0 and row["bytes_ms"] > 0


def tensor_bytes() -> int:
    return sum(each.nbytes for each in gc.get_objects() if type(each) is torch.Tensor)


@pytest.mark.full
def test_dropped_engines_leave_nothing_on_the_device():
    """Arenas and graphs are freed without the collector of cycles, so that the measurements of ten
    engines in one process fit on a card."""
    model = ShapedModel(select("reference"), TINY, torch.float32, 64)
    gc.collect()
    gc.disable()
    try:
        before = tensor_bytes()
        for number in range(10):
            engine, ring = make_engine(model, 2, 30, bool(number % 2), True, (4, 2))
            timed(engine, ring, 2, 20, 2, num_adapters=2)
            assert tensor_bytes() > before
            del engine
            assert tensor_bytes() == before
    finally:
        gc.enable()
