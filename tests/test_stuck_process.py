"""A test process that crashes or is stuck ends the run as failed and is named."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tools.source_tree import ROOT

OTHERS = """
import pytest

@pytest.mark.parametrize("number", range(3))
def test_passes(number):
    pass
"""
CULPRIT = """
import collections, ctypes, itertools
import pytest
import tests.stuck_process

tests.stuck_process.GRACE_S = 0.5

def test_before():
    pass

@pytest.mark.timeout(0.5)
def test_culprit():
    {line}

def test_after():
    pass
"""
LINES = {
    "crashed": "ctypes.string_at(0)",
    "stuck in native code": "collections.deque(itertools.repeat(0), maxlen=0)",
}


@pytest.mark.full
@pytest.mark.timeout(60)
@pytest.mark.parametrize("line", LINES.values(), ids=LINES)
def test_a_lost_process_fails_the_run(tmp_path: Path, line: str) -> None:
    """With as many processes as `make test` has, and files that wait for one of them."""
    (tmp_path / "test_culprit.py").write_text(CULPRIT.format(line=line))
    for number in range(6):
        (tmp_path / f"test_other_{number}.py").write_text(OTHERS)
    (recipe,) = [x for x in (ROOT / "Makefile").read_text().splitlines() if x.startswith("PYTEST")]
    options = recipe.split("-m pytest ")[1].split()
    command = [sys.executable, "-m", "pytest", *options, "-p", "tests.stuck_process"]
    environment = {k: v for k, v in os.environ.items() if not k.startswith("PYTEST_")}
    done = subprocess.run(
        [*command, str(tmp_path)],
        env=environment | {"PYTHONPATH": str(ROOT)},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=45,
    )
    assert done.returncode != 0
    assert "crashed while running 'test_culprit.py::test_culprit'" in done.stdout
    assert "1 failed" in done.stdout.splitlines()[-1]
