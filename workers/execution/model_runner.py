"""Computation of one model's steps on one device, from `StepInput` to `StepOutput`."""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from time import perf_counter_ns
from typing import Protocol

import torch
from torch import Tensor

from ops.base import HEAD, DeviceEvent, LoRABatch, Ops
from ops.copies import upload
from workers.execution.batch import BatchInputs, ModelBuffers, StepShape, build_inputs
from workers.execution.pooler import pool
from workers.execution.sampler import Sampler
from workers.execution.scores import score_prompts
from workers.execution.step_input import Array, DeviceFailed, SequenceResult, StepInput, StepOutput
from workers.layers.segments import build_segments
from workers.layers.table_rows import with_replaced, with_rows
from workers.models.loading import LoadedModel

Reader = Callable[[list[SequenceResult]], None]
"""Function that adds results, once they are on the host, to the `SequenceResult`s of a step."""


class Graphs(Protocol):
    """Captured graphs of a model's small steps, implemented by `GraphRunner`."""

    @property
    def can_capture(self) -> bool:
        """Whether a graph is missing and no capture has failed recently."""
        ...

    def capture_next(self) -> None:
        """Captures one graph. Called between two steps, when the weights are on the device."""
        ...

    def capture_all(self) -> int:
        """Captures all graphs, up to the first failure. Returns their number."""
        ...

    def prepare(self, inputs: BatchInputs[Array], shape: StepShape) -> Callable[[], Tensor] | None:
        """Uploads the inputs of a step. Returns a function that computes the logits of its last
        tokens, float32 [N, V], which are valid until the next step. Returns None if no captured
        graph fits the step."""
        ...


class ModelRunner:
    """Runner that computes the steps of one model on one device."""

    def __init__(
        self,
        model: LoadedModel,
        ops: Ops,
        buffers: ModelBuffers,
        graphs: Graphs | None = None,
        unnamed_ids: Sequence[int] = (),
    ) -> None:
        """graphs: captured graphs of small steps, or None if every step is computed op by op.
        unnamed_ids: ids without a token, which are not drawn."""
        self.model = model
        self.ops = ops
        self.graphs = graphs
        self._layout = model.plan.kv_layout
        self._buffers = buffers
        self._sampler = Sampler(ops, buffers.tokens, unnamed_ids)

    @torch.inference_mode()
    def launch(self, step: StepInput, *, may_use_graph: bool = True) -> LaunchedStep:
        """Submits a step: applies its commands, computes its tokens, draws its samples, scores its
        prompts and pools their hidden states. Blocks only after a failure."""
        try:
            return self._launch(step, may_use_graph)
        except Exception:
            # Kernels submitted before the failure may still write into the step's pages.
            with _waiting():
                self.ops.record_event().synchronize()
            raise

    def _launch(self, step: StepInput, may_use_graph: bool) -> LaunchedStep:
        begin = perf_counter_ns()
        for command in step.commands:
            self._buffers.apply(command)
        inputs, shape = build_inputs(step)
        graph = self._prepare_graph(step, inputs, shape) if may_use_graph else None
        tensors = [] if graph else upload([*inputs], self.ops.device)
        sampling = self._sampler.upload(step)
        built = perf_counter_ns()
        readers: list[Reader] = []
        if graph:
            logits = graph()
        else:
            on_device = BatchInputs(*tensors)
            logits = self._compute(step, inputs, on_device, shape, sampling.targets, readers)
        computed = perf_counter_ns()
        if logits is not None:
            readers.append(self._sampler.draw(logits, sampling).read_into)
        output = StepOutput(
            [SequenceResult() for _ in range(len(step.counts))],
            build_us=(built - begin) // 1000,
            forward_us=(computed - built) // 1000,
            sample_us=(perf_counter_ns() - computed) // 1000,
        )
        return LaunchedStep(output, readers, self.ops.record_event())

    def _prepare_graph(
        self, step: StepInput, inputs: BatchInputs[Array], shape: StepShape
    ) -> Callable[[], Tensor] | None:
        """Returns a function that computes the logits with a graph. Returns None if the step must
        be computed op by op, for example because it scores a prompt or samples no token."""
        if self.graphs is None or not step.samples or step.scores or step.pools:
            return None
        tables = self._buffers.tables
        if not self.model.arrival.is_complete or tables.replaces_rows(inputs.segment_slot):
            return None
        return self.graphs.prepare(inputs, shape)

    def _compute(
        self,
        step: StepInput,
        on_host: BatchInputs[Array],
        inputs: BatchInputs[Tensor],
        shape: StepShape,
        targets: list[Tensor],
        readers: list[Reader],
    ) -> Tensor | None:
        """Returns the samples' logits [N, V], or None without samples. Adds readers of prompt
        scores and pooled vectors to `readers`. targets: target tokens of each `ScoreInput`."""
        batch = self._buffers.forward_batch(inputs, shape, self._layout)
        starts = on_host.segment_start, on_host.sampled_start
        batch = with_rows(batch, *starts, on_host.segment_slot)
        hidden = self.model.forward(batch)
        head = partial(self._logits, shape.max_rank)
        if step.scores:
            readers.append(score_prompts(self.ops, step, targets, hidden, head).read_into)
        logits = None
        if step.samples:
            logits = self.model.logits(hidden[inputs.last_tokens], lora=batch.sample_lora)
        if step.pools:
            readers.append(pool(step, hidden, head).read_into)
        return logits

    def _logits(self, max_rank: int, hidden: Tensor, slots: Array) -> Tensor:
        """Returns logits (see `Head`). max_rank: upper bound of the adapters' ranks."""
        segments = build_segments([(slot, 1) for slot in slots.tolist()])
        if not len(segments[1]):
            return self.model.logits(hidden)
        start, slot = upload(segments, self.ops.device)
        arena, tables = self._buffers.arena, self._buffers.tables
        lora = LoRABatch(arena, self._layout.dtype, tables, start, slot, max_rank)
        return self.model.logits(hidden, lora=with_replaced(lora, HEAD, *segments))


@dataclass(frozen=True, slots=True)
class LaunchedStep:
    """Submitted step. `readers` complete `output` once the device has reached `event`."""

    output: StepOutput
    readers: list[Reader]
    event: DeviceEvent

    def result(self) -> StepOutput:
        begin = perf_counter_ns()
        with _waiting():
            self.event.synchronize()
        for read_into in self.readers:
            read_into(self.output.sequences)
        self.output.sample_us += (perf_counter_ns() - begin) // 1000
        return self.output


@contextmanager
def _waiting() -> Generator[None]:
    """Context for waiting for the device. Raises DeviceFailed if the wait fails."""
    try:
        yield
    except Exception as error:
        raise DeviceFailed(f"the device cannot be waited for: {error}") from error
