from __future__ import annotations

from dataclasses import dataclass, replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from ops.base import PAGE_TOKENS, AttentionBatch, KVCacheView, KVLayout, LayerAttention, Ops, QKNorm
from tests.ops import formulas
from tests.ops.conftest import BACKENDS, TILES, VARIANTS, backend
from tests.ops.interpreter import is_interpreted
from workers.base_models.loader import resident_bytes

NUM_LAYERS, LAYER = 2, 1
IDENTITY = torch.tensor([[[1.0], [0.0]]])
"""Cosine and sine of no rotation."""


@pytest.fixture(params=[*BACKENDS, *TILES], scope="session")
def ops(request: pytest.FixtureRequest) -> Ops:
    return backend(request.param)


@pytest.fixture(params=[*VARIANTS, *TILES], scope="session")
def cpu(request: pytest.FixtureRequest) -> Ops:
    return backend(request.param)


@dataclass
class Case:
    """Sequences: `cached` tokens written by an earlier call, then `fresh` rows."""

    cached: list[int]
    fresh: list[int]
    num_heads: int
    num_kv: int
    dim: int
    dtype: torch.dtype
    window: int | None
    softcap: float | None
    seed: int
    norm: bool = False
    rope: bool = True
    sinks: bool = False

    @property
    def contexts(self) -> list[int]:
        return [c + f for c, f in zip(self.cached, self.fresh, strict=True)]


@st.composite
def cases(draw: st.DrawFn) -> Case:
    num = draw(st.integers(1, 5))
    cached = draw(st.lists(st.integers(0, 90), min_size=num, max_size=num))
    fresh = draw(st.lists(st.sampled_from([1, 1, 2, 5, 17, 40]), min_size=num, max_size=num))
    num_kv = draw(st.integers(1, 3))
    return Case(
        cached,
        fresh,
        num_kv * draw(st.sampled_from([1, 3, 4, 8])),
        num_kv,
        draw(st.sampled_from([16, 32, 48, 64, 80])),
        draw(st.sampled_from([torch.bfloat16, torch.float32])),
        draw(st.sampled_from([None, None, 1, 13, 64])),
        draw(st.sampled_from([None, 5.0])),
        draw(st.integers(0, 2**31)),
        *(draw(st.booleans()) for _ in ("norm", "rope", "sinks")),
    )


def int32(values: list[int]) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


def make_batch(tables: Tensor, first: list[int], count: list[int]) -> AttentionBatch:
    """Rows first..first + count of each sequence."""
    ends = [f + c for f, c in zip(first, count, strict=True)]
    starts = [sum(count[:i]) for i in range(len(count) + 1)]
    return AttentionBatch(
        int32(starts),
        int32([seq for seq, c in enumerate(count) for _ in range(c)]),
        int32([p for f, e in zip(first, ends, strict=True) for p in range(f, e)]),
        int32(ends),
        tables,
        max(count),
        max(ends),
    )


