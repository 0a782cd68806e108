"""`pytest -m gpu` on a machine with torch, Triton, numpy, msgspec and pytest alone."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from tests import bare_machine

HIDDEN = """
import importlib.abc, sys
HERE = {"ops", "memory", "adapters", "workers", "tests", "benchmarks", "torch", "torchgen",
    "triton", "numpy", "msgspec", "pytest", "pluggy", "iniconfig", "packaging", "pygments", "yaml",
    "sympy", "mpmath", "typing_extensions", "filelock", "networkx", "jinja2", "markupsafe",
    "fsspec", "setuptools", "py"}
class Hidden(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path, target=None):
        top = name.partition(".")[0]
        if top in HERE or top in sys.stdlib_module_names or top.startswith("_"):
            return None
        raise ModuleNotFoundError(f"{name} is not on this machine", name=name)
sys.meta_path.insert(0, Hidden())
import pytest
sys.exit(pytest.main(sys.argv[1:]))
"""


def test_tests_of_the_gpu_need_no_package_but_those() -> None:
    """All are collected; one that computes, and the worker's, run."""
    root = Path(__file__).parents[1]
    environment = {**os.environ, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    for name in ("PYTEST_ADDOPTS", "PYTEST_XDIST_WORKER"):
        environment.pop(name, None)
    command = [sys.executable, "-c", HIDDEN, "-q"]

    def run(*arguments: str) -> str:
        done = subprocess.run(
            [*command, *arguments], cwd=root, env=environment, capture_output=True, text=True
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    collected = run("--collect-only")
    assert all(f"tests/{name}" in collected for name in bare_machine.COLLECTED)
    assert "tests/gateway" not in collected
    run(
        "tests/workers/process/test_gpu_worker.py::"
        "test_a_worker_on_a_gpu_answers_as_the_reference_does[graphs-ahead]",
        "tests/ops/test_pointwise.py",
        "-k=graphs or (rms_norm and reference)",
    )
