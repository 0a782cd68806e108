"""Packed factors hold every number once, zeros beside them, and few bytes more than the files."""

from __future__ import annotations

import random

import pytest
import torch

from benchmarks.ops import FUSED_LINEARS, LAYERS
from ops.factor_layout import PANELS, ROWS, FactorLayout
from tests.ops.packed_factor import read_factor


@pytest.mark.parametrize("layout", [ROWS, PANELS], ids=["rows", "panels"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(
    ("rows", "depth"), [(1, 1), (8, 64), (16, 75), (40, 8), (49, 41), (64, 130), (300, 12)]
)
def test_every_number_is_where_the_layout_says(
    layout: FactorLayout, dtype: torch.dtype, rows: int, depth: int
) -> None:
    factor = torch.randn(rows, depth)
    packed = layout.pack(factor, dtype)
    assert packed.nbytes == layout.num_bytes(rows, depth, dtype)
    assert torch.equal(read_factor(packed, rows, depth, layout), factor.to(dtype))
    assert int(packed.count_nonzero()) == factor.numel()


def image_bytes(layout: FactorLayout, rank: int) -> int:
    """Bytes of an adapter of SmolLM2-135M's shape."""
    return LAYERS * sum(
        layout.num_bytes(rank, fused.in_features, torch.bfloat16)
        + layout.num_bytes(width, rank, torch.bfloat16)
        for fused in FUSED_LINEARS
        for width in fused.widths
    )


@pytest.mark.parametrize("rank", [2, 4, 6, 8, 12, 16, 24, 32, 48, 56, 64, 96, 128, 256])
def test_usual_ranks_take_no_byte_more(rank: int) -> None:
    assert image_bytes(PANELS, rank) == image_bytes(ROWS, rank)


def test_a_thousand_adapters_of_any_rank_grow_by_less_than_a_tenth() -> None:
    ranks = random.Random(1).choices(range(1, 65), k=1000)
    before, after = (sum(image_bytes(layout, rank) for rank in ranks) for layout in (ROWS, PANELS))
    assert before < after < 1.1 * before
