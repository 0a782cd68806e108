"""Computation of one model's steps on one device, from `StepInput` to `StepOutput`."""

from __future__ import annotations

import logging
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from time import perf_counter_ns

import numpy as np
import torch
from torch import Tensor

from ops.base import (
    HEAD,
    AdapterTables,
    DeviceEvent,
    KVCacheView,
    LoRABatch,
    Ops,
)
from ops.copies import upload
from workers.execution.batch import (
    BatchInputs,
    StepShape,
    TokenBuffer,
    build_inputs,
    forward_batch,
)
from workers.execution.graph_runner import GraphRunner, Limits
from workers.execution.pooler import pool, read_vectors
from workers.execution.sampler import Sampler, SamplerInputs
from workers.execution.scores import SampleScores, Scores, score_prompts
from workers.execution.step_input import (
    Array,
    DeviceFailed,
    SequenceResult,
    StepInput,
    StepOutput,
)
from workers.execution.warm_up import every_form
from workers.layers.segments import build_segments
from workers.layers.table_rows import with_replaced, with_rows
from workers.models.loading import LoadedModel
from workers.wire.protocol import ErrorCode

log = logging.getLogger(__name__)


class ModelRunner:
    """Runner that computes the steps of one model on one device."""

    def __init__(
        self,
        model: LoadedModel,
        ops: Ops,
        arena: Tensor,
        buffer: TokenBuffer,
        tables: AdapterTables,
        *,
        graphs: Limits | None = None,
        on_failed_capture: Callable[[], object] = lambda: None,
    ) -> None:
        """arena: device memory, uint8. No sequence uses its first page. graphs: maximum sizes of
        steps that run as captured graphs (`GraphRunner`), or None for no graphs."""
        self.model = model
        self.ops = ops
        self._view = KVCacheView(arena, model.plan.kv_layout)
        self._buffer = buffer
        self._tables = tables
        self._sampler = Sampler(ops, buffer)
        self._graphs = None
        if graphs is not None:
            parts = model, buffer, self._view, tables
            self._graphs = GraphRunner.of(graphs, ops, *parts, on_failure=on_failed_capture)

    @torch.inference_mode()
    def warm_up(self, max_rank: int, max_tokens: int) -> int:
        """Compiles every form of the kernels that steps of up to `max_tokens` tokens use, with
        adapters up to `max_rank`, and captures the steps' graphs. Returns the number of graphs.
        Called while no sequence runs. Errors of a step are raised."""
        begin = perf_counter_ns()
        self.model.arrival.synchronize()
        if self.ops.compiles:
            for step in every_form(self.model.plan.max_model_len, max_tokens, max_rank):
                self._launch(step, may_use_graph=False).result()
        num_graphs = 0 if self._graphs is None else self._graphs.capture_all(max_rank)
        log.info(
            "%d kernels compiled or read, %d graphs captured in %.1f s",
            *(self.ops.num_compiled, num_graphs, (perf_counter_ns() - begin) / 1e9),
        )
        return num_graphs

    @torch.inference_mode()
    def launch(self, step: StepInput) -> LaunchedStep:
        """Submits a step: computes its tokens, draws its samples, scores its prompts and pools
        their hidden states. Blocks only while a graph is captured, and after a failure."""
        try:
            return self._launch(step)
        except Exception:
            # Kernels submitted before the failure may still write into the step's pages.
            with _waiting():
                self.ops.record_event().synchronize()
            raise

    def _launch(self, step: StepInput, *, may_use_graph: bool = True) -> LaunchedStep:
        begin = perf_counter_ns()
        inputs, shape = build_inputs(step)
        graph = self._prepare_graph(step, inputs, shape) if may_use_graph else None
        tensors = [] if graph else upload([*inputs], self.ops.device)
        sampling = self._sampler.upload(step)
        built = perf_counter_ns()
        if graph:
            logits, prompts, pooled = graph(), [], None
        else:
            on_device = BatchInputs(*tensors)
            logits, prompts, pooled = self._compute(step, inputs, on_device, shape, sampling)
        computed = perf_counter_ns()
        tokens, scores = None, None
        if logits is not None:
            tokens, scores = self._sampler.draw(logits, sampling)
        return LaunchedStep(
            step,
            tokens,
            scores,
            prompts,
            pooled,
            self.ops.record_event(),
            build_us=(built - begin) // 1000,
            forward_us=(computed - built) // 1000,
            sample_us=(perf_counter_ns() - computed) // 1000,
        )

    def _prepare_graph(
        self, step: StepInput, inputs: BatchInputs[Array], shape: StepShape
    ) -> Callable[[], Tensor] | None:
        """Returns a function that computes the logits with a graph. Returns None if the step must
        be computed op by op, for example because it needs more than the logits of samples."""
        if self._graphs is None or not step.samples or step.scores or step.pools:
            return None
        if not self.model.arrival.is_complete or self._tables.replaces_rows(inputs.segment_slot):
            return None
        return self._graphs.prepare(inputs, shape)

    def _compute(
        self,
        step: StepInput,
        on_host: BatchInputs[Array],
        inputs: BatchInputs[Tensor],
        shape: StepShape,
        sampling: SamplerInputs,
    ) -> tuple[Tensor | None, list[Scores], tuple[Tensor, Tensor] | None]:
        """Returns the logits [N, V] of the samples, scores of prompts and pooled vectors."""
        batch = forward_batch(inputs, shape, self._buffer, self._view, self._tables)
        starts = on_host.segment_start, on_host.sampled_start
        batch = with_rows(batch, *starts, on_host.segment_slot)
        hidden = self.model.forward(batch)
        head = partial(self._logits, shape.max_rank)
        prompts = score_prompts(self.ops, step, sampling.targets, hidden, head)
        logits = None
        if step.samples:
            logits = self.model.logits(hidden[inputs.last_tokens], lora=batch.sample_lora)
        pooled = pool(step, hidden, head) if step.pools else None
        return logits, prompts, pooled

    def _logits(self, max_rank: int, hidden: Tensor, slots: Array) -> Tensor:
        """Computes logits, as a `Head`. max_rank: upper bound of the adapters' ranks."""
        segments = build_segments([(slot, 1) for slot in slots.tolist()])
        if not len(segments[1]):
            return self.model.logits(hidden)
        start, slot = upload(segments, self.ops.device)
        arena, dtype = self._view.arena, self._view.layout.dtype
        lora = LoRABatch(arena, dtype, self._tables, start, slot, max_rank)
        return self.model.logits(hidden, lora=with_replaced(lora, HEAD, *segments))


