"""Every backend, in every form that this machine can run."""

from __future__ import annotations

import shutil
from functools import cache
from pathlib import Path

import pytest
import torch

from ops.base import Ops
from ops.registry import select


def _variants() -> list[str]:
    """Forms of the C++ kernels: without a compiler none, without AVX2 not that one."""
    if shutil.which("g++") is None:
        return []
    wide = "avx2" in Path("/proc/cpuinfo").read_text()
    return ["native", "pairs", *(["avx2"] if wide else []), "scalar"]


@cache
def backend(name: str) -> Ops:
    if name == "reference":
        return select("reference")
    torch.set_num_threads(2)
    return select("cpu", variant=name, threads=2)


@pytest.fixture(params=["reference", *_variants()], scope="session")
def ops(request: pytest.FixtureRequest) -> Ops:
    """Reference and C++."""
    return backend(request.param)


@pytest.fixture(params=_variants(), scope="session")
def cpu(request: pytest.FixtureRequest) -> Ops:
    """C++ alone, for what only it promises: the same bits whatever the batch."""
    return backend(request.param)
