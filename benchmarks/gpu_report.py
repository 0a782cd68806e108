"""`python -m benchmarks.gpu_report --out DIR`: the most of the first minutes on a GPU, ten in all.

Stages in the order of their worth (`benchmarks.gpu_stages`), each a process with a limit of its
own: one that dies or hangs loses no row, and the next one runs. DIR/STAGE.jsonl has a line a row,
written as it is measured; DIR/report.jsonl a line a stage: how it ended, its seconds, and the end
of what it printed. A stage for which too little time or memory is left is skipped, and says so.

It takes torch, Triton, numpy, msgspec, pytest and this checkout; transformers and peft for the last
stage. `--tiny` runs all of it at toy sizes on the CPU, interpreted.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, NamedTuple

import torch

ROOT = Path(__file__).parents[1]


class Limits(NamedTuple):
    """seconds: after which it is ended. least_s: below which it is not worth to begin. gib: of the
    GPU's memory that it takes."""

    seconds: float
    least_s: float
    gib: float


STAGES = {
    "smoke": Limits(60, 10, 9),
    "tests": Limits(180, 30, 8),
    "engine": Limits(150, 40, 60),
    "prompts": Limits(60, 20, 30),
    "swaps": Limits(60, 20, 24),
    "kernels": Limits(60, 20, 50),
    "sanitizer": Limits(60, 30, 8),
    "compared": Limits(60, 30, 40),
}
SANITIZER = ("compute-sanitizer", "--error-exitcode", "9")
SANITIZED = "tests/workers/process/test_gpu_worker.py"


def command_of(name: str, out: Path, tiny: bool) -> list[str]:
    if name == "sanitizer":
        tests = [sys.executable, "-m", "pytest", "-q", "-m", "gpu", "-k", "graphs", SANITIZED]
        return [*SANITIZER, *tests]
    extra = ["--tiny"] if tiny else []
    return [sys.executable, "-m", "benchmarks.gpu_stages", name, str(out), *extra]


def run(name: str, limits: Limits, left_s: float, out: Path, tiny: bool) -> dict[str, Any]:
    """How the stage ended."""
    if left_s < limits.least_s:
        return {"stage": name, "skipped": f"{left_s:.0f} s are left, {limits.least_s:.0f} needed"}
    free_gib = float("inf") if tiny else torch.cuda.mem_get_info()[0] / (1 << 30)
    if free_gib < limits.gib:
        return {"stage": name, "skipped": f"{free_gib:.0f} GiB are free, {limits.gib:.0f} needed"}
    environment = {**os.environ, **({"TRITON_INTERPRET": "1"} if tiny else {})}
    begin, log = time.monotonic(), out / f"{name}.log"
    ended: dict[str, Any]
    try:
        with log.open("w") as file:
            done = subprocess.run(
                command_of(name, out, tiny),
                cwd=ROOT,
                env=environment,
                stdout=file,
                stderr=subprocess.STDOUT,
                timeout=min(limits.seconds, left_s),
            )
        ended = {"rc": done.returncode}
    except subprocess.TimeoutExpired:
        ended = {"error": "its time was over"}
    except OSError as error:
        ended = {"error": str(error)}
    ended = {"stage": name, **ended, "seconds": round(time.monotonic() - begin, 1)}
    if ended.get("rc") != 0 and log.is_file():
        ended["tail"] = log.read_text(errors="replace").splitlines()[-20:]
    return ended


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--minutes", type=float, default=9.5)
    parser.add_argument("--only", help="stages, with commas between them")
    parser.add_argument("--tiny", action="store_true")
    options = parser.parse_args()
    if not torch.cuda.is_available() and not options.tiny:
        parser.error("torch sees no CUDA device here; --tiny runs the stages on the CPU")
    names = options.only.split(",") if options.only else [*STAGES]
    if unknown := [name for name in names if name not in STAGES]:
        parser.error(f"there is no stage {unknown[0]!r}: there are {', '.join(STAGES)}")
    out = options.out.absolute()
    out.mkdir(parents=True, exist_ok=True)
    deadline = time.monotonic() + 60 * options.minutes
    for name in names:
        ended = run(name, STAGES[name], deadline - time.monotonic(), out, options.tiny)
        print(json.dumps(ended), flush=True)
        with (out / "report.jsonl").open("a") as file:
            file.write(json.dumps(ended) + "\n")


if __name__ == "__main__":
    main()
