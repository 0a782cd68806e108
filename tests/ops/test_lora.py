from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ops.base import EMBEDDING, AdapterTables, FusedLinear, LoRABatch, Ops
from tests.ops import formulas
from tests.ops.conftest import BACKENDS, TILES, VARIANTS, backend

NUM_LAYERS, LAYER, NUM_PROJECTIONS = 3, 2, 9
RANKS = st.sampled_from([0, 0, 1, 4, 5, 12, 64, 128])
pytestmark = pytest.mark.usefixtures("interpreted_scratch")


@pytest.fixture(params=[*BACKENDS, *TILES], scope="session")
def ops(request: pytest.FixtureRequest) -> Ops:
    return backend(request.param)


@pytest.fixture(params=[*VARIANTS, *TILES], scope="session")
def cpu(request: pytest.FixtureRequest) -> Ops:
    return backend(request.param)


@st.composite
def fused_linears(draw: st.DrawFn) -> FusedLinear:
    projections = draw(st.sampled_from([(0, 1, 2), (3,), (4, 5), (8,)]))
    widths = draw(st.lists(st.sampled_from([16, 40, 64, 96, 1100]), min_size=3, max_size=3))
    return FusedLinear(projections, tuple(widths[: len(projections)]), draw(st.integers(1, 900)))


