"""`python -m tools.kernel_forms`: prints the kernels that `benchmarks.gpu_report` launches, with
each of their specializations, as JSON for `tools.compile_forms`.

Stages of the report run at full size on tensors without memory, and the worker of its tests runs on
the CPU, both with a stub of Triton's driver. Every kernel that Triton would compile is recorded and
not compiled.
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from triton import knobs

from benchmarks.gpu_numerics import FULL, Cases
from benchmarks.gpu_ops import long_rows, op_rows, prefill_rows
from benchmarks.gpu_timing import Bench
from benchmarks.gpu_tuning import attention_rows, beside_rows, form_rows, sampling_rows
from benchmarks.shaped_model import LLAMA_8B, Batch, ShapedModel
from ops.base import DeviceEvent, PassedEvent, StreamName
from ops.copies import upload
from ops.cuda import CudaOps
from tests.workers.driver import Driver
from tests.workers.process.test_gpu_worker import Models
from tools.late_kernels import UnrunWorker
from tools.triton_driver import SHARED_BYTES, run_nothing
from workers.execution.batch import BatchInputs, ModelBuffers, build_inputs
from workers.execution.warm_up import every_form

META = torch.device("meta")
MAX_LEN = 2048
OPTIONS = ("num_warps", "num_stages", "launch_pdl")
"""Launch options that the kernels set. Other options keep the compiler's defaults."""


class MetaOps(CudaOps):
    """Ops on tensors that have shapes but no memory. They choose the kernels that a Hopper GPU
    would run."""

    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        self.overlaps, self.shared_bytes = True, SHARED_BYTES

    def capture(self, work: Callable[[], Tensor]) -> Callable[[], Tensor]:
        work()
        return work

    @contextmanager
    def side_stream(self, name: StreamName) -> Iterator[None]:
        yield

    def record_event(self) -> DeviceEvent:
        return PassedEvent()


class Unmeasured(Bench):
    """Bench that runs the work once and does not time it."""

    def seconds(
        self, work: Callable[[], object], *, captured: bool = True, most: int = 50
    ) -> float:
        work()
        return 1.0


def run_stages() -> None:
    ops = MetaOps(META)
    for make_cases in Cases(ops, FULL).parts.values():
        for case in make_cases():
            case.run()
    bench = Unmeasured(META, False, {"copy_bytes_per_second": 1.0})
    model = ShapedModel(ops, replace(LLAMA_8B, layers=2), torch.bfloat16, 32_769)
    for rows in (attention_rows, sampling_rows, form_rows, beside_rows, prefill_rows, long_rows):
        list(rows(bench, model))
    for num_rows in (32, 256):
        list(op_rows(bench, model, num_rows))
    run_steps(model)


def run_steps(model: ShapedModel) -> None:
    """Runs the forward passes that an engine runs at its warm-up."""
    tables = model.adapters(1, (64,)).tables
    tokens = torch.zeros(1, MAX_LEN, dtype=torch.int32, device=META)
    buffers = ModelBuffers(torch.empty(1 << 30, dtype=torch.uint8, device=META), tokens, tables)
    for step in every_form(MAX_LEN, max_tokens=2048, max_rank=64):
        inputs, shape = build_inputs(step)
        tensors = BatchInputs[Tensor](*upload([*inputs], META))
        batch = buffers.forward_batch(tensors, shape, model.layout)
        model.hidden(Batch(batch.input_ids, batch.attention, batch.kv, batch.lora))


def run_worker(folder: Path) -> None:
    """Starts the worker of `tests/workers/process/test_gpu_worker.py`, and stops it after its
    warm-up."""
    models = Models(folder)
    config = models.config(memory=64 << 20, max_loaded_adapters=2, uses_graphs=True)
    with Driver(config, UnrunWorker):
        pass


def main() -> None:
    forms: dict[str, dict[str, Any]] = {}

    def record(*, key: str, fn: Any, compile: dict[str, Any], **_: Any) -> bool:
        data = json.loads(compile["specialization_data"])
        data["options"] = {name: data["options"][name] for name in OPTIONS}
        name = fn.name.rpartition(".")[2]
        forms[str(key) + name] = {"module": fn.module, "name": name, "data": data}
        return True  # tells Triton not to compile the kernel

    run_nothing()
    knobs.runtime.jit_cache_hook = record  # pyright: ignore[reportAttributeAccessIssue]
    torch.set_grad_enabled(False)
    run_stages()
    with tempfile.TemporaryDirectory() as folder:
        run_worker(Path(folder))
    json.dump([*forms.values()], sys.stdout)


if __name__ == "__main__":
    main()
