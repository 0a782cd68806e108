"""A step run as a graph, padded to fixed shapes at fixed addresses, computes what the step alone
computes, whatever step it was captured for. On the CPU a graph computes anew from the same
memory."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from ops.base import PAGE_TOKENS
from ops.copies import Packing, new_host_buffer, upload
from ops.registry import select
from ops.triton_table import reads_by_row
from tests.doubles import make_adapter, make_model
from tests.ops.conftest import triton_backend
from tests.ops.interpreter import IS_INTERPRETED, poisoned
from tests.workers.driver import Driver
from tests.workers.paged import PagedModel, Stream
from tests.workers.process.test_worker import Setup
from workers.execution.batch import (
    BatchInputs,
    ModelBuffers,
    StepShape,
    rank_bound,
    rank_bounds,
)
from workers.execution.graph_runner import (
    NUM_PAUSED,
    NUM_TOKENS,
    SCRATCH_PAGE,
    GraphBuffers,
    GraphKey,
    GraphRunner,
    Limits,
    StepGraph,
    generating_keys,
)
from workers.execution.step_input import Array
from workers.layers.segments import build_segments
from workers.models.loading import load_model
from workers.models.plan import ModelPlan
from workers.wire.protocol import Generate

VOCAB = 256
OUTER = r".*(embed_tokens|lm_head|down_proj)"
MAX_LEN = 128


class Steps:
    """Sequences whose prompts are computed, and what a step of one row each reads."""

    def __init__(self, folder: Path, adapters: list[Path], backend: str) -> None:
        ops = self.ops = triton_backend() if backend == "triton" else select(backend)
        # By how large a step can be, Triton splits sums.
        self.tolerance = 0.0 if backend == "cpu" else 1e-5
        self.paged = PagedModel(
            load_model(ModelPlan.read(folder, "tiny", torch.float32), ops), ops, num_pages=192
        )
        for slot, adapter in enumerate(adapters):
            self.paged.load_adapter(slot, adapter)
        self.max_rank = int(self.paged.tables.rank.max())
        self.layout = self.paged.model.plan.kv_layout
        self.buffers = ModelBuffers(
            self.paged.arena, torch.zeros(32, MAX_LEN, dtype=torch.int32), self.paged.tables
        )
        num_slots = len(self.paged.tables.rank)
        vocab_size = self.paged.model.plan.spec.vocab_size
        self.limits = Limits(20, 2048, MAX_LEN, num_slots, rank_bound(self.max_rank), vocab_size)

    def begin(
        self, slots: list[int], longest: int = 40, counts: list[int] | None = None
    ) -> BatchInputs[Array]:
        """New sequences with these adapters, and the inputs of their next step. counts: tokens of
        each in that step; of those with more than one, every second one is not sampled."""
        rng = random.Random(len(slots))
        count, counts = len(slots), counts or [1] * len(slots)
        streams = [Stream(slot) for slot in slots]
        prompts = [
            [rng.randrange(VOCAB) for _ in range(n + rng.randrange(1, longest - 1))] for n in counts
        ]
        work = zip(streams, prompts, counts, strict=True)
        self.paged.step([(stream, prompt[:-n]) for stream, prompt, n in work])
        for stream, prompt in zip(streams, prompts, strict=True):
            while len(stream.pages) * PAGE_TOKENS < len(prompt):
                stream.pages.append(self.paged.free.pop())
        starts = np.array([stream.length for stream in streams], np.int32)
        query_start = np.cumsum([0, *counts], dtype=np.int32)
        token_seq = np.repeat(np.arange(count, dtype=np.int32), counts)
        positions = np.arange(sum(counts), dtype=np.int32) - (query_start[:-1] - starts)[token_seq]
        sampled = [n for n, tokens in enumerate(counts) if tokens == 1 or n % 2 == 0]
        tables = np.full((count, max(len(stream.pages) for stream in streams)), -(1 << 40))
        for row, stream in enumerate(streams):
            tables[row, : len(stream.pages)] = stream.pages
        segment_start, segment_slot = build_segments([*zip(slots, counts, strict=True)])
        buffer_slots = np.arange(count)[::-1].copy()
        for slot, prompt in zip(buffer_slots.tolist(), prompts, strict=True):
            self.buffers.tokens[slot, : len(prompt)] = torch.tensor(prompt)
        last_tokens = query_start[1:][sampled].astype(np.int64) - 1
        rows = BatchInputs[Array](
            buffer_slots=buffer_slots[token_seq],
            buffer_positions=positions.astype(np.int64),
            query_start=query_start,
            token_seq=token_seq,
            positions=positions,
            context_lens=starts + np.array(counts, np.int32),
            block_tables=tables,
            last_tokens=last_tokens,
            segment_start=segment_start,
            segment_slot=segment_slot,
            sampled_start=np.searchsorted(last_tokens, segment_start).astype(np.int32),
        )
        for stream in streams:
            self.paged.free += stream.pages
        return rows

    def shape(self, rows: BatchInputs[Array]) -> StepShape:
        max_rank = self.max_rank if len(rows.segment_slot) else 0
        counts = np.diff(rows.query_start)
        return StepShape(int(counts.max()), int(rows.context_lens.max()), rank_bound(max_rank))

    def graph(self, num_tokens: int, num_sequences: int = 0) -> StepGraph:
        """For that many tokens, and adapters as many as there are. num_sequences: of a graph for
        steps with prompts."""
        num_segments = min(num_tokens, self.limits.num_slots)
        sizes = num_tokens, num_sequences > 0, num_sequences or num_tokens
        key = GraphKey(*sizes, num_segments)
        buffers = GraphBuffers(self.limits, self.ops.device)
        return StepGraph(key, self.limits, buffers, self.ops, self.compute)

    def alone(self, rows: BatchInputs[Array]) -> Tensor:
        tensors = BatchInputs[Tensor](*upload([*rows], self.ops.device))
        return self.compute(tensors, self.shape(rows))

    def compute(
        self, rows: BatchInputs[Tensor], shape: StepShape, out: Tensor | None = None
    ) -> Tensor:
        batch = self.buffers.forward_batch(rows, shape, self.layout)
        hidden = self.paged.model.forward(batch)
        return self.paged.model.logits(hidden[rows.last_tokens], out, batch.sample_lora)

    def assert_same(self, rows: BatchInputs[Array], run: Callable[[], Tensor]) -> None:
        """The logits, and every byte of the arena but those of the scratch page."""
        before = self.paged.arena.clone()
        expected = self.alone(rows)
        after = self.paged.arena.clone()
        self.paged.arena.copy_(before)
        torch.testing.assert_close(run(), expected, atol=self.tolerance, rtol=0)
        page = slice(SCRATCH_PAGE, SCRATCH_PAGE + self.layout.page_bytes)
        self.paged.arena[page] = after[page]
        torch.testing.assert_close(
            self.paged.arena.view(torch.float32),
            after.view(torch.float32),
            atol=self.tolerance,
            rtol=0,
            equal_nan=True,
        )


@pytest.fixture(scope="module")
def steps(tmp_path_factory: pytest.TempPathFactory) -> Steps:
    return make_steps(tmp_path_factory.mktemp("static"), "cpu")


def make_steps(folder: Path, backend: str) -> Steps:
    torch.set_num_threads(1)
    model = make_model(folder / "model", "qwen3")
    adapters = [
        make_adapter(model, folder / f"r{rank}", rank=rank, alpha=16, seed=rank, targets=targets)
        for rank, targets in ((4, "all-linear"), (8, r".*(q_proj|lm_head)"), (16, OUTER))
    ]
    return Steps(model, adapters, backend)


def mixed(rng: random.Random, count: int, num_adapted: int) -> list[int]:
    """Slots in order, base-only rows last."""
    adapted = sorted(rng.randrange(3) for _ in range(min(num_adapted, count)))
    return adapted + [-1] * (count - len(adapted))


@torch.inference_mode()
def test_a_padded_step_is_the_step(steps: Steps) -> None:
    """Of every size, with many adapters, few and none."""
    rng = random.Random(1)
    graphs = GraphRunner(steps.limits, steps.ops, steps.compute)
    graphs.capture_all()
    for count in range(1, 20):
        for num_adapted in {0, 1, count}:
            rows = steps.begin(mixed(rng, count, num_adapted))
            run = graphs.prepare(rows, steps.shape(rows))
            assert run is not None
            steps.assert_same(rows, run)


@torch.inference_mode()
@pytest.mark.parametrize("first", [[0, 1, 2, -1, -1], [1], [-1, -1]])
def test_it_serves_other_adapters_than_it_was_made_with(steps: Steps, first: list[int]) -> None:
    """Fewer, more, none, and of other ranks; fewer rows and more."""
    graph = steps.graph(8)
    later = [[0, 1, 1, 2, 2, 2, -1], [-1], [0] * 8, [-1] * 8, [2], [0, 1, 2]]
    for slots in [first, *later]:
        rows = steps.begin(slots)
        steps.assert_same(rows, graph.prepare(rows))


@torch.inference_mode()
def test_a_capture_that_fails_is_tried_again_later_and_counted(steps: Steps) -> None:
    """Such as one that failed for a shortage of memory that has passed."""
    noting = Noting(steps)
    graphs = noting.noted(steps)
    few, many = steps.begin([-1]), steps.begin([0, 1, 2, -1])
    assert graphs.prepare(few, steps.shape(few)) is None
    graphs.capture_next()
    assert graphs.prepare(few, steps.shape(few)) is not None
    noting.fails_at = len(noting.captured)
    assert graphs.prepare(many, steps.shape(many)) is None
    graphs.capture_next()
    assert noting.num_failed == 1
    noting.fails_at = -1
    for _ in range(NUM_PAUSED):
        assert not graphs.can_capture
        assert graphs.prepare(many, steps.shape(many)) is None
        assert graphs.prepare(few, steps.shape(few)) is not None
    assert graphs.can_capture
    graphs.capture_next()
    assert graphs.prepare(many, steps.shape(many)) is not None
    assert noting.num_failed == 1


@torch.inference_mode()
def test_the_graph_that_a_step_lacked_is_captured_next(steps: Steps) -> None:
    """And without one, the largest that is missing."""
    noting = Noting(steps)
    graphs = noting.noted(steps)
    graphs.capture_next()
    for slots in ([0, 1, 2, -1], [-1] * 3, [0] * 10):
        rows = steps.begin(slots)
        assert graphs.prepare(rows, steps.shape(rows)) is None
        graphs.capture_next()
        assert graphs.prepare(rows, steps.shape(rows)) is not None
    graphs.capture_next()
    assert [size for size, _ in noting.forms] == [512, 4, 4, 16, 512]


@torch.inference_mode()
def test_a_padded_step_with_prompts_is_the_step(steps: Steps) -> None:
    """Prompts alone and beside sequences that generate, their last part or one before it."""
    rng = random.Random(2)
    graphs = GraphRunner(steps.limits, steps.ops, steps.compute)
    graphs.capture_all()
    for counts in (
        [2],
        [70],
        [1, 1, 90, 1],
        [3, 1, 4, 1, 5],
        [1] * 15 + [2, 60],
        [99, 29],
        [80] * 4,
    ):
        for num_adapted in {0, 1, len(counts)}:
            slots = mixed(rng, len(counts), num_adapted)
            rows = steps.begin(slots, longest=30, counts=counts)
            run = graphs.prepare(rows, steps.shape(rows))
            assert run is not None
            steps.assert_same(rows, run)


@pytest.mark.full
@torch.inference_mode()
@pytest.mark.skipif(not IS_INTERPRETED, reason="tests/workers/process/test_gpu_worker.py does it")
def test_triton_kernels_leave_padding_alone(tmp_path: Path) -> None:
    """Rows and segments."""
    steps = make_steps(tmp_path, "triton")
    with poisoned():
        graph = steps.graph(3)
        for slots in ([1, -1], [-1]):
            rows = steps.begin(slots, longest=5)
            steps.assert_same(rows, graph.prepare(rows))
        graph = steps.graph(16, num_sequences=4)
        for counts in ([1, 2, 10], [5]):
            rows = steps.begin([1, 0, -1][: len(counts)], longest=5, counts=counts)
            steps.assert_same(rows, graph.prepare(rows))


@torch.inference_mode()
def test_the_rank_bound_of_graphs_follows_the_adapters(steps: Steps) -> None:
    """It begins with the smallest, rises with the ranks of steps up to the largest that a worker
    serves, and does not fall. Until a graph is captured again, it serves the ranks that it fits."""
    noting = Noting(steps)
    graphs = noting.noted(steps, max_rank=256)
    few, many, plain = steps.begin([0] * 5), steps.begin([0, 1, 2]), steps.begin([-1] * 3)

    def is_served(rows: BatchInputs[Array], rank: int) -> bool:
        run = graphs.prepare(rows, replace(steps.shape(rows), max_rank=rank))
        if run is not None:
            steps.assert_same(rows, run)
        return run is not None

    def served(rank: int) -> list[bool]:
        """Whether steps of one adapter of that rank, and of three, run as graphs."""
        assert is_served(plain, 0)
        return [is_served(few, rank), is_served(many, rank)]

    num_graphs = graphs.capture_all()
    assert set(noting.ranks) == {16}
    assert served(16) == [True, True] and served(512) == [False, False]
    assert not graphs.can_capture, "for more than the worker serves"
    assert served(64) == [False, False] and served(16) == [True, True]
    noting.clear()
    graphs.capture_next()
    assert noting.forms == [(4, min(4, steps.limits.num_slots))], "the one that was lacked last"
    assert noting.ranks == [64]
    assert served(64) == [False, True] and served(16) == [True, True]
    assert served(256) == [False, False], "before all are captured for the bound before"
    noting.clear()
    assert graphs.capture_all() == num_graphs, "each in place of the one before"
    assert set(noting.ranks) == {256} and all(num_segments for _, num_segments in noting.forms)
    for rank in (256, 64, 16):
        assert served(rank) == [True, True]
    assert not graphs.can_capture


class Noting:
    """A backend that notes what it captures, and with how many tokens and adapters LoRA works."""

    def __init__(self, steps: Steps) -> None:
        self._ops = steps.ops
        self.captured: list[Tensor] = []
        self.forms: list[tuple[int, int]] = []
        self.ranks: list[int] = []
        self.fails_at = -1
        self.num_failed = 0

    def __getattr__(self, name: str) -> object:
        return getattr(self._ops, name)

    def capture(self, work: Callable[[], Tensor]) -> Callable[[], Tensor]:
        if len(self.captured) == self.fails_at:
            raise RuntimeError("operation not permitted when stream is capturing")
        # As CUDA does: once before it is captured.
        self.captured.append(work())
        return work

    def clear(self) -> None:
        self.forms.clear()
        self.ranks.clear()

    def noted(self, steps: Steps, max_rank: int = 16) -> GraphRunner:
        """A runner whose graphs note the number of tokens and of adapters, and the rank, that they
        are made for."""

        def compute(rows: BatchInputs[Tensor], shape: StepShape, out: Tensor) -> Tensor:
            self.forms.append((len(rows.positions), len(rows.segment_slot)))
            self.ranks.append(shape.max_rank)
            return steps.compute(rows, shape, out)

        limits = replace(steps.limits, max_rank=max_rank)
        return GraphRunner(limits, self, compute, self.count_failure)  # pyright: ignore

    def count_failure(self) -> None:
        self.num_failed += 1


def test_addresses_stay_and_large_steps_are_left(steps: Steps) -> None:
    noting = Noting(steps)
    graphs = noting.noted(steps)
    for slots in ([0, 1, -1], [0, 1, 2, -1], [2, -1, -1, -1], [-1] * 4, [-1] * 3, [1, 1, 1]):
        rows = steps.begin(slots)
        if graphs.prepare(rows, steps.shape(rows)) is None:
            graphs.capture_next()
        assert graphs.prepare(rows, steps.shape(rows)) is not None
    assert len(noting.captured) == 3, "with many adapters, with one, with none"
    assert graphs.prepare(rows, StepShape(1, 20, 2 * steps.max_rank)) is None, "a larger rank"
    large = rows._replace(positions=np.zeros(25, np.int32), last_tokens=np.zeros(25, np.int64))
    assert graphs.prepare(large, StepShape(1, 20, 0)) is None
    many = steps.begin([-1] * 25, longest=5, counts=[2] * 25)
    assert graphs.prepare(many, steps.shape(many)) is None
    long = rows._replace(positions=np.zeros(513, np.int32))
    assert graphs.prepare(long, StepShape(511, 20, 0)) is None


@torch.inference_mode()
def test_all_graphs_are_captured_before_the_first_step_the_largest_first(steps: Steps) -> None:
    noting = Noting(steps)
    graphs = noting.noted(steps)
    num_graphs = graphs.capture_all()
    assert num_graphs == len(noting.captured)
    sizes = [size for size, _ in noting.forms]
    assert sizes == sorted(sizes, reverse=True) and sizes[0] == 512
    buffers = {logits.data_ptr() for logits in noting.captured}
    assert len(buffers) == 1, "one buffer for the logits of all"
    rng = random.Random(4)
    for count in range(1, 21):
        rows = steps.begin(mixed(rng, count, rng.randrange(count + 1)))
        assert graphs.prepare(rows, steps.shape(rows)) is not None
        counts = [rng.randrange(1, 20) for _ in range(count)]
        rows = steps.begin(mixed(rng, count, rng.randrange(count + 1)), counts=counts)
        assert graphs.prepare(rows, steps.shape(rows)) is not None
    assert len(noting.captured) == num_graphs


@torch.inference_mode()
def test_a_graph_that_cannot_be_captured_leaves_steps_to_be_computed_op_by_op(
    steps: Steps, caplog: pytest.LogCaptureFixture
) -> None:
    noting = Noting(steps)
    noting.fails_at = 14
    graphs = noting.noted(steps)
    assert graphs.capture_all() == 14, "all with prompts, and two without"
    small = steps.begin([0, -1])
    assert graphs.prepare(small, steps.shape(small)) is None
    large = steps.begin([0] * 20)
    run = graphs.prepare(large, steps.shape(large))
    assert run is not None, "captured before"
    steps.assert_same(large, run)
    (said,) = [record.getMessage() for record in caplog.records]
    assert "run op by op" in said and "not permitted when stream is capturing" in said


@torch.inference_mode()
def test_a_step_of_few_adapters_works_by_adapter(steps: Steps) -> None:
    """As it would alone: 20 tokens of two adapters are two matrix products."""
    noting = Noting(steps)
    graphs = noting.noted(steps)
    for slots in ([0] * 10 + [1] * 10, [0] * 20, [0, 1, 2], [0, 0, 0, 1]):
        rows = steps.begin(slots)
        graphs.capture_all()
        run = graphs.prepare(rows, steps.shape(rows))
        assert run is not None
        noting.forms.clear()
        run()
        ((num_tokens, num_segments),) = noting.forms
        by_row = reads_by_row(len(slots), len(set(slots)))
        assert reads_by_row(num_tokens, num_segments) is by_row, slots


@pytest.mark.parametrize("num_slots", [1, 3, 128])
def test_padding_changes_no_form(num_slots: int) -> None:
    """With at most three graphs of a size, one of them without adapters."""
    for num_tokens in NUM_TOKENS:
        limits = Limits(256, 2048, MAX_LEN, num_slots, 16, VOCAB)
        sizes = [key.num_segments for key in generating_keys(num_tokens, limits)]
        assert len(sizes) <= 3 and sizes[0] == 0
        for count in range(1, min(num_tokens, num_slots) + 1):
            size = next(size for size in sizes if size >= count)
            assert reads_by_row(num_tokens, size) is reads_by_row(num_tokens, count)


def test_ranks_have_few_bounds() -> None:
    assert [rank_bound(rank) for rank in (0, 1, 16, 17, 64, 65, 256)] == [
        0,
        16,
        16,
        64,
        64,
        256,
        256,
    ]
    assert rank_bound(300) == 512
    assert rank_bounds(64) == [16, 64] and rank_bounds(65) == [16, 64, 256]
    assert rank_bounds(600) == [16, 64, 256, 512, 1024]


def test_the_buffers_of_graphs_are_as_large_as_is_reckoned_with() -> None:
    for limits in (Limits(1, 64, 40, 1, 8, 77), Limits(100, 2048, 4096, 8, 64, 500)):
        buffers = GraphBuffers(limits, torch.device("cpu"))
        held = (buffers.inputs, buffers.tables, buffers.logits)
        assert sum(tensor.nbytes for tensor in held) == limits.num_bytes


@torch.inference_mode()
def test_block_tables_go_to_the_device_as_wide_as_the_step_needs_them(steps: Steps) -> None:
    graph = steps.graph(4)
    graph.inputs.block_tables.fill_(77)
    for longest in (40, 90, 5):
        rows = steps.begin([0, 1, -1], longest)
        width = rows.block_tables.shape[1]
        graph.prepare(rows)
        got = graph.inputs.block_tables
        assert torch.equal(got[:3, :width], torch.from_numpy(rows.block_tables))
        assert int(got[3, 0]) == SCRATCH_PAGE
        if longest == 40:
            assert width < got.shape[1] and bool((got[:, width:] == 77).all())


def test_arrays_lie_side_by_side_in_one_buffer() -> None:
    arrays = [
        np.arange(5, dtype=np.int32),
        np.zeros(0, np.float32),
        np.arange(6, dtype=np.int64).reshape(2, 3),
        np.array([0.5], np.float32),
    ]
    packing = Packing(arrays)
    buffer = new_host_buffer(packing.num_bytes, torch.device("cpu"))
    for view, array in zip(packing.arrays(buffer), arrays, strict=True):
        view[...] = array
    for tensor, array in zip(packing.tensors(buffer), arrays, strict=True):
        assert torch.equal(tensor, torch.from_numpy(array))
        assert tensor.untyped_storage().data_ptr() == buffer.data_ptr()
    assert packing.num_bytes == 32 + 0 + 48 + 16


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Setup:
    return Setup(tmp_path_factory.mktemp("llama"), "llama", {"a": {"rank": 4}, "b": {"rank": 20}})


def test_a_worker_with_graphs_that_runs_ahead_answers_alike(llama: Setup) -> None:
    """The whole form that a GPU has, under preemption."""
    rng = random.Random(2)
    requests = [
        llama.generate(
            number,
            [rng.randrange(256) for _ in range(rng.randrange(1, 40))],
            60,
            rng.choice([None, *llama.refs.values()]),
        )
        for number in range(24)
    ]
    plain = played(llama, requests, runs_ahead=False, uses_graphs=False)
    form = played(llama, requests, runs_ahead=True, uses_graphs=True)
    assert form == plain


def played(llama: Setup, requests: list[Generate], **form: bool) -> dict[int, list[int]]:
    with Driver(llama.config(memory=12 << 16, **form)) as driver:
        driver.run(*requests)
    assert driver.worker.instances[llama.digest].engine.scheduler.num_preemptions > 0
    return driver.answers