def make_lora(
    ops: Ops,
    fused: FusedLinear,
    ranks: list[list[int]],
    dtype: torch.dtype,
    rows: list[int],
    slots: list[int],
) -> tuple[LoRABatch, dict]:
    """An arena that is NaN but for the factors; tables of absent projections point nowhere."""
    num_slots = len(ranks)
    rank = torch.zeros(num_slots, NUM_LAYERS, NUM_PROJECTIONS, dtype=torch.int32)
    a_offset = torch.full((num_slots, NUM_LAYERS, NUM_PROJECTIONS), -(2**60))
    b_offset, factors, blobs, at = a_offset.clone(), {}, [], 64
    for slot, of_slot in enumerate(ranks):
        for projection, width, r in zip(fused.projections, fused.widths, of_slot, strict=False):
            if r == 0:
                continue
            a = (torch.randn(r, fused.in_features) / fused.in_features**0.5).to(dtype)
            b = torch.randn(r, width).to(dtype)
            factors[slot, LAYER, projection] = (a, b)
            rank[slot, LAYER, projection] = r
            for offset, factor in ((a_offset, a), (b_offset, b.T)):
                offset[slot, LAYER, projection] = at
                stored = ops.factor_layout.pack(factor, dtype)
                blobs.append((at, stored))
                at += -(-stored.nbytes // 64) * 64
    arena = torch.full((at + 64,), 255, dtype=torch.uint8)
    for start, blob in blobs:
        arena[start : start + blob.nbytes] = blob.view(torch.uint8)
    starts = torch.tensor([sum(rows[:n]) for n in range(len(rows) + 1)], dtype=torch.int32)
    tables = AdapterTables(a_offset, b_offset, rank)
    segment_slot = torch.tensor(slots, dtype=torch.int32)
    return LoRABatch(arena, dtype, tables, starts, segment_slot, 128), factors


@settings(max_examples=20, deadline=None)
@given(
    data=st.data(), fused=fused_linears(), dtype=st.sampled_from([torch.bfloat16, torch.float32])
)
def test_add_lora(ops: Ops, data: st.DataObject, fused: FusedLinear, dtype):
    ranks = data.draw(st.lists(st.lists(RANKS, min_size=3, max_size=3), min_size=1, max_size=4))
    rows = data.draw(st.lists(st.sampled_from([0, 1, 1, 2, 3, 9, 45]), max_size=5))
    slots = [data.draw(st.integers(0, len(ranks) - 1)) for _ in rows]
    base_rows = data.draw(st.integers(0, 3))
    torch.manual_seed(data.draw(st.integers(0, 2**31)))
    lora, factors = make_lora(ops, fused, ranks, dtype, rows, slots)
    x = torch.randn(sum(rows) + base_rows, fused.in_features)
    y = torch.randn(len(x), sum(fused.widths))
    expected = y.double() + formulas.lora(x, fused, LAYER, lora, factors)
    before = y.clone()
    ops.add_lora(y, x, fused, LAYER, lora)
    # Variants that round x and x A^T to bfloat16 lose 2^-9 of each term.
    rounds = dtype is torch.bfloat16 and getattr(ops, "rounds_input", False)
    tolerance = 2e-2 * float((expected - before).abs().max()) if rounds and len(y) else 1e-4
    torch.testing.assert_close(y.double(), expected, rtol=1e-4, atol=max(tolerance, 1e-4))
    assert torch.equal(y[sum(rows) :], before[sum(rows) :])


@settings(max_examples=20, deadline=None)
@given(data=st.data(), dtype=st.sampled_from([torch.bfloat16, torch.float32]))
def test_add_embedding_lora(ops: Ops, data: st.DataObject, dtype: torch.dtype):
    vocab_size, width = data.draw(st.integers(1, 90)), data.draw(st.sampled_from([16, 40, 300]))
    ranks = data.draw(st.lists(RANKS, min_size=1, max_size=4))
    rows = data.draw(st.lists(st.sampled_from([0, 1, 1, 2, 9]), max_size=5))
    slots = [data.draw(st.integers(0, len(ranks) - 1)) for _ in rows]
    torch.manual_seed(data.draw(st.integers(0, 2**31)))
    fused = FusedLinear((EMBEDDING,), (width,), vocab_size)
    # In the last layer of the tables.
    lora, factors = make_lora(ops, fused, [[rank] for rank in ranks], dtype, rows, slots)
    for (slot, _, _), (a, _) in factors.items():
        at = int(lora.tables.a_offset[slot, LAYER, EMBEDDING])
        lora.arena[at : at + a.nbytes] = a.T.contiguous().flatten().view(torch.uint8)
    ids = torch.randint(vocab_size, (sum(rows) + 2,), dtype=torch.int32)
    y = torch.randn(len(ids), width)
    x = torch.nn.functional.one_hot(ids.long(), vocab_size).float()
    expected = y.double() + 1.5 * formulas.lora(x, fused, LAYER, lora, factors)
    before = y.clone()
    ops.add_embedding_lora(y, ids, lora, 1.5)
    torch.testing.assert_close(y.double(), expected, rtol=1e-4, atol=1e-4)
    assert torch.equal(y[sum(rows) :], before[sum(rows) :])


def test_layers_that_an_adapter_skips_stay(ops: Ops):
    fused = FusedLinear((4, 5), (64, 64), 32)
    lora, _ = make_lora(ops, fused, [[8, 8]], torch.float32, [4], [0])
    y = torch.randn(4, 128)
    before = y.clone()
    ops.add_lora(y, torch.randn(4, 32), fused, LAYER - 1, lora)
    assert torch.equal(y, before)


def test_no_segments(ops: Ops):
    fused = FusedLinear((3,), (64,), 32)
    lora, _ = make_lora(ops, fused, [[8]], torch.float32, [], [])
    y = torch.randn(4, 64)
    before = y.clone()
    ops.add_lora(y, torch.randn(4, 32), fused, LAYER, lora)
    assert torch.equal(y, before)


@settings(max_examples=15, deadline=None)
@given(
    fused=fused_linears(),
    rows=st.lists(st.integers(1, 70), min_size=2, max_size=4),
    dtype=st.sampled_from([torch.bfloat16, torch.float32]),
    seed=st.integers(0, 2**31),
)
def test_a_row_has_the_same_bits_in_any_batch(cpu: Ops, fused: FusedLinear, rows, dtype, seed):
    torch.manual_seed(seed)
    ranks, slots = [[5, 64, 0], [12, 1, 128]], [n % 2 for n in range(len(rows))]
    lora, _ = make_lora(cpu, fused, ranks, dtype, rows, slots)
    x, y = torch.randn(sum(rows), fused.in_features), torch.randn(sum(rows), sum(fused.widths))
    alone = y.clone()
    cpu.add_lora(y, x, fused, LAYER, lora)
    bounds = lora.segment_start.tolist()
    for n, slot in enumerate(slots):
        row = bounds[n + 1] - 1
        single = alone[row : row + 1].clone()
        starts = torch.tensor([0, 1], dtype=torch.int32)
        slot_ids = torch.tensor([slot], dtype=torch.int32)
        one = LoRABatch(lora.arena, dtype, lora.tables, starts, slot_ids, 128)
        cpu.add_lora(single, x[row : row + 1].contiguous(), fused, LAYER, one)
        assert torch.equal(single[0], y[row])
