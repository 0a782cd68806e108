"""`python -m benchmarks.gpu_stages STAGE FOLDER DEADLINE [--tiny]`: runs one stage of
`benchmarks.gpu_report`. DEADLINE is a time of `time.monotonic()`, which is the same in all
processes of a machine.

Each row is written to FOLDER as soon as it is measured. If a part of the stage raises, a row with
the error is written, and the next part runs. `--tiny` runs every part at toy sizes on the CPU.
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
    """State that the parts of a stage share: the device, earlier measured rates, and the file of
    rows."""

    def __init__(self, folder: Path, name: str, deadline: float, tiny: bool) -> None:
        self.folder, self.name, self.tiny = folder, name, tiny
        self.deadline = deadline
        self.device = torch.device("cpu" if tiny else "cuda")
        self.bench = Bench(self.device, tiny)
        self.shape = TINY if tiny else LLAMA_8B
        self.failed = False
        self.compiler = {"read": 0, "compiled": 0}
        """Numbers of kernels that were read from the cache folder, and of kernels that were not in
        the folder and were compiled."""
        knobs.compilation.listener = self._count  # pyright: ignore[reportAttributeAccessIssue]
        self._rows = folder / f"{name}.jsonl"

    def ops(self) -> CudaOps:
        return CudaOps(self.device, self.folder / "kernels")

    def model(self) -> ShapedModel:
        return ShapedModel(self.ops(), self.shape, torch.bfloat16, 64 if self.tiny else 32_769)

    def read_rates(self) -> None:
        """Reads the rates that stage `smoke` measured. Measures them if that stage wrote none."""
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
            # The frames of the failed part would keep its tensors in memory.
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
    """Compares the ops' results with the reference, before other stages measure times."""
    torch.manual_seed(0)
    # This setting fills new memory with NaN, so that reads of unwritten memory are detected.
    torch.use_deterministic_algorithms(True, warn_only=True)
    cases = Cases(stage.ops(), SMALL if stage.tiny else FULL)
    for name, make_cases in cases.parts.items():
        stage.part(name, lambda: chain.from_iterable(map(rows, make_cases())))  # noqa: B023


def tests(stage: Stage) -> None:
    stage.part("tests", partial(test_rows, stage.folder, stage.deadline, stage.tiny))


def kernels(stage: Stage) -> None:
    """Measures single ops, as a share of a copy's rate, and alternatives to the choices of
    `ops.triton_table`."""
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
    """Measures the engine's steps, with graphs, adapters, sampling and the host's work."""
    from benchmarks.gpu_engine import engine_rows, mixed_rows

    stage.read_rates()
    model = stage.model()
    for num_rows in (2,) if stage.tiny else (32, 1, 128, 256):
        stage.part(f"engine, {num_rows} rows", partial(engine_rows, stage.bench, model, num_rows))
    stage.part("mixed steps", partial(mixed_rows, stage.bench, model))


def served(stage: Stage) -> None:
    """Measures the warm-up, and loads of adapters and models to the device."""
    from benchmarks.gpu_adapters import adapter_rows
    from benchmarks.gpu_served import warm_up_rows
    from benchmarks.gpu_swap import swap_rows

    stage.read_rates()
    ops = stage.ops()
    stage.part("adapters", partial(adapter_rows, stage.bench, ops, stage.shape))
    stage.part("swap", partial(swap_rows, stage.bench, ops, stage.shape))
    stage.part("warm-up", lambda: warm_up_rows(stage.bench, stage.model()))


def sanitizer(stage: Stage) -> None:
    """Runs the worker's test with graphs and steps that are launched ahead, under
    compute-sanitizer's memory checker."""

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
