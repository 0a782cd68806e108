from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ops.base import Ops
from tests.ops import formulas

SIZES = {"rows": st.integers(1, 40), "width": st.integers(1, 700), "seed": st.integers(0, 2**31)}


@settings(max_examples=25, deadline=None)
@given(**SIZES)
def test_rms_norm(ops: Ops, rows, width, seed):
    torch.manual_seed(seed)
    x, weight = torch.randn(rows, width) * 3, torch.randn(width)
    expected = formulas.rms_norm(x, weight, 1e-5)
    torch.testing.assert_close(
        ops.rms_norm(x, weight, 1e-5).double(), expected, rtol=1e-5, atol=1e-5
    )


@settings(max_examples=25, deadline=None)
@given(**SIZES)
def test_rms_norm_adds_to_the_residual_first(ops: Ops, rows, width, seed):
    torch.manual_seed(seed)
    x, residual, weight = torch.randn(rows, width), torch.randn(rows, width), torch.randn(width)
    total = x + residual
    y = ops.rms_norm(x, weight, 1e-6, residual)
    assert torch.equal(residual, total)
    expected = formulas.rms_norm(total, weight, 1e-6)
    torch.testing.assert_close(y.double(), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("activation", ["silu", "gelu_tanh"])
@settings(max_examples=20, deadline=None)
@given(**SIZES)
def test_gated_activation(ops: Ops, activation, rows, width, seed):
    torch.manual_seed(seed)
    gate_up = torch.randn(rows, 2 * width) * 8
    act = formulas.silu if activation == "silu" else formulas.gelu_tanh
    expected = act(gate_up[:, :width]) * gate_up[:, width:].double()
    y = ops.gated_activation(gate_up, activation)
    torch.testing.assert_close(y.double(), expected, rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("activation", ["silu", "gelu_tanh"])
def test_gated_activation_of_extremes(ops: Ops, activation):
    gate = torch.tensor([-1e4, -100.0, -88.0, -0.0, 0.0, 88.0, 100.0, 1e4])
    y = ops.gated_activation(torch.cat((gate, torch.ones(8)))[None], activation)[0]
    torch.testing.assert_close(y, gate.clamp(min=0.0), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(("rows", "width"), [(1, 576), (33, 100), (7, 5)])
def test_embed(ops: Ops, dtype, rows, width):
    table = torch.randn(50, width).to(dtype)
    ids = torch.randint(0, 50, (rows,), dtype=torch.int32)
    expected = (table.float()[ids.long()] * 1.5).to(ops.activation_dtype(dtype))
    assert torch.equal(ops.embed(ids, table, 1.5), expected)


def test_nothing_to_do(ops: Ops):
    nothing = torch.empty(0, 64)
    packed = ops.pack_linear(torch.randn(32, 64))
    assert ops.linear(nothing, packed).shape == (0, 32)
    assert ops.rms_norm(nothing, torch.ones(64), 1e-5).shape == (0, 64)
    assert ops.gated_activation(nothing, "silu").shape == (0, 32)
    assert ops.embed(torch.empty(0, dtype=torch.int32), torch.randn(4, 64)).shape == (0, 64)
