"""The stages of `benchmarks.gpu_report`, each in a process of its own: what a GPU does with the
`cuda` backend, set against what it does at best in the same run (a copy, a product, a transfer).

A row is written as it is measured. A part that raises leaves a row with the error, and the next
part goes on. `--tiny` runs every part at toy sizes on the CPU.
"""

from __future__ import annotations

import gc
import json
import os
import platform
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
import triton
import triton.language as tl

from benchmarks.gpu_baseline import step_rows
from benchmarks.gpu_ops import CONTEXT, beside_rows, form_rows, long_rows, op_rows
from benchmarks.gpu_timing import Bench
from benchmarks.shaped_model import LLAMA_8B, TINY, Batch, Shape, ShapedModel
from ops.cuda import CudaOps
from tests import bare_machine
from workers.device.cuda_memory import CudaVirtualMemory

Rows = Iterator[dict[str, Any]]


class Stage:
    """What the parts of a stage share: the device, rates measured before, and the file of rows."""

    def __init__(self, out: Path, name: str, tiny: bool) -> None:
        self.out, self.name, self.tiny = out, name, tiny
        self.device = torch.device("cpu" if tiny else "cuda")
        self.bench = Bench(self.device, tiny)
        self.shape = TINY if tiny else LLAMA_8B
        self.failed = False
        self._rows = out / f"{name}.jsonl"

    def ops(self) -> CudaOps:
        return CudaOps(self.device, self.out / "kernels")

    def model(self) -> ShapedModel:
        return ShapedModel(self.ops(), self.shape, torch.bfloat16, 64 if self.tiny else 32_769)

    def read_rates(self) -> None:
        """Those of the first stage; measured here where it left none."""
        first = self.out / "smoke.jsonl"
        lines = first.read_text().splitlines() if first.is_file() else []
        for row in map(json.loads, lines):
            if "copy_TB_s" in row:
                self.bench.results["copy_bytes_per_second"] = 1e12 * row["copy_TB_s"]
            if row.get("what") in ("tiny", "1 GiB of weights"):
                self.bench.results["transfer_bytes_per_second"] = 1e9 * row["GB_s"]
        if len(self.bench.results) < 2:
            list(ceilings(self.bench))
            list(transfers(self.bench))

    def part(self, name: str, rows: Callable[[], Rows]) -> None:
        begin = time.monotonic()
        try:
            for row in rows():
                self._write({"part": name, **row})
        except Exception as error:
            self.failed = True
            trace = traceback.format_exc().splitlines()[-8:]
            self._write({"part": name, "error": f"{type(error).__name__}: {error}", "trace": trace})
        self._write({"part": name, "seconds": time.monotonic() - begin})
        gc.collect()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    def _write(self, row: dict[str, Any]) -> None:
        with self._rows.open("a") as file:
            file.write(json.dumps(row) + "\n")
            file.flush()
            os.fsync(file.fileno())


@triton.jit
def _nothing(x):
    tl.store(x, 0.0)


def describe(device: torch.device) -> dict[str, Any]:
    versions = {"python": platform.python_version(), "torch": torch.__version__}
    versions["triton"] = triton.__version__
    if device.type == "cpu":
        return {"device": "cpu, interpreted", **versions}
    properties = torch.cuda.get_device_properties(device)
    return {
        "device": properties.name,
        "processors": properties.multi_processor_count,
        "memory": properties.total_memory,
        "cuda": torch.version.cuda,
        **versions,
    }


def ceilings(bench: Bench) -> Iterator[dict[str, Any]]:
    """What the device does at best: everything else is a share of this."""
    size = 1 << (12 if bench.tiny else 31)
    source = torch.empty(size, dtype=torch.uint8, device=bench.device)
    target = torch.empty_like(source)
    copy = 2 * size / bench.seconds(lambda: target.copy_(source))
    side = 64 if bench.tiny else 8192
    a = torch.randn(side, side, dtype=torch.bfloat16, device=bench.device)
    b = torch.randn_like(a)
    product = 2 * side**3 / bench.seconds(lambda: a @ b)
    x = torch.zeros(1, device=bench.device)

    def launches() -> None:
        for _ in range(2 if bench.tiny else 200):
            _nothing[(1,)](x)

    launch = bench.seconds(launches) / (2 if bench.tiny else 200)
    bench.results["copy_bytes_per_second"] = copy
    yield {"copy_TB_s": copy / 1e12, "bf16_TFLOP_s": product / 1e12, "launch_us": launch * 1e6}


