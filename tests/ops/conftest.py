"""Every backend, in every form that this machine can run."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import nullcontext
from functools import cache
from typing import Any, cast

import pytest
import torch
from hypothesis import settings

from ops.base import Ops
from ops.processor import Processor
from ops.registry import select
from tests.ops.carried import Carried
from tests.ops.interpreter import IS_INTERPRETED, poisoned

TRITON = pytest.param("triton", marks=() if IS_INTERPRETED else pytest.mark.gpu)

INTERPRETED_EXAMPLES = 3
"""Of a property, where an example takes the interpreter a second. The first tier runs one,
unless the kernels have changed."""
VARIANT_EXAMPLES = 5
"""Of a property on a variant of the C++ kernels, in the first tier unless they have changed."""


def _variants() -> list[str]:
    """The C++ kernels' variants that this machine can run; none without a compiler."""
    return [] if shutil.which("g++") is None else Processor.here().variants()


*VARIANTS, _ = _variants() or [""]
TILES = ["tiles"] if VARIANTS else []
"""The variant that computes as `amx` does: linears, LoRA and attention differ from `scalar`."""
BACKENDS = ["reference", *VARIANTS, TRITON]


@cache
def backend(name: str) -> Ops:
    if name == "reference":
        return select("reference")
    if name == "triton":
        return triton_backend()
    torch.set_num_threads(2)
    return select("cpu", variant=name, threads=2)


def triton_backend() -> Ops:
    """On the GPU if there is one, else interpreted."""
    from ops.cuda import CudaOps

    if IS_INTERPRETED:
        return CudaOps(torch.device("cpu"))
    return cast(Ops, Carried(select("cuda")))


@pytest.fixture(params=BACKENDS, scope="session")
def ops(request: pytest.FixtureRequest) -> Ops:
    """Reference, C++ and Triton."""
    return backend(request.param)


@pytest.fixture(
    params=["reference", *VARIANTS, *([] if IS_INTERPRETED else [TRITON])], scope="session"
)
def quick_ops(request: pytest.FixtureRequest) -> Ops:
    """Those that draw thousands of tokens in a moment. The interpreter does not; its tokens are
    held to the reference's one by one."""
    return backend(request.param)


@pytest.fixture(params=[*VARIANTS, *TILES], scope="session")
def cpu(request: pytest.FixtureRequest) -> Ops:
    """C++ alone, for what only it promises: the same bits whatever the batch."""
    return backend(request.param)


@pytest.fixture(params=[TRITON], scope="session")
def triton_ops(request: pytest.FixtureRequest) -> Ops:
    return backend(request.param)


@pytest.fixture
def poisoned_scratch() -> Iterator[None]:
    with poisoned():
        yield


@pytest.fixture(scope="module")
def interpreted_scratch() -> Iterator[None]:
    """As `poisoned_scratch`, for a module, if there is no GPU."""
    with poisoned() if IS_INTERPRETED else nullcontext():
        yield


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Iterator[None]:
    """Fewer examples of a property for the interpreter, and in the first tier for the variants."""
    test: Any = getattr(item, "obj", None)
    params = getattr(getattr(item, "callspec", None), "params", {}).values()
    name = "_hypothesis_internal_use_settings"
    full = getattr(test, name, None)
    sweep: Any = item.config.pluginmanager.get_plugin("kernel_sweep")
    is_quick = item.config.getoption("tier") == "quick" and not sweep.is_due
    if full is None:
        return (yield)
    if IS_INTERPRETED and "triton" in params:
        most = 1 if is_quick else INTERPRETED_EXAMPLES
    elif is_quick and any(variant in params for variant in (*VARIANTS, *TILES)):
        most = VARIANT_EXAMPLES
    else:
        return (yield)
    few = min(full.max_examples, most)
    setattr(test, name, settings(full, max_examples=few))
    try:
        return (yield)
    finally:
        setattr(test, name, full)
