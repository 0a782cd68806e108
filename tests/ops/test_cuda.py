"""Promises of the Triton backend alone: bfloat16 activations, capacity, scratch, streams."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, get_args

import pytest
import torch
from torch import Tensor

from ops import triton_attention, triton_lora
from ops.base import FusedLinear, LayerAttention, LoRABatch, Ops, StreamName
from ops.cuda import CudaOps
from ops.registry import select
from ops.triton_table import AttentionBlocks, Blocks
from tests.ops import formulas
from tests.ops.interpreter import IS_INTERPRETED
from tests.ops.test_attention import LAYER as KV_LAYER
from tests.ops.test_attention import LONG, Case, make_batch, make_cache, run
from tests.ops.test_lora import LAYER, make_lora

BFLOAT16 = torch.bfloat16
DEVICE = torch.device("cpu" if IS_INTERPRETED else "cuda")
pytestmark = [pytest.mark.usefixtures("interpreted_scratch") if IS_INTERPRETED else pytest.mark.gpu]


MIXED = Case([40, 0, 30], [3, 18, 1], 6, 2, 32, BFLOAT16, None, None, 0, norm=True)


@pytest.mark.parametrize(
    "case",
    [MIXED, replace(MIXED, window=13, softcap=5.0), replace(MIXED, cached=[0, 0, 0], num_heads=2)],
)
def test_attention_in_bfloat16(triton_ops: Ops, case: Case):
    out, expected = run(triton_ops, case, BFLOAT16)
    torch.testing.assert_close(out, expected, rtol=3e-2, atol=3e-2)


@pytest.mark.parametrize("rows", [[1, 2, 1], [20, 0, 3]])
def test_lora_in_bfloat16(triton_ops: Ops, rows: list[int]):
    torch.manual_seed(0)
    fused = FusedLinear((0, 1, 2), (80, 16, 40), 300)
    lora, factors = make_lora(
        triton_ops, fused, [[8, 0, 5], [16, 64, 1]], BFLOAT16, rows, [1, 0, 1]
    )
    x = torch.randn(sum(rows) + 2, 300).to(BFLOAT16)
    y = torch.randn(len(x), 136).to(BFLOAT16)
    expected = y.double() + formulas.lora(x, fused, LAYER, lora, factors)
    triton_ops.add_lora(y, x, fused, LAYER, lora)
    torch.testing.assert_close(y.double(), expected, rtol=2e-2, atol=6e-2)


def test_pointwise_in_bfloat16(triton_ops: Ops):
    torch.manual_seed(0)
    x, residual = torch.randn(3, 96).to(BFLOAT16), torch.randn(3, 96).to(BFLOAT16)
    weight, total = torch.randn(96), x + residual
    y = triton_ops.rms_norm(x, weight, 1e-6, residual)
    assert y.dtype is BFLOAT16 and torch.equal(residual, total)
    expected = formulas.rms_norm(total, weight, 1e-6)
    torch.testing.assert_close(y.double(), expected, rtol=1e-2, atol=1e-2)
    gated = triton_ops.gated_activation(x, "silu")
    expected = formulas.silu(x[:, :48]) * x[:, 48:].double()
    torch.testing.assert_close(gated.double(), expected, rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize("num_active", [0, 1, 5])
@pytest.mark.parametrize("rows_each", [1, 7])
def test_a_captured_size_serves_fewer_adapters(triton_ops: Ops, num_active: int, rows_each: int):
    """Launches are sized by capacity: segments that are not there have slot -1 and no rows."""
    torch.manual_seed(0)
    capacity, fused = 5, FusedLinear((4, 5), (48, 48), 64)
    rows = [rows_each] * num_active + [0] * (capacity - num_active)
    slots = [n % 2 if n < num_active else -1 for n in range(capacity)]
    ranks = [[8, 4], [3, 0]]
    lora, factors = make_lora(triton_ops, fused, ranks, torch.float32, rows, slots)
    x = torch.randn(capacity * rows_each, 64)
    y = torch.randn(len(x), 96)
    expected = y.double() + formulas.lora(x, fused, LAYER, lora, factors)
    triton_ops.add_lora(y, x, fused, LAYER, lora)
    torch.testing.assert_close(y.double(), expected, rtol=1e-4, atol=1e-4)


def test_rows_of_slot_minus_one_are_base_only(triton_ops: Ops):
    fused = FusedLinear((3,), (48,), 64)
    lora, _ = make_lora(triton_ops, fused, [[8]], torch.float32, [3, 20], [-1, -1])
    y = torch.randn(23, 48)
    before = y.clone()
    triton_ops.add_lora(y, torch.randn(23, 64), fused, LAYER, lora)
    assert torch.equal(y, before)


SWEEP_RANKS = (5, 16, 72)
"""One below a tile of ranks, one that fills it, and one of two tiles."""
SWEEP_SEGMENTS = [1, 2] if IS_INTERPRETED else [1, 2, 15, 16, 17, 64, 200]
SWEEP_BLOCKS = (
    [(1, 32, 3), (1, 128, 1), (16, 128, 3)]
    if IS_INTERPRETED
    else [(1, 64, 8), (16, 64, 8), (16, 128, 1), (64, 64, 2), (64, 128, 1)]
)
"""Rows, columns and parts of a sum: on a GPU the forms that are served, and those with 128 columns.
Each is compiled, which takes about a second: 30 in all."""
SWEEP_DTYPES = (torch.float32, BFLOAT16)


def on_device(lora: LoRABatch) -> LoRABatch:
    tables = lora.tables
    moved = (tables.a_offset.to(DEVICE), tables.b_offset.to(DEVICE), tables.rank.to(DEVICE))
    return replace(
        lora,
        arena=lora.arena.to(DEVICE),
        tables=type(tables)(*moved),
        segment_start=lora.segment_start.to(DEVICE),
        segment_slot=lora.segment_slot.to(DEVICE),
    )


@pytest.mark.parametrize("dtype", SWEEP_DTYPES)
@pytest.mark.parametrize("rank", SWEEP_RANKS)
def test_no_block_size_reads_what_was_not_written(
    triton_ops: Ops, poisoned_scratch, rank: int, dtype: torch.dtype
):
    """B.3 of the reference: NaN in scratch, in the arena and beyond the rank stays where it is.

    On a GPU this decides whether triton_table.EXPAND_COLUMNS may be 128.
    """
    torch.manual_seed(rank)
    fused = FusedLinear((0, 1, 2), (144, 16, 40), 72)
    lora, factors = make_lora(
        triton_ops, fused, [[rank, 0, 2]], dtype, SWEEP_SEGMENTS, [0] * len(SWEEP_SEGMENTS)
    )
    x = torch.randn(sum(SWEEP_SEGMENTS) + 1, 72).to(dtype)
    start = torch.randn(len(x), 200).to(dtype)
    expected = start.double() + formulas.lora(x, fused, LAYER, lora, factors)
    there = on_device(lora)
    tolerance = 1e-4 if dtype is torch.float32 else 8e-2
    overlaps = triton_ops.overlaps
    for rows, columns, split in SWEEP_BLOCKS:
        blocks = Blocks(rows, min(columns, 64), 32, split, 4, 2)
        wide = replace(blocks, columns=columns, split=1)

        def add(blocks: Blocks = blocks, wide: Blocks = wide) -> Tensor:
            y = start.clone().to(DEVICE)
            planes = triton_lora.shrink(x.to(DEVICE), fused, LAYER, there, blocks, overlaps)
            triton_lora.expand_add(y, planes, fused, LAYER, there, wide, overlaps)
            return y.cpu()

        y = add()
        torch.testing.assert_close(y.double(), expected, rtol=tolerance, atol=tolerance)
        assert torch.equal(y[-1], start[-1])
        if not IS_INTERPRETED:
            assert torch.equal(add(), y)


@pytest.mark.parametrize(("tile", "window"), [(16, None), (32, 20)])
def test_attention_is_the_same_in_any_number_of_programs(
    triton_ops: Ops, poisoned_scratch, tile: int, window: int | None
):
    """Contexts of one part, of several and of the most there are; sequences of few tokens, of none
    and of many in one step. Alone each has the same bits."""
    case = replace(LONG, cached=[600, 70, 3, 5], fresh=[1, 2, 0, 9], num_heads=3, dim=16)
    torch.manual_seed(0)
    kv, tables = make_cache(case)
    everything = make_batch(tables, [0] * 4, case.contexts)
    qkv = torch.randn(sum(case.contexts), 5 * 16)
    written = LayerAttention(everything, kv, KV_LAYER, 3)
    triton_ops.rope_write_kv(qkv, torch.randn(640, 16), written)
    view = replace(kv, arena=kv.arena.to(DEVICE))
    ends = everything.query_start.tolist()[1:]
    fresh = [qkv[end - new : end] for end, new in zip(ends, case.fresh, strict=True)]
    batch = make_batch(tables, case.cached, case.fresh)
    at = LayerAttention(batch, kv, KV_LAYER, 3, 0.3, window)
    expected = select("reference").paged_attention(torch.cat(fresh), at)

    def attend(seqs: list[int], programs: int) -> Tensor:
        cached, new = [case.cached[n] for n in seqs], [case.fresh[n] for n in seqs]
        batch = make_batch(tables[seqs], cached, new)
        there = replace(
            batch,
            query_start=batch.query_start.to(DEVICE),
            token_seq=batch.token_seq.to(DEVICE),
            positions=batch.positions.to(DEVICE),
            context_lens=batch.context_lens.to(DEVICE),
            block_tables=batch.block_tables.to(DEVICE),
        )
        short = AttentionBlocks(16, tile, 32, programs, 4, 2)
        long = AttentionBlocks(32, tile, 32, 1, 4, 2)
        rows = torch.cat([fresh[n] for n in seqs]).to(DEVICE)
        at = LayerAttention(there, view, KV_LAYER, 3, 0.3, window)
        return triton_attention.paged_attention(rows, at, short, long).cpu()

    together = attend([0, 1, 2, 3], 1)
    torch.testing.assert_close(together, expected, rtol=2e-5, atol=2e-5)
    for programs in (2, 16):
        assert torch.equal(attend([0, 1, 2, 3], programs), together)
    alone = torch.cat([attend([seq], 4) for seq in (0, 1, 3)])
    assert torch.equal(alone, together)


class FakeCuda:
    """torch.cuda without a GPU: streams have names in the order in which they are made."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.num_streams = 0
        self.current: list[int] = [0]
        self.cannot_capture = False
        self.captured: list[int] = []
        for name in ("Stream", "stream", "graph", "current_stream", "set_stream"):
            monkeypatch.setattr(torch.cuda, name, getattr(self, name))
        monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: (0, 1))
        hopper = SimpleNamespace(major=9, shared_memory_per_block_optin=227 << 10)
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: hopper)
        monkeypatch.setattr(torch.cuda, "CUDAGraph", lambda: SimpleNamespace(replay=lambda: None))

    def Stream(self, device: torch.device) -> SimpleNamespace:
        self.num_streams += 1
        return self._named(self.num_streams)

    def _named(self, number: int) -> SimpleNamespace:
        return SimpleNamespace(
            number=number, wait_stream=lambda other: None, synchronize=lambda: None
        )

    def current_stream(self, device: torch.device) -> SimpleNamespace:
        return self._named(self.current[-1])

    def set_stream(self, stream: SimpleNamespace) -> None:
        self.current[-1] = stream.number

    @contextmanager
    def stream(self, stream: SimpleNamespace) -> Iterator[None]:
        self.current.append(stream.number)
        yield
        self.current.pop()

    @contextmanager
    def graph(self, graph: Any, *, stream: Any = None, **_: Any) -> Iterator[None]:
        """As torch's: where the capture cannot be ended, its stream stays the current one."""
        self.captured.append(stream.number)
        before = self.current[-1]
        self.current[-1] = stream.number
        yield
        if self.cannot_capture:
            raise RuntimeError("operation failed due to a previous error during capture")
        self.current[-1] = before


