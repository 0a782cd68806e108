from __future__ import annotations

import gguf
import numpy as np
import pytest
import torch
from gguf.quants import dequantize, quantize
from hypothesis import given, settings
from hypothesis import strategies as st

from ops.base import Ops
from ops.block_matrix import BlockMatrix, densify
from ops.panel_linear import panel_bytes
from ops.weight_format import BLOCK_SIZES, WeightFormat
from tests.ops.conftest import TILES, VARIANTS, backend

FORMATS = st.sampled_from(list(BLOCK_SIZES))
SCALE_BYTES = {"Q4_K": [(0, 2), (2, 4)], "Q6_K": [(208, 210)]}
"""Where a block has its float16, of the formats that gguf does not write."""


def random_blocks(format: WeightFormat, rows: int, num_blocks: int, seed: int) -> BlockMatrix:
    """Returns a matrix that gguf has quantised, or random blocks of a format that it only reads."""
    rng = np.random.default_rng(seed)
    sizes = BLOCK_SIZES[format]
    if format.name in SCALE_BYTES:
        blocks = rng.integers(0, 256, (rows, num_blocks, sizes.block_bytes), np.uint8)
        for begin, end in SCALE_BYTES[format.name]:
            halfs = rng.standard_normal((rows, num_blocks, 1)).astype(np.float16)
            blocks[..., begin:end] = halfs.view(np.uint8)
        return BlockMatrix(format, torch.from_numpy(blocks.reshape(rows, -1)))
    exact = rng.standard_normal((rows, num_blocks * sizes.block)).astype(np.float32)
    return BlockMatrix(format, torch.from_numpy(quantize(exact, kind(format))))


def kind(format: WeightFormat) -> gguf.GGMLQuantizationType:
    return gguf.GGMLQuantizationType[format.name]


@settings(max_examples=25, deadline=None)
@given(FORMATS, st.integers(1, 60), st.integers(1, 3), st.integers(0, 2**31))
def test_elements_are_those_that_gguf_reads(format, rows, num_blocks, seed) -> None:
    matrix = random_blocks(format, rows, num_blocks, seed)
    expected = torch.from_numpy(dequantize(matrix.blocks.numpy(), kind(format)))
    assert matrix.shape == tuple(expected.shape)
    assert torch.equal(matrix.dequantize(), expected.to(torch.bfloat16))


@pytest.mark.parametrize("variant", [*VARIANTS, *TILES])
def test_a_quantised_linear_has_the_bits_of_its_bfloat16_form(variant: str) -> None:
    """For any number of rows, parts of several formats and a bias included."""
    ops = backend(variant)

    @settings(max_examples=25, deadline=None)
    @given(
        formats=st.lists(FORMATS, min_size=1, max_size=3),
        columns=st.integers(1, 130),
        num_blocks=st.integers(1, 2),
        rows=st.integers(1, 70),
        has_bias=st.booleans(),
        seed=st.integers(0, 2**31),
    )
    def check(formats, columns, num_blocks, rows, has_bias, seed) -> None:
        blocks = {each: 256 * num_blocks // BLOCK_SIZES[each].block for each in formats}
        weights = [
            random_blocks(each, columns + i, blocks[each], seed + i)
            for i, each in enumerate(formats)
        ]
        torch.manual_seed(seed)
        x = torch.randn(rows, 256 * num_blocks)
        bias = torch.randn(sum(weight.shape[0] for weight in weights)) if has_bias else None
        plain = ops.linear(x, ops.pack_linear(densify(weights), bias=bias))
        assert torch.equal(ops.linear(x, ops.pack_linear(*weights, bias=bias)), plain)
        assert torch.equal(ops.linear(x[-1:], ops.pack_linear(*weights, bias=bias)), plain[-1:])

    check()


@pytest.mark.parametrize("variant", [*VARIANTS, *TILES])
def test_parts_in_float32_and_in_blocks_may_be_in_any_order(variant: str) -> None:
    ops, x = backend(variant), torch.randn(3, 64)
    blocks, plain = random_blocks(WeightFormat.Q8_0, 50, 2, 0), torch.randn(20, 64)
    alone = {part: ops.linear(x, ops.pack_linear(part)) for part in (blocks, plain)}
    for parts in ((blocks, plain), (plain, blocks)):
        together = ops.linear(x, ops.pack_linear(*parts))
        assert torch.equal(together, torch.cat([alone[part] for part in parts], dim=1))


@pytest.mark.parametrize("variant", [*VARIANTS, *TILES])
@pytest.mark.parametrize("format", BLOCK_SIZES)
def test_each_weight_is_rounded_as_in_its_bfloat16_form(variant: str, format: WeightFormat) -> None:
    """Scales and minimums have any finite bits, so that weights lie between two bfloat16 numbers
    and next to powers of two. A row of the identity matrix selects the weights of one k."""
    rng = np.random.default_rng(7)
    sizes = BLOCK_SIZES[format]
    columns = 96 if variant == "tiles" else 2400
    blocks = rng.integers(0, 256, (columns, 256 // sizes.block, sizes.block_bytes), np.uint8)
    halfs = {"Q4_1": [0, 2], "Q4_K": [0, 2], "Q6_K": [208]}.get(format.name, [0])
    for start in halfs:
        exact = rng.integers(0, 0x7C00, blocks.shape[:2], np.uint16)
        exact |= rng.integers(0, 2, blocks.shape[:2], np.uint16) << 15
        blocks[..., start : start + 2] = exact[..., None].view(np.uint8)
    matrix = BlockMatrix(format, torch.from_numpy(blocks.reshape(len(blocks), -1)))
    ops, expected = backend(variant), matrix.dequantize().float().T
    packed = ops.pack_linear(matrix)
    for rows in (1, 32, 256):
        y = torch.cat([ops.linear(x, packed) for x in torch.eye(256).split(rows)])
        assert torch.equal(y, expected)


def test_backends_without_such_kernels_compute_with_the_bfloat16_form(ops: Ops) -> None:
    weight, x = random_blocks(WeightFormat.Q4_1, 40, 4, 0), torch.randn(5, 128)
    quantised, plain = ops.pack_linear(weight), ops.pack_linear(weight.dequantize())
    assert torch.equal(ops.linear(x, quantised), ops.linear(x, plain))


@pytest.mark.skipif(not VARIANTS, reason="no C++ compiler")
@pytest.mark.parametrize("format", BLOCK_SIZES)
def test_a_packed_weight_takes_the_bytes_that_are_planned(format: WeightFormat) -> None:
    packed = backend(VARIANTS[0]).pack_linear(random_blocks(format, 96, 2, 0))
    depth = packed.in_features
    assert packed.num_bytes == panel_bytes(format, 96, depth)
    assert packed.num_bytes < panel_bytes(WeightFormat.BF16, 96, depth)