def transfers(bench: Bench) -> Iterator[dict[str, Any]]:
    """From pinned memory: a page, an adapter of rank 16, and 1 GiB, the rate that swaps are set
    against."""
    sizes = {"page": 2 << 20, "adapter r16": 84 << 20, "1 GiB of weights": 1 << 30}
    pinned = bench.device.type == "cuda"
    for name, size in {"tiny": 4096}.items() if bench.tiny else sizes.items():
        host = torch.ones(size, dtype=torch.uint8)
        begin = time.perf_counter()
        host = host.pin_memory() if pinned else host
        pinning = time.perf_counter() - begin
        there = torch.empty(size, dtype=torch.uint8, device=bench.device)
        took = bench.seconds(
            lambda host=host, there=there: there.copy_(host, non_blocking=True), captured=False
        )
        rate = size / took
        bench.results["transfer_bytes_per_second"] = rate
        yield {"what": name, "ms": took * 1e3, "GB_s": rate / 1e9, "pinning_ms": pinning * 1e3}


def baseline(bench: Bench, shape: Shape) -> Rows:
    """transformers + peft, where they are installed."""
    rows, prompt, count, steps = ((2,), 8, 2, 4) if bench.tiny else ((1, 32), CONTEXT, 8, 32)
    try:
        yield from step_rows(shape, bench.device, rows, prompt, count, steps)
    except ImportError as error:
        yield {"left_out": str(error)}


def prefill(bench: Bench, model: ShapedModel) -> Rows:
    """A chunk of one prompt, eager, the head on every row: TFLOP/s of linears and attention."""
    shape = model.shape
    for rows in (18,) if bench.tiny else (512, 1024, 2048, 4096, 8192):
        attention, kv = model.cache(1, rows)(rows, rows)
        ids = torch.zeros(rows, dtype=torch.int32, device=bench.device)
        flops = 2.0 * rows * shape.linear_parameters
        flops += 2.0 * shape.layers * shape.heads * shape.dim * rows * rows
        adapters = model.adapters(1, (16,))
        for lora in (None, model.assign(adapters, rows, 1)):
            batch = Batch(ids, attention, kv, lora)
            took = bench.seconds(lambda b=batch: model.forward(b), captured=False, most=3)
            yield {
                "model": shape.name,
                "rows": rows,
                "lora": lora is not None,
                "ms": took * 1e3,
                "TFLOP_s": flops / took / 1e12,
            }


