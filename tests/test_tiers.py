"""What `make test` and the rest of `make test-all` run is everything, once."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.tiers import QUICK_EXAMPLES
from tools.source_tree import ROOT

pytestmark = pytest.mark.full

NUM_EXAMPLES = 50
SOURCE = f"""
from pathlib import Path

import pytest
from hypothesis import given, settings, strategies as st


def note(name):
    with Path(__file__).with_name("ran").open("a") as file:
        print(name, file=file)


def test_plain():
    note("plain")


@pytest.mark.full
def test_full():
    note("full")


@given(st.integers())
@settings(max_examples={NUM_EXAMPLES}, database=None)
def test_property(_):
    note("property")


@given(st.integers())
@settings(max_examples={QUICK_EXAMPLES}, database=None)
def test_short_property(_):
    note("short")
"""


@pytest.mark.parametrize(
    ("tier", "ran", "said"),
    [
        ("quick", {"plain": 1, "property": QUICK_EXAMPLES, "short": QUICK_EXAMPLES}, "1 tests"),
        ("rest", {"full": 1, "property": NUM_EXAMPLES - QUICK_EXAMPLES}, "2 tests"),
        (
            "all",
            {"plain": 1, "full": 1, "property": NUM_EXAMPLES, "short": QUICK_EXAMPLES},
            "the full forms of soak and chaos",
        ),
    ],
)
@pytest.mark.parametrize("processes", [(), ("-n", "1")], ids=["alone", "xdist"])
def test_a_tier_runs_its_part(
    tmp_path: Path, tier: str, ran: dict[str, int], said: str, processes: tuple[str, ...]
) -> None:
    (tmp_path / "test_one.py").write_text(SOURCE)
    (tmp_path / "pytest.ini").write_text("[pytest]\nmarkers = full: not in the first tier\n")
    command = [sys.executable, "-m", "pytest", "-q", "-p", "tests.tiers", "--tier", tier]
    environment = {k: v for k, v in os.environ.items() if not k.startswith("PYTEST_")}
    done = subprocess.run(
        [*command, *processes, str(tmp_path)],
        env=environment | {"PYTHONPATH": str(ROOT)},
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    names = (tmp_path / "ran").read_text().split()
    assert {name: names.count(name) for name in set(names)} == ran
    assert f"not run: {said}" in done.stdout
