"""A decode step run as a graph, padded to fixed shapes at fixed addresses, computes what the step
alone computes, whatever step it was captured for. On the CPU a graph computes anew from the same
memory."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from adapters.pool.segments import build_segments
from ops.base import PAGE_TOKENS, KVCacheView
from ops.registry import select
from tests.doubles import make_adapter, make_model
from tests.ops.conftest import TRITON, triton_backend
from tests.workers.driver import Driver
from tests.workers.paged import PagedModel, Stream
from tests.workers.process.test_worker import Setup
from workers.execution.batch_builder import BatchInputs, StepShape, forward_batch
from workers.execution.graph_runner import SCRATCH_PAGE, GraphInputs, GraphRunner, Limits, StepGraph
from workers.execution.step_input import Array
from workers.execution.token_buffer import TokenBuffer
from workers.execution.upload import Packing, new_host_buffer, upload
from workers.models.decoder import Decoder
from workers.models.plan import ModelPlan
from workers.wire.protocol import Generate

VOCAB = 256
MAX_LEN = 128


class Steps:
    """Sequences whose prompts are computed, and what a step of one row each reads."""

    def __init__(self, folder: Path, adapters: list[Path], backend: str) -> None:
        ops = self.ops = triton_backend() if backend == "triton" else select(backend)
        # By how large a step can be, Triton splits sums.
        self.tolerance = 0.0 if backend == "cpu" else 1e-5
        self.paged = PagedModel(
            Decoder.load(ModelPlan.read(folder, "tiny", torch.float32), ops), ops, num_pages=192
        )
        for slot, adapter in enumerate(adapters):
            self.paged.load_adapter(slot, adapter)
        self.max_rank = int(self.paged.tables.rank.max())
        self.view = KVCacheView(self.paged.arena, self.paged.model.plan.kv_layout)
        self.buffer = TokenBuffer(32, MAX_LEN, torch.device("cpu"))
        num_slots = len(self.paged.tables.rank)
        self.limits = Limits(MAX_LEN // PAGE_TOKENS, MAX_LEN, num_slots)

    def begin(self, slots: list[int], longest: int = 40) -> BatchInputs[Array]:
        """New sequences with these adapters, and the inputs of their next step."""
        rng = random.Random(len(slots))
        count = len(slots)
        streams = [Stream(slot) for slot in slots]
        prompts = [[rng.randrange(VOCAB) for _ in range(rng.randrange(2, longest))] for _ in slots]
        work = zip(streams, prompts, strict=True)
        self.paged.step([(stream, prompt[:-1]) for stream, prompt in work])
        for stream, prompt in zip(streams, prompts, strict=True):
            while len(stream.pages) * PAGE_TOKENS < len(prompt):
                stream.pages.append(self.paged.free.pop())
        positions = np.array([stream.length for stream in streams], np.int32)
        tables = np.full((count, max(len(stream.pages) for stream in streams)), -(1 << 40))
        for row, stream in enumerate(streams):
            tables[row, : len(stream.pages)] = stream.pages
        segments = build_segments([(slot, 1) for slot in slots])
        rows = BatchInputs[Array](
            buffer_slots=np.array([self.buffer.allocate(tokens) for tokens in prompts], np.int64),
            buffer_positions=positions.astype(np.int64),
            query_start=np.arange(count + 1, dtype=np.int32),
            token_seq=np.arange(count, dtype=np.int32),
            positions=positions,
            context_lens=positions + 1,
            block_tables=tables,
            last_tokens=np.arange(count, dtype=np.int64),
            segment_start=np.zeros(1, np.int32) if segments is None else segments.start,
            segment_slot=np.zeros(0, np.int32) if segments is None else segments.slot,
        )
        for stream, row in zip(streams, rows.buffer_slots.tolist(), strict=True):
            self.paged.free += stream.pages
            self.buffer.free(row)
        return rows

    def shape(self, rows: BatchInputs[Array]) -> StepShape:
        max_rank = self.max_rank if len(rows.segment_slot) else 0
        return StepShape(1, int(rows.context_lens.max()), max_rank)

    def alone(self, rows: BatchInputs[Array]) -> Tensor:
        tensors = BatchInputs[Tensor](*upload([*rows], self.ops.device))
        return self.compute(tensors, self.shape(rows))

    def compute(self, rows: BatchInputs[Tensor], shape: StepShape) -> Tensor:
        batch = forward_batch(rows, shape, self.buffer, self.view, self.paged.tables)
        return self.paged.model.logits(self.paged.model.forward(batch))

    def assert_same(self, rows: BatchInputs[Array], run: Callable[[], Tensor]) -> None:
        """The logits, and every byte of the arena but those of the scratch page."""
        before = self.paged.arena.clone()
        expected = self.alone(rows)
        after = self.paged.arena.clone()
        self.paged.arena.copy_(before)
        torch.testing.assert_close(run(), expected, atol=self.tolerance, rtol=0)
        page = slice(SCRATCH_PAGE, SCRATCH_PAGE + self.view.layout.page_bytes)
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
        make_adapter(model, folder / f"r{rank}", rank=rank, alpha=16, seed=rank)
        for rank in (4, 8, 16)
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
    graphs = StepGraph(8, 16, steps.limits, steps.ops, steps.compute)
    later = [[0, 1, 1, 2, 2, 2, -1], [-1], [0] * 8, [-1] * 8, [2], [0, 1, 2]]
    for slots in [first, *later]:
        rows = steps.begin(slots)
        steps.assert_same(rows, graphs.prepare(rows))


@torch.inference_mode()
@pytest.mark.parametrize("backend", [TRITON])
def test_triton_kernels_leave_padding_alone(tmp_path: Path, backend: str) -> None:
    """Rows and segments."""
    steps = make_steps(tmp_path, backend)
    graphs = StepGraph(3, 16, steps.limits, steps.ops, steps.compute)
    for slots in ([1, -1], [-1]):
        rows = steps.begin(slots, longest=5)
        steps.assert_same(rows, graphs.prepare(rows))


def test_addresses_stay_and_prompts_and_large_steps_are_left(steps: Steps) -> None:
    captured: list[Callable[[], Tensor]] = []

    class Noting:
        """A backend that notes what it was given to capture."""

        def __getattr__(self, name: str) -> object:
            return getattr(steps.ops, name)

        def capture(self, work: Callable[[], Tensor]) -> Callable[[], Tensor]:
            captured.append(work)
            return work

    graphs = GraphRunner(steps.limits, Noting(), steps.compute)  # pyright: ignore
    for slots in ([0, 1, -1], [2, -1, -1, -1], [-1] * 4, [-1] * 3, [1, 1, 1]):
        rows = steps.begin(slots)
        assert graphs.prepare(rows, steps.shape(rows)) is not None
    assert len(captured) == 2, "one with adapters, one without"
    rows = steps.begin([-1])
    assert graphs.prepare(rows, StepShape(2, 20, 0)) is None
    large = rows._replace(positions=np.zeros(257, np.int32))
    assert graphs.prepare(large, StepShape(1, 20, 0)) is None


def test_block_tables_go_to_the_device_as_wide_as_the_step_needs_them(steps: Steps) -> None:
    graphs = GraphInputs(4, 4, steps.limits, torch.device("cpu"))
    graphs.tensors.block_tables.fill_(77)
    for longest in (40, 90, 5):
        rows = steps.begin([0, 1, -1], longest)
        width = rows.block_tables.shape[1]
        graphs.fill(rows)
        got = graphs.tensors.block_tables
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
        for request in requests:
            driver.submit(request)
        driver.wait()
    assert driver.worker.engines[llama.digest].scheduler.num_preemptions > 0
    return driver.answers