@dataclass(frozen=True, slots=True)
class LaunchedStep:
    """Submitted step. Its tensors are valid when the event is done."""

    step: StepInput
    tokens: Tensor | None
    scores: SampleScores | None
    prompts: list[Scores]
    pooled: tuple[Tensor, Tensor] | None
    event: DeviceEvent
    build_us: int
    forward_us: int
    sample_us: int

    def result(self) -> StepOutput:
        begin = perf_counter_ns()
        with _waiting():
            self.event.synchronize()
        results = [SequenceResult() for _ in range(len(self.step.counts))]
        if self.tokens is not None:
            logprobs = iter([] if self.scores is None else self.scores.read())
            for sample, token in zip(self.step.samples, self.tokens.tolist(), strict=True):
                result = results[sample.sequence]
                if sample.params.logprobs is not None:
                    result.logprobs = [next(logprobs)]
                if token < 0:
                    result.error = ErrorCode.LOGITS_NAN
                else:
                    result.tokens.append(token)
        for score, scores in zip(self.step.scores, self.prompts, strict=True):
            results[score.sequence].prompt_logprobs = scores.read()
        if self.pooled is not None:
            vectors = read_vectors(self.step.pools, self.pooled)
            for asked, vector in zip(self.step.pools, vectors, strict=True):
                result = results[asked.sequence]
                if np.isfinite(vector).all():
                    result.vector = vector
                else:
                    result.error = ErrorCode.LOGITS_NAN
        return StepOutput(
            results,
            build_us=self.build_us,
            forward_us=self.forward_us,
            sample_us=self.sample_us + (perf_counter_ns() - begin) // 1000,
        )


@contextmanager
def _waiting() -> Generator[None]:
    """Context that raises DeviceFailed if waiting for the device in it fails."""
    try:
        yield
    except Exception as error:
        raise DeviceFailed(f"the device cannot be waited for: {error}") from error
