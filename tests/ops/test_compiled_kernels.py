"""Which forms of the Triton kernels are compiled, and what the compiler makes of them. No GPU is
needed: kernels are compiled for sm_90 and launched at a double of the driver."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.full

MAX_FORMS = {"_attend": 12, "_combine": 2, "_rope_write_kv": 2}
MAX_FORMS |= {"shrink_rows": 3, "expand_rows": 3, "shrink_segments": 9, "expand_segments": 9}
"""Of kernels whose blocks depend on a step's shape; the others have one."""

MAX_DECODE_BYTES = 64 << 10
"""Shared memory of a program of attention that decodes, of which several run on a processor."""


def test_no_count_of_a_step_is_compiled_for():
    """Tokens, sequences, adapters, pages and layers are numbers that a kernel is given, so that the
    forms a worker compiles are few."""
    output = _without_interpreter("tools.kernel_variants")
    forms = json.loads(output)
    assert {"_attend", "shrink_rows", "expand_segments", "_draw"} <= forms.keys()
    too_many = {name: count for name, count in forms.items() if count > MAX_FORMS.get(name, 1)}
    assert too_many == {}


def test_after_its_warm_up_a_worker_compiles_nothing(tmp_path: Path):
    """Whatever requests come: prompts of all lengths, adapters of all ranks, all parameters."""
    counted = json.loads(_without_interpreter("tools.late_kernels", str(tmp_path)))
    assert counted["tokens"] > 100
    assert counted["early"] > 20
    assert counted["late"] == []


@pytest.mark.timeout(900)
def test_kernels_compile_for_hopper(request: pytest.FixtureRequest):
    """The interpreter takes more than the compiler does. Nothing may spill, and what is bound by
    memory must load 16 bytes at once. A kernel that did not change is not compiled again: Triton
    keeps binaries by a hash of the source, its own version and the target."""
    cache = request.config.cache
    assert cache is not None
    output = _without_interpreter("tools.hopper", TRITON_CACHE_DIR=str(cache.mkdir("triton")))
    kernels = [json.loads(line) for line in output.splitlines()]
    by_memory = {"_attend", "shrink_rows", "shrink_segments", "expand_rows", "expand_segments"}
    by_memory |= {"_rms_norm", "_gated_activation"}
    by_memory |= {"_draw", "_find_maxima", "_fill_bins", "_collect"}
    assert by_memory <= {kernel["name"] for kernel in kernels}
    for kernel in kernels:
        assert kernel["stack"] == 0, kernel
        assert kernel["wide_loads"] > 0 or kernel["name"] not in by_memory, kernel
    # Loads overlap the arithmetic on what was loaded before where few sequences generate. Many need
    # it less, and programs that take less memory more.
    decode = [k for k in kernels if k["name"] == "_attend" and k["shared"] < MAX_DECODE_BYTES]
    assert {kernel["in_flight"] > 0 for kernel in decode} == {False, True}
    for kernel in kernels:
        assert kernel["in_flight"] > 0 or kernel["name"] != "shrink_segments", kernel


def _without_interpreter(module: str, *arguments: str, **variables: str) -> str:
    """What the module prints where Triton compiles."""
    environment = {**os.environ, **variables}
    environment.pop("TRITON_INTERPRET", None)
    command = [sys.executable, "-m", module, *arguments]
    root = Path(__file__).parents[2]
    return subprocess.run(
        command, cwd=root, env=environment, capture_output=True, text=True, check=True
    ).stdout
