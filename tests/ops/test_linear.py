from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ops.base import Ops
from tests.ops.conftest import BACKENDS, TILES, VARIANTS, backend

DTYPES = st.sampled_from([torch.bfloat16, torch.float32])


@pytest.fixture(params=[*BACKENDS, *TILES], scope="session")
def ops(request: pytest.FixtureRequest) -> Ops:
    return backend(request.param)


@pytest.fixture(params=[*VARIANTS, *TILES], scope="session")
def cpu(request: pytest.FixtureRequest) -> Ops:
    return backend(request.param)


def tolerance(ops: Ops, weights: torch.dtype) -> float:
    """Rounding the input to bfloat16, where the processor wants it, costs 2^-9 of each term."""
    return 2e-2 if weights is torch.bfloat16 and getattr(ops, "rounds_input", False) else 1e-5


@settings(max_examples=40, deadline=None)
@given(
    rows=st.integers(1, 70),
    depth=st.integers(1, 300),
    columns=st.integers(1, 200),
    dtype=DTYPES,
    has_bias=st.booleans(),
    seed=st.integers(0, 2**31),
)
def test_linear_is_x_times_w_plus_bias(ops: Ops, rows, depth, columns, dtype, has_bias, seed):
    torch.manual_seed(seed)
    weight = torch.randn(columns, depth).to(dtype)
    bias = torch.randn(columns).to(dtype) if has_bias else None
    x = torch.randn(rows, depth)
    packed = ops.pack_linear(weight, bias=bias)
    assert (packed.in_features, packed.out_features) == (depth, columns)
    assert packed.num_bytes >= weight.nbytes
    expected = x.double() @ weight.double().T + (0 if bias is None else bias.double())
    error = (ops.linear(x, packed) - expected).abs().max()
    scale = x.double().abs() @ weight.double().abs().T + (0 if bias is None else bias.abs())
    assert error <= tolerance(ops, dtype) * scale.max()
    if bias is None:
        tied = ops.table_linear(weight)
        assert torch.equal(ops.linear(x, tied), ops.linear(x, packed))
        error = (ops.row_products(x, weight) - expected).abs().max()
        assert error <= tolerance(ops, dtype) * scale.max()


@settings(max_examples=25, deadline=None)
@given(
    depth=st.integers(1, 300),
    columns=st.integers(1, 200),
    dtype=DTYPES,
    first=st.integers(0, 60),
    count=st.integers(1, 40),
    seed=st.integers(0, 2**31),
)
def test_a_row_has_the_same_bits_in_any_batch(cpu: Ops, depth, columns, dtype, first, count, seed):
    torch.manual_seed(seed)
    weight = torch.randn(columns, depth).to(dtype)
    packed = cpu.pack_linear(weight, bias=torch.randn(columns))
    x = torch.randn(100, depth)
    own = x[first : first + count].contiguous()
    assert torch.equal(cpu.linear(own, packed), cpu.linear(x, packed)[first : first + count])
    part = cpu.row_products(own, weight)
    assert torch.equal(part, cpu.row_products(x, weight)[first : first + count])


def test_linear_does_not_keep_the_weight(ops: Ops):
    weight = torch.randn(64, 32)
    packed, x = ops.pack_linear(weight), torch.randn(3, 32)
    before = ops.linear(x, packed)
    weight.fill_(float("nan"))
    assert torch.equal(ops.linear(x, packed), before)
