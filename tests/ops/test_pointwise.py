from __future__ import annotations

import struct

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ops.base import Ops
from ops.block_hash import HASH_BLOCK, hash_keys
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


sizes = st.one_of(
    st.integers(1, 2 * HASH_BLOCK // 8), st.sampled_from([511, 512, 513, 1024, 1025])
).map(lambda words: 8 * words)


def random_bytes(num_bytes: int) -> torch.Tensor:
    draw = torch.Generator().manual_seed(num_bytes)
    return torch.randint(0, 256, (num_bytes,), dtype=torch.uint8, generator=draw)


@given(num_bytes=sizes)
def test_block_hashes(ops: Ops, num_bytes: int):
    """By the formula of the RFC, in integers without end."""
    payload = random_bytes(num_bytes)
    keys = [key & 0xFFFFFFFF for key in hash_keys(torch.device("cpu")).tolist()]
    expected: list[int] = []
    for begin in range(0, num_bytes, HASH_BLOCK):
        block = bytes(payload[begin : begin + HASH_BLOCK].tolist()).ljust(HASH_BLOCK, b"\0")
        words = struct.unpack(f"<{HASH_BLOCK // 4}I", block)
        keyed = [(word + key) % 2**32 for word, key in zip(words, keys, strict=True)]
        half = len(keyed) // 2
        expected.append(sum(a * b for a, b in zip(keyed, keyed[half:], strict=False)) % 2**64)
    assert [each % 2**64 for each in ops.block_hashes(payload).tolist()] == expected


@given(num_bytes=sizes, data=st.data())
def test_a_byte_that_changed_changes_its_blocks_hash_alone(
    ops: Ops, num_bytes: int, data: st.DataObject
):
    payload = random_bytes(num_bytes)
    before = ops.block_hashes(payload)
    at = data.draw(st.integers(0, num_bytes - 1))
    payload[at] ^= data.draw(st.integers(1, 255))
    changed = (ops.block_hashes(payload) != before).nonzero().flatten().tolist()
    assert changed == [at // HASH_BLOCK]


@given(
    bit=st.integers(0, 7),
    num_bytes=sizes,
    stride=st.sampled_from([1 << i for i in range(13)]),
    first=st.integers(0, 4095),
)
def test_a_broken_line_of_a_memory_is_seen(
    ops: Ops, bit: int, num_bytes: int, stride: int, first: int
):
    """One bit at every so many bytes: sums of words would miss some of these."""
    payload = random_bytes(num_bytes)
    before = ops.block_hashes(payload)
    payload[first % min(stride, num_bytes) :: stride] ^= 1 << bit
    assert not torch.equal(ops.block_hashes(payload), before)


def test_nothing_to_do(ops: Ops):
    nothing = torch.empty(0, 64)
    packed = ops.pack_linear(torch.randn(32, 64))
    assert ops.linear(nothing, packed).shape == (0, 32)
    assert ops.rms_norm(nothing, torch.ones(64), 1e-5).shape == (0, 64)
    assert ops.gated_activation(nothing, "silu").shape == (0, 32)
    assert ops.embed(torch.empty(0, dtype=torch.int32), torch.randn(4, 64)).shape == (0, 64)
    assert ops.block_hashes(torch.empty(0, dtype=torch.uint8)).shape == (0,)