def driver_rows(device: torch.device) -> Rows:
    """The calls behind swaps, one extent of 64 MiB each; then a kernel over a reserved range whose
    second extent is not mapped, and a capture beside copies."""
    virtual, size = CudaVirtualMemory.of(device), 64 << 20
    yield {"what": "granularity", "bytes": virtual.granularity}

    def timed(name: str, call: Callable[[], Any]) -> tuple[Any, dict[str, Any]]:
        begin = time.perf_counter()
        result = call()
        return result, {"what": name, "us": (time.perf_counter() - begin) * 1e6}

    pieces: list[int] = []
    for _ in range(3):
        piece, row = timed("create", lambda: virtual.create(size))
        pieces.append(piece)
        yield row
    addresses, row = timed("reserve", lambda: virtual.reserve(4 * size))
    yield row
    start = addresses.data_ptr()
    yield timed("map three", lambda: virtual.map(start, pieces, size))[1]
    yield timed("unmap", lambda: virtual.unmap(start + size, size))[1]
    _nothing[(1,)](addresses[:64].view(torch.float32))
    _nothing[(1,)](addresses.view(torch.float32)[2 * size // 4 :])
    torch.cuda.synchronize()
    yield {"what": "a kernel beside an extent that is not mapped", "passed": True}
    ops = CudaOps(device)
    names = ("capture", "adapters", "tables", "weights")
    handles = {ops._streams[name].cuda_stream for name in names}  # pyright: ignore
    yield {"what": "streams that differ", "number": len(handles), "passed": len(handles) == 4}
    x, host = torch.zeros(1 << 20, device=device), torch.ones(1 << 20).pin_memory()
    other = torch.empty_like(x)

    def work() -> torch.Tensor:
        with ops.side_stream("adapters", waits=False):
            other.copy_(host, non_blocking=True)
        return x.add_(1)

    run = ops.capture(work)
    run()
    torch.cuda.synchronize()
    yield {"what": "a capture beside a copy", "passed": float(x[0]) == 2.0}


def test_rows(stage: Stage) -> Rows:
    """The tests marked `gpu`, a process a file, all at once."""
    root = Path(__file__).parents[1]
    files = bare_machine.COLLECTED[-1:] if stage.tiny else bare_machine.COLLECTED
    which = ["--collect-only"] if stage.tiny else ["-m", "gpu"]
    running: dict[str, subprocess.Popen[str]] = {}
    begin = time.monotonic()
    for name in files:
        command = [sys.executable, "-m", "pytest", "-q", *which, f"tests/{name}"]
        running[name] = subprocess.Popen(
            command, cwd=root, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
    for name, process in running.items():
        output, _ = process.communicate()
        yield {
            "file": name,
            "passed": process.returncode == 0,
            "after_s": time.monotonic() - begin,
            "tail": output.splitlines()[-1 if process.returncode == 0 else -60 :],
        }


def smoke(stage: Stage) -> None:
    stage.part("machine", lambda: iter([describe(stage.device)]))
    stage.part("ceilings", partial(ceilings, stage.bench))
    stage.part("transfers", partial(transfers, stage.bench))
    if not stage.tiny:
        stage.part("driver", partial(driver_rows, stage.device))


def tests(stage: Stage) -> None:
    stage.part("tests", partial(test_rows, stage))


def engine(stage: Stage) -> None:
    """What is served: graphs, adapters by their buckets, sampling, the host."""
    bare_machine.install()
    from benchmarks.gpu_engine import engine_rows

    stage.read_rates()
    model = stage.model()
    stage.part("engine", partial(engine_rows, stage.bench, model))


def prompts(stage: Stage) -> None:
    stage.part("prefill", partial(prefill, stage.bench, stage.model()))


def swaps(stage: Stage) -> None:
    bare_machine.install()
    from benchmarks.gpu_adapters import adapter_rows
    from benchmarks.gpu_swap import swap_rows

    stage.read_rates()
    ops = stage.ops()
    stage.part("adapters", partial(adapter_rows, stage.bench, ops, stage.shape))
    stage.part("swap", partial(swap_rows, stage.bench, ops, stage.shape))


def kernels(stage: Stage) -> None:
    stage.read_rates()
    model = stage.model()
    for rows in (2,) if stage.tiny else (32, 256):
        stage.part(f"ops, {rows} rows", partial(op_rows, stage.bench, model, rows))
    stage.part("a long row", partial(long_rows, stage.bench, model))
    stage.part("forms of LoRA", partial(form_rows, stage.bench, model))
    if not stage.tiny:
        stage.part("shrink beside the product", partial(beside_rows, stage.bench, model, 32))


def compared(stage: Stage) -> None:
    stage.part("transformers", partial(baseline, stage.bench, stage.shape))


STAGES = {
    stage.__name__: stage for stage in (smoke, tests, engine, prompts, swaps, kernels, compared)
}


def main() -> None:
    name, out = sys.argv[1], Path(sys.argv[2])
    torch.set_grad_enabled(False)
    stage = Stage(out, name, tiny="--tiny" in sys.argv)
    STAGES[name](stage)
    sys.exit(stage.failed)


if __name__ == "__main__":
    main()