def make_cache(case: Case) -> tuple[KVCacheView, Tensor]:
    """An arena of NaN bytes and shuffled pages; table entries past the context point nowhere."""
    layout = KVLayout(NUM_LAYERS, case.num_kv, case.dim, case.dtype)
    needed = [-(-c // PAGE_TOKENS) for c in case.contexts]
    arena = torch.full((layout.page_bytes * (sum(needed) + 2),), 255, dtype=torch.uint8)
    pages = (torch.randperm(sum(needed) + 2) * layout.page_bytes).tolist()
    tables = torch.full((len(needed), max(needed) + 1), -(2**60))
    for seq, count in enumerate(needed):
        for index in range(count):
            tables[seq, index] = pages.pop()
    return KVCacheView(arena, layout), tables


def run(ops: Ops, case: Case, activations: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    """Output of the fresh rows by the backend and by the formula."""
    torch.manual_seed(case.seed)
    kv, tables = make_cache(case)
    heads = case.num_heads
    rope = torch.randn(max(case.contexts), case.dim) if case.rope else None
    sinks = torch.randn(heads) * 3 if case.sinks else None
    norm = QKNorm(torch.randn(case.dim), torch.randn(case.dim), 1e-6) if case.norm else None
    width = (heads + 2 * case.num_kv) * case.dim
    tokens = [torch.randn(c, width).to(activations) for c in case.contexts]

    old = make_batch(tables, [0] * len(tokens), case.cached)
    if sum(case.cached):
        rows = torch.cat([t[:c] for t, c in zip(tokens, case.cached, strict=True)])
        ops.rope_write_kv(rows, rope, LayerAttention(old, kv, LAYER, heads), norm)
    new = make_batch(tables, case.cached, case.fresh)
    qkv = torch.cat([t[c:] for t, c in zip(tokens, case.cached, strict=True)])
    scale = case.dim**-0.5
    at = LayerAttention(new, kv, LAYER, heads, scale, case.window, case.softcap, sinks)
    ops.rope_write_kv(qkv, rope, at, norm)
    out = ops.paged_attention(qkv, at)

    queries, keys, values = [], [], []
    for rows, cached in zip(tokens, case.cached, strict=True):
        angles = IDENTITY.expand(len(rows), 2, case.dim // 2).flatten(1) if rope is None else rope
        turned = formulas.rope(rows, angles, torch.arange(len(rows)), heads, norm)
        queries.append(turned[cached:, :heads])
        keys.append(turned[:, heads : heads + case.num_kv].to(case.dtype))
        values.append(turned[:, heads + case.num_kv :].to(case.dtype))
    expected = formulas.attention(
        torch.cat(queries), keys, values, new, scale, case.window, case.softcap, sinks
    )
    return out.double(), expected.flatten(1)


@settings(max_examples=10, deadline=None)
@given(case=cases())
def test_rope_and_attention_over_pages(ops: Ops, case: Case):
    out, expected = run(ops, case)
    # A key that rounds to the other neighbour in bfloat16 moves a weight by up to 2^-8 of it.
    tolerance = 2e-2 if case.dtype is torch.bfloat16 else 2e-5
    if case.dtype is torch.bfloat16 and getattr(ops, "variant", "") in ("amx", "tiles"):
        tolerance = 5e-2  # queries and weights are rounded, too
    torch.testing.assert_close(out, expected, rtol=tolerance, atol=tolerance)


LONG = Case([1100, 3, 700], [1, 20, 2], 3, 1, 32, torch.float32, None, None, 0)


@pytest.mark.parametrize(
    "case",
    [
        LONG,
        replace(LONG, window=600),
        replace(LONG, sinks=True, rope=False),
        replace(LONG, cached=[1023, 511, 512], fresh=[1, 1, 1]),
        replace(LONG, cached=[0], fresh=[530], num_heads=1, dim=16),
        replace(LONG, cached=[40, 2], fresh=[3, 1], num_heads=2, dim=256),
        replace(LONG, cached=[600], fresh=[1], window=20, softcap=30.0),
    ],
)
def test_long_contexts_and_large_heads(ops: Ops, case: Case):
    if is_interpreted(ops):
        case = replace(
            case, cached=[c // 8 for c in case.cached], fresh=[-(-f // 8) for f in case.fresh]
        )
    out, expected = run(ops, case)
    torch.testing.assert_close(out, expected, rtol=2e-5, atol=2e-5)


@settings(max_examples=10, deadline=None)
@given(
    contexts=st.lists(st.integers(1, 1300), min_size=2, max_size=6),
    window=st.sampled_from([None, 100]),
    rows=st.integers(1, 30),
)
def test_a_sequence_has_the_same_bits_in_any_batch(cpu: Ops, contexts, window, rows):
    assert_same_bits(cpu, contexts, window, rows)


@pytest.mark.parametrize("window", [None, 6000])
def test_a_long_context_has_the_same_bits_in_any_batch(cpu: Ops, window: int | None):
    """Alone, its chunks are computed in several passes."""
    assert_same_bits(cpu, [9001, 700, 300, 1, 4000], window, 20)


def assert_same_bits(cpu: Ops, contexts: list[int], window: int | None, rows: int) -> None:
    torch.manual_seed(0)
    heads, dim = 3, 32
    fresh = [min(rows, c) for c in contexts]
    cached = [c - f for c, f in zip(contexts, fresh, strict=True)]
    case = Case(cached, fresh, heads, 1, dim, torch.bfloat16, window, None, 0)
    kv, tables = make_cache(case)
    everything = make_batch(tables, [0] * len(contexts), contexts)
    qkv = torch.randn(sum(contexts), (heads + 2) * dim)
    rope = torch.randn(max(contexts), dim)
    cpu.rope_write_kv(qkv, rope, LayerAttention(everything, kv, LAYER, heads))

    def attend(first: list[int], count: list[int], seqs: list[int]) -> Tensor:
        starts = everything.query_start.tolist()
        picked = [
            qkv[starts[s] + f : starts[s] + f + c]
            for s, f, c in zip(seqs, first, count, strict=True)
        ]
        batch = make_batch(tables[seqs].contiguous(), first, count)
        at = LayerAttention(batch, kv, LAYER, heads, scale=0.2, window=window)
        return cpu.paged_attention(torch.cat(picked), at)

    together = attend(cached, fresh, list(range(len(contexts)))).split(fresh)
    for seq, expected in enumerate(together):
        assert torch.equal(attend([cached[seq]], [fresh[seq]], [seq]), expected)
        last = attend([contexts[seq] - 1], [1], [seq])
        assert torch.equal(last[0], expected[-1])


def test_the_scratch_memory_of_a_long_context_is_bounded(cpu: Ops):
    """A state for each of 64 rows and each chunk of 512 tokens takes 64 KiB a chunk."""
    rows, contexts, dim = 21, (600, 400_000), 16
    grown: list[int] = []
    for context in contexts:
        case = Case([context - rows], [rows], 3, 1, dim, torch.bfloat16, None, None, 0)
        kv, tables = make_cache(case)
        kv.arena.zero_()
        at = LayerAttention(make_batch(tables, case.cached, case.fresh), kv, LAYER, 3, scale=0.2)
        before = resident_bytes()
        cpu.paged_attention(torch.randn(rows, 5 * dim), at)
        grown.append(resident_bytes() - before)
    assert grown[-1] < 16 << 20, f"{grown} bytes, {contexts[-1] // 512 * 64 >> 10} MiB of states"


def test_page_bytes_outside_the_written_tokens_stay(ops: Ops):
    torch.manual_seed(0)
    case = replace(LONG, cached=[0], fresh=[5])
    kv, tables = make_cache(case)
    batch = make_batch(tables, [0], [5])
    at = LayerAttention(batch, kv, LAYER, 3)
    ops.rope_write_kv(torch.randn(5, 5 * 32), torch.randn(5, 32), at)
    layout = kv.layout
    start = int(tables[0, 0]) + LAYER * layout.layer_bytes
    assert int((kv.arena[start : start + layout.layer_bytes] != 255).sum()) <= 2 * 5 * 32 * 4
    kv.arena[start : start + layout.layer_bytes] = 255
    assert bool((kv.arena == 255).all())
