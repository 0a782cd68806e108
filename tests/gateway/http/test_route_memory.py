"""No route that reads texts takes much memory for a text that it refuses or truncates."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.gateway.http.route_memory import BODIES
from tools.source_tree import ROOT

MAX_BYTES = 64 << 20


@pytest.mark.skipif(sys.platform != "linux", reason="reads the peak from /proc")
def test_a_long_text_takes_bounded_memory_on_each_route(tmp_path: Path) -> None:
    """Its tokens would take 400 MiB."""
    command = [sys.executable, "-m", "tests.gateway.http.route_memory", str(tmp_path)]
    answer = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True)
    found = json.loads(answer.stdout.splitlines()[-1])
    print(found)
    assert found.keys() == BODIES.keys()
    assert {status for status, _, _ in found.values()} == {200, 400}
    assert {path for path, (_, num_bytes, _) in found.items() if num_bytes > MAX_BYTES} == set()
