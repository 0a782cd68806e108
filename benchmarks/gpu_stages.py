"""The stages of `benchmarks.gpu_report`, each in a process of its own:
`python -m benchmarks.gpu_stages STAGE FOLDER DEADLINE [--tiny]`, the deadline by
`time.monotonic()`, which is the same for all processes.

A row is written as it is measured. A part that raises leaves a row with the error, and the next
part goes on. `--tiny` runs every part at toy sizes on the CPU.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from triton import knobs

from benchmarks.gpu_numerics import FULL, SMALL, Cases, rows
from benchmarks.gpu_ops import long_rows, op_rows, prefill_rows, product_rows
from benchmarks.gpu_smoke import ceilings, describe, driver_rows, first_launch, transfers
from benchmarks.gpu_tests import ROOT, WORKER, pytest_command, pytest_environment, test_rows
from benchmarks.gpu_timing import Bench
from benchmarks.gpu_tuning import attention_rows, beside_rows, form_rows, sampling_rows
from benchmarks.shaped_model import LLAMA_8B, TINY, ShapedModel
from ops.cuda import CudaOps

Rows = Iterator[dict[str, Any]]

SANITIZER = ("compute-sanitizer", "--target-processes", "all", "--error-exitcode", "9")


class Stage:
    """Shared by the parts of a stage: the device, rates measured before, and the file of rows."""

    def __init__(self, folder: Path, name: str, deadline: float, tiny: bool) -> None:
        self.folder, self.name, self.tiny = folder, name, tiny
        self.deadline = deadline
        self.device = torch.device("cpu" if tiny else "cuda")
        self.bench = Bench(self.device, tiny)
        self.shape = TINY if tiny else LLAMA_8B
        self.failed = False
        self.compiler = {"read": 0, "compiled": 0}
        """Kernels that were read from the cache folder, and those that were not in it."""
        knobs.compilation.listener = self._count  # pyright: ignore[reportAttributeAccessIssue]
        self._rows = folder / f"{name}.jsonl"

    def ops(self) -> CudaOps:
        return CudaOps(self.device, self.folder / "kernels")

    def model(self) -> ShapedModel:
        return ShapedModel(self.ops(), self.shape, torch.bfloat16, 64 if self.tiny else 32_769)

    def read_rates(self) -> None:
        """Reads the rates that stage `smoke` measured; measures them here if it left none."""
        for row in _read(self.folder / "smoke.jsonl"):
            if "copy_TB_s" in row:
                self.bench.results["copy_bytes_per_second"] = 1e12 * row["copy_TB_s"]
            if row.get("what") in ("tiny", "1 GiB of weights"):
                self.bench.results["transfer_bytes_per_second"] = 1e9 * row["GB_s"]
        if len(self.bench.results) < 2:
            list(chain(ceilings(self.bench), transfers(self.bench)))

    def part(self, name: str, make_rows: Callable[[], Rows]) -> None:
        begin = time.monotonic()
        try:
            for row in make_rows():
                self.failed |= row.get("passed") is False
                self._write({"part": name, **row})
        except Exception as error:
            self.failed = True
            trace = traceback.format_exc().splitlines()[-8:]
            # Frames of a part that failed hold its tensors.
            traceback.clear_frames(error.__traceback__)
            self._write({"part": name, "error": f"{type(error).__name__}: {error}", "trace": trace})
        self.bench.free_memory()
        row: dict[str, Any] = {"part": name, "part_seconds": time.monotonic() - begin}
        row |= {f"{kind}_kernels": count for kind, count in self.compiler.items()}
        if self.device.type == "cuda":
            row["free"], _ = torch.cuda.mem_get_info(self.device)
        self._write(row)

    def _count(self, *, cache_hit: bool, **_: object) -> None:
        self.compiler["read" if cache_hit else "compiled"] += 1

    def _write(self, row: dict[str, Any]) -> None:
        with self._rows.open("a") as file:
            file.write(json.dumps(row) + "\n")
            file.flush()
            os.fsync(file.fileno())


def _read(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()] if path.is_file() else []


def smoke(stage: Stage) -> None:
    stage.part("machine", lambda: iter([describe(stage.device)]))
    stage.part("first launch", partial(first_launch, stage.ops(), stage.compiler, stage.tiny))
    stage.part("ceilings", partial(ceilings, stage.bench))
    stage.part("transfers", partial(transfers, stage.bench))
    if not stage.tiny:
        stage.part("driver", partial(driver_rows, stage.bench))


def numerics(stage: Stage) -> None:
    """Before anything is timed: whether it is right."""
    torch.manual_seed(0)
    # Memory that is read before it is written is NaN.
    torch.use_deterministic_algorithms(True, warn_only=True)
    cases = Cases(stage.ops(), SMALL if stage.tiny else FULL)
    for name, make_cases in cases.parts.items():
        stage.part(name, lambda: chain.from_iterable(map(rows, make_cases())))  # noqa: B023


def tests(stage: Stage) -> None:
    stage.part("tests", partial(test_rows, stage.folder, stage.deadline, stage.tiny))


def kernels(stage: Stage) -> None:
    """Single ops: their share of a copy, and the choices that `ops.triton_table` makes."""
    stage.read_rates()
    model = stage.model()
    stage.part("attention blocks", partial(attention_rows, stage.bench, model))
    stage.part("products", partial(product_rows, stage.bench, model))
    stage.part("sampling", partial(sampling_rows, stage.bench, model))
    stage.part("forms of LoRA", partial(form_rows, stage.bench, model))
    stage.part("shrink beside the product", partial(beside_rows, stage.bench, model))
    stage.part("prefill", partial(prefill_rows, stage.bench, model))
    stage.part("a long row", partial(long_rows, stage.bench, model))
    for num_rows in (2,) if stage.tiny else (32, 256):
        stage.part(f"ops, {num_rows} rows", partial(op_rows, stage.bench, model, num_rows))


def engine(stage: Stage) -> None:
    """What is served: graphs, adapters by their buckets, sampling, the host."""
    from benchmarks.gpu_engine import engine_rows, mixed_rows

    stage.read_rates()
    model = stage.model()
    for num_rows in (2,) if stage.tiny else (32, 1, 128, 256):
        stage.part(f"engine, {num_rows} rows", partial(engine_rows, stage.bench, model, num_rows))
    stage.part("mixed steps", partial(mixed_rows, stage.bench, model))


def served(stage: Stage) -> None:
    """What an operator waits for: the warm-up, adapters and models on their way to the device."""
    from benchmarks.gpu_adapters import adapter_rows
    from benchmarks.gpu_served import warm_up_rows
    from benchmarks.gpu_swap import swap_rows

    stage.read_rates()
    ops = stage.ops()
    stage.part("adapters", partial(adapter_rows, stage.bench, ops, stage.shape))
    stage.part("swap", partial(swap_rows, stage.bench, ops, stage.shape))
    stage.part("warm-up", lambda: warm_up_rows(stage.bench, stage.model()))


def sanitizer(stage: Stage) -> None:
    """The worker's test with graphs and steps ahead, under the memory checker."""

    def run() -> Rows:
        command = [*SANITIZER, *pytest_command("-m", "gpu", "-k", "graphs-ahead", WORKER)]
        seconds = stage.deadline - time.monotonic() - 2
        with (stage.folder / "memcheck.log").open("w") as log:
            done = subprocess.run(
                command,
                cwd=ROOT,
                env=pytest_environment(),
                stdout=log,
                stderr=subprocess.STDOUT,
                timeout=seconds,
            )
        yield {"passed": done.returncode == 0, "rc": done.returncode}

    stage.part("memcheck", run)


STAGES = {
    stage.__name__: stage for stage in (smoke, numerics, tests, kernels, engine, served, sanitizer)
}


def main() -> None:
    name, folder, deadline = sys.argv[1], Path(sys.argv[2]), float(sys.argv[3])
    torch.set_grad_enabled(False)
    stage = Stage(folder, name, deadline, tiny="--tiny" in sys.argv)
    STAGES[name](stage)
    sys.exit(stage.failed)


if __name__ == "__main__":
    main()