def test_copies_and_captures_never_share_a_stream(monkeypatch: pytest.MonkeyPatch):
    """torch gives out 32 streams in turn: one made for each copy would sooner or later be that of a
    capture."""
    fake = FakeCuda(monkeypatch)
    ops = CudaOps(torch.device("cuda"))
    num_made, used = fake.num_streams, dict[str, set[int]]()
    for _ in range(40):
        for name in get_args(StreamName):
            with ops.side_stream(name):
                used.setdefault(name, set()).add(fake.current[-1])
        ops.capture(lambda: used.setdefault("capture", set()).add(fake.current[-1]) or Tensor())
    assert fake.num_streams == num_made
    assert {len(streams) for streams in used.values()} == {1}
    assert len(set.union(*used.values())) == len(used)
    assert set(fake.captured) == used["capture"]


def test_a_capture_that_fails_leaves_the_stream_as_it_was(monkeypatch: pytest.MonkeyPatch):
    fake = FakeCuda(monkeypatch)
    ops = CudaOps(torch.device("cuda"))
    fake.cannot_capture = True
    with pytest.raises(RuntimeError, match="during capture"):
        ops.capture(Tensor)
    assert fake.current == [0]


def test_the_backend_is_refused_where_there_is_no_gpu():
    if torch.cuda.is_available():
        assert select("cuda").device.type == "cuda"
    else:
        with pytest.raises(ValueError, match="'cuda' needs a CUDA device"):
            select("cuda")
