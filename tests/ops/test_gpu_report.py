"""The report of a GPU on a machine without one: its checks notice what is wrong, its processes end,
and it runs where only few packages are installed."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tarfile
import time
from collections.abc import Iterator
from contextlib import suppress
from importlib.metadata import distribution
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from torch import Tensor

from benchmarks import gpu_tests
from benchmarks.gpu_numerics import SMALL, Cases, rows
from benchmarks.gpu_report import ARCHIVE, STAGES, Limits, prepare, process_group, run
from benchmarks.gpu_stages import Stage
from benchmarks.gpu_table import MAX_LINES, MAX_WIDTH, table
from benchmarks.shaped_model import TINY
from ops.reference import ReferenceOps
from tools.gpu_kit import PACKAGES

ROOT = Path(__file__).parents[2]
COMMAND = [sys.executable, "-m", "benchmarks.gpu_report", "--tiny", "--kit", "none", "--out"]

INSTALLED = {
    *("numpy", "torch", "torchgen", "triton", "pytest", "pluggy", "iniconfig", "packaging"),
    *("pygments", "sympy", "mpmath", "typing_extensions", "filelock", "networkx", "jinja2"),
    *("markupsafe", "fsspec", "setuptools", "pkg_resources", "hypothesis", "sortedcontainers"),
    *("attr", "attrs", "safetensors", "transformers", "peft", "pytest_timeout", "xdist", "psutil"),
    *("py", "yaml", "ops", "memory", "telemetry", "adapters", "workers"),
    *("tests", "benchmarks", "tools"),
}
"""Packages of an image made for training, and this checkout's."""

HIDDEN = """
import sys
from importlib.machinery import PathFinder
class Hidden(PathFinder):
    @classmethod
    def find_spec(cls, name, path=None, target=None):
        top = name.partition(".")[0]
        is_here = top in {installed} or top in sys.stdlib_module_names or top.startswith("_")
        return super().find_spec(name, path, target) if is_here or name in {kit} else None
sys.meta_path[sys.meta_path.index(PathFinder)] = Hidden
"""


def modules_of(package: str) -> set[str]:
    """Names of the modules that an installed package has, and of the packages that hold them."""
    names: set[str] = set()
    for file in distribution(package).files or ():
        parts = [*file.parent.parts, file.name.partition(".")[0]]
        names |= {".".join(parts[: n + 1]) for n in range(len(parts))}
    return names | {name.removesuffix(".__init__") for name in names}


def read_archive(folder: Path) -> dict[str, list[dict[str, Any]]]:
    """Rows by stage, and `report`."""
    found: dict[str, list[dict[str, Any]]] = {}
    with tarfile.open(folder / ARCHIVE) as archive:
        for name in archive.getnames():
            content = archive.extractfile(name)
            if name.endswith(".jsonl") and content is not None:
                found[Path(name).stem] = [json.loads(line) for line in content]
    return found


