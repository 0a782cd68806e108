"""Stage `tests`: runs the tests that are marked `gpu`, with one process for each file."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
WORKER = "tests/workers/process/test_gpu_worker.py"
FILES = (
    WORKER,
    *("tests/ops/test_cuda.py", "tests/ops/test_attention.py", "tests/ops/test_lora.py"),
    *("tests/ops/test_sampling.py", "tests/ops/test_pointwise.py", "tests/ops/test_linear.py"),
)
PLUGINS = ("pytest_asyncio.plugin", "pytest_timeout")
"""Plugins of pytest for which pyproject.toml has settings. Other installed plugins are not
loaded."""
MARGIN_S = 3
"""Seconds before the deadline at which running tests are killed, so that their rows can still be
written."""
POLL_S = 0.1


def pytest_command(*arguments: str) -> list[str]:
    plugins = [word for plugin in PLUGINS for word in ("-p", plugin)]
    return [sys.executable, "-m", "pytest", "-v", *plugins, *arguments]


def pytest_environment() -> dict[str, str]:
    return {**os.environ, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}


def test_rows(folder: Path, deadline: float, tiny: bool) -> Iterator[dict[str, Any]]:
    """Runs all files concurrently, and yields a row for each file when it ends. `deadline` is a
    time of time.monotonic(). `tiny` runs one test of the worker, which uses a stub of the driver
    if there is no GPU, and only collects the other tests."""
    begin = time.monotonic()
    running: dict[str, subprocess.Popen[bytes]] = {}
    words = {file: ("-m", "gpu", file) for file in FILES}
    if tiny:
        words = {WORKER: ("-k", "graphs-ahead", WORKER), "others": ("--collect-only", *FILES[1:])}
    for file in words:
        with _log(folder, file).open("w") as log:
            running[file] = subprocess.Popen(
                pytest_command(*words[file]),
                cwd=ROOT,
                env=pytest_environment(),
                stdout=log,
                stderr=subprocess.STDOUT,
            )
    while running and time.monotonic() < deadline - MARGIN_S:
        for file, process in [*running.items()]:
            if process.poll() is not None:
                del running[file]
                yield _row(folder, file, process.returncode, time.monotonic() - begin)
        time.sleep(POLL_S)
    for file, process in running.items():
        process.kill()
        process.wait()
        yield {**_row(folder, file, None, time.monotonic() - begin), "error": f"{file} did not end"}


def _row(folder: Path, file: str, code: int | None, seconds: float) -> dict[str, Any]:
    lines = _log(folder, file).read_text(errors="replace").splitlines()
    tail = lines[-1 if code == 0 else -60 :]
    return {"file": file, "passed": code == 0, "after_s": seconds, "tail": tail}


def _log(folder: Path, file: str) -> Path:
    return folder / f"{Path(file).stem}.log"
