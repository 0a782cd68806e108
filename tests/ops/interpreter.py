"""Triton's kernels on a machine without a GPU: its interpreter runs them in numpy, in Python.

Imported before any module with kernels, which decide at import whether they are interpreted.
What the interpreter of Triton 3.7 gets wrong about bfloat16 is put right here, so that the kernels
under test are those of production: it multiplies the integers of its bits and rounds towards zero.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np
import torch

IS_INTERPRETED = not torch.cuda.is_available()
if IS_INTERPRETED:
    os.environ["TRITON_INTERPRET"] = "1"

from triton import language as tl  # noqa: E402
from triton.runtime.interpreter import TensorHandle, interpreter_builder  # noqa: E402

from ops.base import Ops  # noqa: E402

_dot, _cast = interpreter_builder.create_dot, interpreter_builder.cast_impl


def is_interpreted(ops: Ops) -> bool:
    """Whether every operation of a program costs a tenth of a millisecond: take small cases."""
    return IS_INTERPRETED and ops.name == "cuda"


@contextmanager
def poisoned() -> Iterator[None]:
    """Fills memory that torch allocates with NaN. Kernels may load elements that were never
    written, if they drop what they compute from them. With arbitrary values, numpy may warn that
    such a sum overflows. Of NaN it does not warn, and a NaN that is not dropped fails the test."""
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        assert torch.empty(4).isnan().all() and torch.ones(1).new_empty(4).isnan().all()
        yield
    finally:
        torch.use_deterministic_algorithms(before)


def _multiply(a: Any, b: Any, *others: Any) -> Any:
    return _dot(_widened(a), _widened(b), *others)


def _widened(operand: Any) -> Any:
    return _convert(operand, tl.float32) if operand.dtype == tl.bfloat16 else operand


def _convert(source: Any, target: Any) -> Any:
    match source.dtype.scalar, target.scalar:
        case (tl.bfloat16, tl.float32):
            return TensorHandle((source.data.astype(np.uint32) << 16).view(np.float32), tl.float32)
        case (tl.float32, tl.bfloat16):
            return TensorHandle(_round_to_bfloat16(source.data), tl.bfloat16)
    return _cast(source, target)


def _round_to_bfloat16(values: np.ndarray) -> np.ndarray:
    """To nearest, ties to even; a NaN stays one."""
    bits = np.ascontiguousarray(values).view(np.uint32).reshape(values.shape)
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
    return np.where(np.isnan(values), 0x7FC0, rounded).astype(np.uint16)


_builder: Any = interpreter_builder
_builder.create_dot, _builder.cast_impl = _multiply, _convert
# Half of the time would go into checks for integer overflow whose result nobody reads.
_builder.options = replace(_builder.options, sanitize_overflow=False)
