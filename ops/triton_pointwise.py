"""Triton kernels that read each element once: norm, activation, embedding.

All are memory-bound: the time is at least the number of bytes divided by the device's bandwidth.
Below about 4 MB, the launch (2 to 4 us inside a graph) takes longer. Arithmetic is in float32.
"""

# pyright knows neither Triton's launch options nor that jitted functions return tensors.
# pyright: reportCallIssue=false, reportGeneralTypeIssues=false

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ops.base import Activation
from ops.triton_table import blocks_of, power_of_two


def rms_norm(x: Tensor, weight: Tensor, eps: float, residual: Tensor | None) -> Tensor:
    """Semantics: residual += x in place if there is one; y = v / sqrt(mean(v^2) + eps) * weight.
    Shape: x, residual [T, K], weight [K] -> [T, K].
    DType: x any float, weight float32; the sum is rounded to the residual's dtype before the norm.
    Bytes: T * K * itemsize * (2, or 4 with a residual). 256 rows of 4096 in bf16: 8 MB, 2 us."""
    y = torch.empty_like(x)
    rows, width = x.shape
    if rows:
        block = power_of_two(width)
        _rms_norm[(rows,)](
            *(x, x if residual is None else residual, weight, y, width, eps),
            HAS_RESIDUAL=residual is not None,
            BLOCK=block,
            num_warps=min(max(block // 512, 1), 8),
        )
    return y


@triton.jit
def _rms_norm(x, residual, weight, y, width, eps, HAS_RESIDUAL: tl.constexpr, BLOCK: tl.constexpr):
    """Processes one row per program. The row stays in registers."""
    column = tl.arange(0, BLOCK)
    inside = column < width
    at = tl.program_id(0).to(tl.int64) * width + column
    value = tl.load(x + at, mask=inside, other=0).to(tl.float32)
    if HAS_RESIDUAL:
        value += tl.load(residual + at, mask=inside, other=0).to(tl.float32)
        rounded = value.to(residual.dtype.element_ty)
        tl.store(residual + at, rounded, mask=inside)
        value = rounded.to(tl.float32)
    scale = tl.rsqrt(tl.sum(value * value, axis=0) / width + eps)
    factor = tl.load(weight + column, mask=inside, other=0)
    tl.store(y + at, (value * scale * factor).to(y.dtype.element_ty), mask=inside)


def gated_activation(gate_up: Tensor, activation: Activation) -> Tensor:
    """Semantics: act(gate) * up.  Shape: [T, 2 * I] -> [T, I].  DType: any float.
    Bytes: 3 * T * I * itemsize. 256 rows of 14336 in bf16: 22 MB, 5 us.
    """
    rows, width = gate_up.shape[0], gate_up.shape[1] // 2
    y = gate_up.new_empty(rows, width)
    if rows:
        block = min(power_of_two(width), 1024)
        _gated_activation[(rows, blocks_of(width, block))](
            *(gate_up, y, width), IS_SILU=activation == "silu", BLOCK=block, num_warps=4
        )
    return y


@triton.jit
def sigmoid(x):
    """Computes the sigmoid without overflow for either sign."""
    small = tl.exp(-tl.abs(x))
    return tl.where(x >= 0, 1.0, small) / (1.0 + small)


@triton.jit
def _gated_activation(gate_up, y, width, IS_SILU: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < width
    gate = tl.load(gate_up + row * 2 * width + column, mask=inside, other=0).to(tl.float32)
    up = tl.load(gate_up + row * 2 * width + width + column, mask=inside, other=0).to(tl.float32)
    if IS_SILU:
        act = gate * sigmoid(gate)
    else:
        # This is the tanh form: 0.5 (1 + tanh(u)) is sigmoid(2 u), and 1.5957691 is 2 sqrt(2 / pi).
        act = gate * sigmoid(1.5957691216057308 * (gate + 0.044715 * gate * gate * gate))
    tl.store(y + row * width + column, (act * up).to(y.dtype.element_ty), mask=inside)


def embed(ids: Tensor, table: Tensor, scale: float) -> Tensor:
    """Semantics: y[t] = table[ids[t]] * scale.  Shape: ids [T], table [V, K] -> [T, K].
    DType: ids int32, y the table's dtype. Bytes: 2 * T * K * itemsize.
    """
    rows, width = len(ids), table.shape[1]
    y = table.new_empty(rows, width)
    if rows:
        block = min(power_of_two(width), 1024)
        _embed[(rows, blocks_of(width, block))](
            *(ids, table, y, width, scale), BLOCK=block, num_warps=4
        )
    return y


@triton.jit
def _embed(ids, table, y, width, scale, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < width
    source = tl.load(ids + row).to(tl.int64) * width
    value = tl.load(table + source + column, mask=inside, other=0).to(tl.float32) * scale
    tl.store(y + row * width + column, value.to(y.dtype.element_ty), mask=inside)