@pytest.mark.full
@pytest.mark.timeout(900)
def test_the_report_runs_where_only_the_kit_is_added(tmp_path: Path) -> None:
    """All stages, in Triton's interpreter. The sanitizer is not on this machine, which is noted."""
    kit = set.union(*map(modules_of, PACKAGES))
    text = HIDDEN.format(installed=INSTALLED, kit=kit)
    (tmp_path / "sitecustomize.py").write_text(text)
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    for name in ("PYTEST_ADDOPTS", "PYTEST_XDIST_WORKER", "TRITON_INTERPRET"):
        environment.pop(name, None)
    for missing in ("litestar", "opentelemetry"):
        command = [sys.executable, "-c", f"import msgspec, prometheus_client, {missing}"]
        hidden = subprocess.run(command, env=environment, capture_output=True, text=True)
        assert f"No module named '{missing}'" in hidden.stderr
    done = subprocess.run(
        [*COMMAND, str(tmp_path)], cwd=ROOT, env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    found = read_archive(tmp_path)
    ended = {row["stage"]: row for row in found["report"]}
    assert list(ended) == list(STAGES)
    assert ended.pop("sanitizer")["rc"] == 1
    assert {name: row.get("rc") for name, row in ended.items()} == dict.fromkeys(ended, 0), ended
    assert [row["file"] for row in found["tests"] if row.get("passed")]
    assert len([row for row in found["numerics"] if row.get("passed")]) > 30
    served = [row for row in found["engine"] if "of_base" in row]
    assert [(row["adapters"], row["ahead"]) for row in served] == [
        *((0, True), (0, False), (2, True), (2, False))
    ]
    assert all(row["tokens_s"] > 0 and row["of_bytes"] > 0 for row in served)
    (forms,) = (row for row in found["kernels"] if "by_row_us" in row)
    assert set(forms["by_row_us"]) == set(TINY.fused_linears)
    lines = done.stdout.splitlines()
    assert len(lines) <= MAX_LINES and "compute-sanitizer" in lines[0]


class Broken(ReferenceOps):
    """Computes one op wrongly, in one row of its result or one value that it writes."""

    def __init__(self, name: str) -> None:
        super().__init__()
        whole = getattr(self, name)

        def op(*arguments: Any, **options: Any) -> Any:
            result = whole(*arguments, **options)
            match result:
                case None:  # rope_write_kv changes its first argument
                    arguments[0][-1] *= 1.01
                case Tensor():
                    result[-1] = result[-1] + 1 if result.dtype is torch.int32 else float("nan")
                case _:
                    result[0][-1] *= 1.01
            return result

        setattr(self, name, op)


@pytest.mark.parametrize(
    ("name", "part"),
    [
        ("rms_norm", "pointwise"),
        ("gated_activation", "pointwise"),
        ("linear", "pointwise"),
        ("paged_attention", f"attention, head size {SMALL.heads[0].dim}"),
        ("rope_write_kv", f"attention, head size {SMALL.heads[1].dim}"),
        ("sample", "sampling"),
        ("log_softmax_top", "sampling"),
    ],
)
def test_one_wrong_row_of_an_op_is_noticed(name: str, part: str) -> None:
    def results(ops: ReferenceOps) -> list[bool]:
        torch.manual_seed(0)
        cases = Cases(ops, SMALL).parts[part]()
        return [row["passed"] for case in cases for row in rows(case)]

    assert all(results(ReferenceOps()))
    assert not all(results(Broken(name)))


def test_a_process_that_a_stage_started_ends_with_it(tmp_path: Path) -> None:
    """Also where the stage has ended by itself."""
    told = tmp_path / "child"
    for ending in ("time.sleep(600)", "pass"):
        told.unlink(missing_ok=True)
        script = (
            "import subprocess, sys, time, pathlib\n"
            "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'])\n"
            f"pathlib.Path({str(told)!r}).write_text(str(child.pid) + ' ')\n{ending}"
        )
        command = [sys.executable, "-c", script]
        with process_group(command, {**os.environ}, subprocess.DEVNULL) as process:
            while not (told.exists() and told.read_text().endswith(" ")):
                assert process.poll() in (None, 0)
                time.sleep(0.01)
            child = psutil.Process(int(told.read_text()))
            if ending == "pass":
                process.wait()
            assert child.is_running()
        child_ended, _ = psutil.wait_procs([child], timeout=30)
        assert child_ended or child.status() == psutil.STATUS_ZOMBIE


@pytest.mark.full
def test_a_report_that_is_ended_leaves_its_archive_and_no_process(tmp_path: Path) -> None:
    command = [*COMMAND, str(tmp_path), "--only", "engine"]
    report = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)
    stages: list[psutil.Process] = []
    while not stages:
        assert report.poll() is None
        with suppress(psutil.NoSuchProcess):
            stages = psutil.Process(report.pid).children()
        time.sleep(0.01)
    report.send_signal(signal.SIGTERM)
    output, _ = report.communicate()
    assert report.returncode == 128 + signal.SIGTERM
    assert str(tmp_path / ARCHIVE) in output and (tmp_path / ARCHIVE).exists()
    ended, _ = psutil.wait_procs(stages, timeout=30)
    assert ended == stages


def test_each_file_of_tests_has_a_row_when_it_ends(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """One that does not end in time has a row, too, and ends."""
    seconds = {"slow.py": 600, "quick.py": 0}
    monkeypatch.setattr(gpu_tests, "FILES", tuple(seconds))
    monkeypatch.setattr(
        gpu_tests,
        "pytest_command",
        lambda *words: [sys.executable, "-c", f"import time; time.sleep({seconds[words[-1]]})"],
    )
    found = gpu_tests.test_rows(tmp_path, float("inf"), tiny=False)
    first = next(found)
    assert first["file"] == "quick.py" and first["passed"]
    monkeypatch.setattr(time, "monotonic", lambda: float("inf"))
    (last,) = found
    assert last["file"] == "slow.py" and not last["passed"] and "did not end" in last["error"]


def test_a_stage_that_raises_hangs_or_lacks_time_loses_nothing(tmp_path: Path) -> None:
    stage = Stage(tmp_path, "smoke", 0.0, tiny=True)

    def broken() -> Iterator[dict[str, Any]]:
        yield {"us": 1}
        raise RuntimeError("out of memory")

    stage.part("broken", broken)
    stage.part("next", lambda: iter([{"us": 2}]))
    found = [json.loads(line) for line in (tmp_path / "smoke.jsonl").read_text().splitlines()]
    assert [row.get("us") for row in found] == [1, None, None, 2, None]
    assert found[1]["error"] == "RuntimeError: out of memory" and stage.failed
    environment = prepare(tmp_path / "none", tmp_path, tiny=True)
    assert "skipped" in run("smoke", STAGES["smoke"], 5, tmp_path, environment, True)
    hung = run("engine", Limits(0.2, 0, 0), 100, tmp_path, environment, True)
    assert hung["error"] == "it was ended after 0 s"


def test_the_table_has_few_lines_and_failures_come_first(tmp_path: Path) -> None:
    def write(name: str, rows: list[dict[str, Any]]) -> None:
        text = "".join(json.dumps(row) + "\n" for row in rows)
        (tmp_path / f"{name}.jsonl").write_text(text)

    write("report", [{"stage": "engine", "rc": 1, "seconds": 3.0}, {"stage": "x", "skipped": "y"}])
    figures = [{"part": "engine, 32 rows", "rows": 32, "ms": n / 3} for n in range(200)]
    write("engine", [*figures, {"part": "engine, 1 rows", "error": "out of memory " * 40}])
    lines = table(tmp_path)
    assert len(lines) == MAX_LINES and max(map(len, lines)) <= MAX_WIDTH
    assert lines[0].startswith("FAILED engine: engine, 1 rows: out of memory")
    assert lines[1] == "== engine: exit code 1, 3.0 s"
    assert lines[2] == "engine: rows 32  ms 0" and "more lines" in lines[-1]
