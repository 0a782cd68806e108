"""`python -m benchmarks.gpu_report --out DIR`: checks the results of the `cuda` backend and
measures its speed, on one GPU in less than nine minutes.

The report runs the stages of `benchmarks.gpu_stages`, stages about correctness first. Each stage is
a process group with a time limit, so that a crash or a hang loses only the rows of that stage, and
no process is left behind. DIR/gpu-report.tgz contains all rows and logs, and is replaced after each
stage. At the end, a table of at most 60 lines is printed.

The machine needs Python 3.11 or later, torch, Triton, numpy, pytest, pytest-timeout, hypothesis,
safetensors and a C compiler, but no network. `make gpu-kit` puts the other packages and a cache of
compiled kernels into the folder `.gpu`, which must be copied with the checkout. `--tiny` runs the
stages at toy sizes on the CPU, in Triton's interpreter.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import tarfile
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple

import torch

from benchmarks.gpu_table import table

ROOT = Path(__file__).parents[1]
KIT = ROOT / ".gpu"
ARCHIVE = "gpu-report.tgz"
MAX_LOG_BYTES = 1 << 20
"""Maximum bytes of each log in the archive. The end of a longer log is kept."""


class Limits(NamedTuple):
    """Limits of a stage. The stage is killed after `seconds`. It is skipped if less than `least_s`
    seconds of the report's time, or less than `gib` GiB of GPU memory, are left."""

    seconds: float
    least_s: float
    gib: float


STAGES = {
    "smoke": Limits(40, 10, 9),
    "numerics": Limits(60, 20, 20),
    "tests": Limits(80, 30, 8),
    "kernels": Limits(70, 20, 50),
    "engine": Limits(130, 40, 50),
    "served": Limits(60, 20, 50),
    "sanitizer": Limits(70, 30, 8),
}
"""Limits by stage, in the order of the stages. All time limits together are 8.5 minutes."""
INTERPRETED = 10
"""Factor of all time limits when kernels run in Triton's interpreter."""


def run(
    name: str,
    limits: Limits,
    left_s: float,
    scratch: Path,
    environment: dict[str, str],
    tiny: bool,
) -> dict[str, Any]:
    """Runs a stage. Returns a row with its exit code or error, or the reason why it was skipped."""
    if left_s < limits.least_s:
        return {"stage": name, "skipped": f"{left_s:.0f} s are left, {limits.least_s:.0f} needed"}
    free_gib = float("inf") if tiny else torch.cuda.mem_get_info()[0] / (1 << 30)
    if free_gib < limits.gib:
        return {"stage": name, "skipped": f"{free_gib:.0f} GiB are free, {limits.gib:.0f} needed"}
    seconds = min(limits.seconds, left_s)
    begin, log = time.monotonic(), scratch / f"{name}.log"
    ended: dict[str, Any] = {}
    command = [sys.executable, "-m", "benchmarks.gpu_stages", name, str(scratch)]
    command += [str(begin + seconds), *(["--tiny"] if tiny else [])]
    with log.open("w") as file, process_group(command, environment, file) as process:
        try:
            ended["rc"] = process.wait(seconds)
        except subprocess.TimeoutExpired:
            ended["error"] = f"it was ended after {seconds:.0f} s"
    ended = {"stage": name, **ended, "seconds": round(time.monotonic() - begin, 1)}
    if ended.get("rc") != 0:
        ended["tail"] = log.read_text(errors="replace").splitlines()[-20:]
    return ended


@contextmanager
def process_group(
    command: list[str], environment: dict[str, str], output: Any
) -> Iterator[subprocess.Popen[bytes]]:
    """Starts the command in its own process group, and kills the whole group at the end."""
    process = subprocess.Popen(
        command,
        cwd=ROOT,
        env=environment,
        stdout=output,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )
    try:
        yield process
    finally:
        with suppress(ProcessLookupError):  # if all processes of the group have ended
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def prepare(kit: Path, scratch: Path, tiny: bool) -> dict[str, str]:
    """Installs the kit's wheels and kernels in the scratch folder. Returns environment variables
    with which the stages find them."""
    path, kernels = [str(ROOT)], scratch / "kernels"
    if wheels := sorted(kit.glob("wheels/*.whl")):
        site = scratch / "site"
        pip = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
        pip += ["--root-user-action=ignore", "--no-index", "--no-deps", "--target", str(site)]
        subprocess.run([*pip, *map(str, wheels)], check=True)
        path.insert(0, str(site))
    if (kit / "kernels").is_dir():
        shutil.copytree(kit / "kernels", kernels)
    kernels.mkdir(exist_ok=True)
    path += [each for each in os.environ.get("PYTHONPATH", "").split(os.pathsep) if each]
    return {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(path),
        "PYTHONUNBUFFERED": "1",
        "TRITON_CACHE_DIR": str(kernels),
        **({"TRITON_INTERPRET": "1"} if tiny else {}),
    }


def archive(scratch: Path, out: Path) -> None:
    """Replaces the archive by a new one with all rows and the end of each log."""
    for log in scratch.glob("*.log"):
        if log.stat().st_size > MAX_LOG_BYTES:
            log.write_bytes(log.read_bytes()[-MAX_LOG_BYTES:])
    staged = out / f".{ARCHIVE}"
    with tarfile.open(staged, "w:gz") as file:
        for each in sorted(scratch.iterdir()):
            if each.suffix in (".jsonl", ".log", ".txt"):
                file.add(each, f"gpu-report/{each.name}")
    staged.replace(out / ARCHIVE)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True, help="folder for the archive")
    parser.add_argument("--minutes", type=float, default=8.5, help="time limit of all stages")
    parser.add_argument("--only", help="stages to run, separated by commas")
    parser.add_argument("--kit", type=Path, default=KIT, help="folder made by `make gpu-kit`")
    parser.add_argument("--tiny", action="store_true", help="toy sizes, on the CPU")
    options = parser.parse_args()
    if not torch.cuda.is_available() and not options.tiny:
        parser.error("torch sees no CUDA device here; --tiny runs the stages on the CPU")
    names = options.only.split(",") if options.only else [*STAGES]
    if unknown := [name for name in names if name not in STAGES]:
        parser.error(f"unknown stage {unknown[0]!r}; the stages are {', '.join(STAGES)}")
    out = options.out.absolute()
    out.mkdir(parents=True, exist_ok=True)
    slowness = INTERPRETED if options.tiny else 1
    deadline = time.monotonic() + 60 * options.minutes * slowness
    # Exits normally on SIGTERM, so that the running stage is killed and the archive written.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    with tempfile.TemporaryDirectory(prefix="loraplex-gpu-") as folder:
        scratch = Path(folder)
        environment = prepare(options.kit, scratch, options.tiny)
        try:
            for name in names:
                left_s = deadline - time.monotonic()
                limits = STAGES[name]._replace(seconds=STAGES[name].seconds * slowness)
                ended = run(name, limits, left_s, scratch, environment, options.tiny)
                with (scratch / "report.jsonl").open("a") as file:
                    file.write(json.dumps(ended) + "\n")
                archive(scratch, out)
        finally:
            lines = table(scratch)
            (scratch / "table.txt").write_text("\n".join([*lines, ""]))
            archive(scratch, out)
            print(*lines, f"all rows and logs: {out / ARCHIVE}", sep="\n", flush=True)


if __name__ == "__main__":
    main()
