"""From a schedule to tokens: builds the batch, runs the model, samples. Owns no request state."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from time import perf_counter_ns
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from adapters.pool.tiers import AdapterLease
from memory.kv_cache import KVCache
from ops.base import (
    PAGE_TOKENS,
    AdapterTables,
    KVCacheView,
    LoRABatch,
    Mark,
    Ops,
    SamplingBatch,
    Site,
)
from workers.execution.batch_builder import (
    Extent,
    RowInputs,
    build_rows,
    build_sampling,
    forward_batch,
    sampling_batch,
)
from workers.execution.graph_runner import Limits, StaticSteps
from workers.execution.token_buffer import TokenBuffer
from workers.execution.upload import Array, upload
from workers.models.decoder import Decoder
from workers.scheduling.schedule import Schedule, ScheduledSequence, StepResult
from workers.wire.protocol import TokenLogprobs


class ModelRunner:
    """One model on one device."""

    def __init__(
        self,
        model: Decoder,
        ops: Ops,
        arena: Tensor,
        kv: KVCache,
        buffer: TokenBuffer,
        tables: AdapterTables,
        *,
        replays_steps: bool = False,
    ) -> None:
        """arena: uint8, the device's memory. replays_steps: those in which all sequences generate
        are padded and replayed (`StaticSteps`); the first page is then no sequence's."""
        self.model = model
        self._ops = ops
        self._kv = kv
        self._view = KVCacheView(arena, model.plan.kv_layout)
        self._buffer = buffer
        self._tables = tables
        self._static_steps: StaticSteps | None = None
        if replays_steps:
            max_len = model.plan.max_model_len
            num_pages, num_slots = -(-max_len // PAGE_TOKENS), len(tables.rank)
            limits = Limits(num_pages, max_len, num_slots)
            self._static_steps = StaticSteps(limits, ops, self._logits)

    @torch.inference_mode()
    def launch(self, schedule: Schedule) -> LaunchedStep:
        """Computes every scheduled row and draws a token for each sequence in `schedule.sampled`.
        Does not wait for the device, but where a replay is captured."""
        begin = perf_counter_ns()
        rows, extent = build_rows(schedule, self._kv)
        sampled = schedule.sampled
        columns = build_sampling(sampled)
        replay = self._prepare_replay(schedule, rows, extent)
        inputs = [*columns.values()] if replay else [*columns.values(), *rows]
        tensors = upload(inputs, self._ops.device)
        on_device = dict(zip(columns, tensors, strict=False))
        built = perf_counter_ns()
        if replay:
            logits, prompts = replay(), []
        else:
            logits, prompts = self._compute(schedule, RowInputs(*tensors[len(columns) :]), extent)
        computed = perf_counter_ns()
        tokens, scores = None, None
        if logits is not None:
            sampling = sampling_batch(sampled, on_device, self._buffer)
            tokens, scores = self._sample(sampled, logits, sampling)
        return LaunchedStep(
            sampled,
            tokens,
            scores,
            prompts,
            self._ops.mark(),
            build_us=(built - begin) // 1000,
            forward_us=(computed - built) // 1000,
            sample_us=(perf_counter_ns() - computed) // 1000,
        )

    @torch.inference_mode()
    def lora_deltas(
        self, lease: AdapterLease, layer: int, inputs: list[tuple[Site, Tensor]]
    ) -> list[Tensor]:
        """What the leased adapter adds at sites of the layer, by the op and tables of `launch`.

        Shape: x [T, in] of each site, the same T -> y [T, sum(site.widths)], on the CPU. DType:
        activation in, float32 out.
        """
        device, dtype = self._ops.device, self._view.layout.dtype
        num_rows = len(inputs[0][1])
        lora = LoRABatch(
            arena=self._view.arena,
            dtype=dtype,
            tables=self._tables,
            segment_start=torch.tensor([0, num_rows], dtype=torch.int32, device=device),
            segment_slot=torch.tensor([lease.slot], dtype=torch.int32, device=device),
            max_rank=lease.max_rank,
        )
        deltas: list[Tensor] = []
        for site, x in inputs:
            x = x.to(device, self._ops.activation_dtype(dtype))
            y = torch.zeros(num_rows, sum(site.widths), dtype=x.dtype, device=device)
            self._ops.add_lora(y, x, site, layer, lora)
            deltas.append(y.float().cpu())
        return deltas

    def _prepare_replay(
        self, schedule: Schedule, rows: RowInputs[Array], extent: Extent
    ) -> Callable[[], Tensor] | None:
        """None where the step is computed as it comes."""
        if self._static_steps is None or any(item.is_prefill for item in schedule.items):
            return None
        if not self.model.arrival.is_complete:
            return None
        return self._static_steps.prepare(rows, extent)

    def _logits(self, rows: RowInputs[Tensor], extent: Extent) -> Tensor:
        """Of all rows."""
        batch = forward_batch(rows, extent, self._buffer, self._view, self._tables)
        return self.model.logits(self.model.forward(batch))

    def _compute(
        self, schedule: Schedule, rows: RowInputs[Tensor], extent: Extent
    ) -> tuple[Tensor | None, list[tuple[ScheduledSequence, Scores]]]:
        """Logits [N, V] of the rows that are sampled from, and scores of prompts."""
        batch = forward_batch(rows, extent, self._buffer, self._view, self._tables)
        hidden = self.model.forward(batch)
        prompts = self._score_prompts(schedule, hidden)
        logits = self.model.logits(hidden[rows.last_rows]) if len(rows.last_rows) else None
        return logits, prompts

    def _sample(
        self, items: list[ScheduledSequence], logits: Tensor, sampling: SamplingBatch
    ) -> tuple[Tensor, Scores | None]:
        """Tokens on their way to the host; the next step finds them in the token buffer."""
        params = [item.sequence.params for item in items]
        wanted = [p.logprobs for p in params if p.logprobs is not None]
        raw = logits.clone() if wanted else logits
        drawn = self._ops.sample(logits, sampling)
        # The next step may be launched before the host sees which row has none.
        tokens = drawn.clamp_min(0)
        self._buffer.scatter(sampling.buffer_row, sampling.position, tokens)
        scores = self._score(raw, tokens, max(wanted)) if wanted else None
        return _to_host(drawn), scores

    def _score_prompts(
        self, schedule: Schedule, hidden: Tensor
    ) -> list[tuple[ScheduledSequence, Scores]]:
        scored: list[tuple[ScheduledSequence, Scores]] = []
        first_row = 0
        for item in schedule.items:
            num_top = item.sequence.params.prompt_logprobs
            if num_top is not None and (targets := _prompt_targets(item)):
                logits = self.model.logits(hidden[first_row : first_row + len(targets)])
                (tokens,) = upload([np.array(targets, np.int32)], hidden.device)
                scored.append((item, self._score(logits, tokens, num_top)))
            first_row += item.num_tokens
        return scored

    def _score(self, logits: Tensor, tokens: Tensor, num_top: int) -> Scores:
        return Scores(*map(_to_host, (tokens, *self._ops.log_softmax_top(logits, tokens, num_top))))


class Scores(NamedTuple):
    """Log-probabilities of tokens and of the likeliest at their places, on their way to the host:
    tokens, chosen [N]; top_ids, top_values [N, num_top]."""

    tokens: Tensor
    chosen: Tensor
    top_ids: Tensor
    top_values: Tensor

    def read(self) -> list[TokenLogprobs]:
        columns = (tensor.tolist() for tensor in self)
        return [
            TokenLogprobs(token, logprob, list(zip(ids, values, strict=True)))
            for token, logprob, ids, values in zip(*columns, strict=True)
        ]


@dataclass(frozen=True, slots=True)
class LaunchedStep:
    """What is on its way to the host is there when the mark is passed."""

    sampled: list[ScheduledSequence]
    tokens: Tensor | None
    scores: Scores | None
    prompts: list[tuple[ScheduledSequence, Scores]]
    mark: Mark
    build_us: int
    forward_us: int
    sample_us: int

    def result(self) -> StepResult:
        begin = perf_counter_ns()
        self.mark.synchronize()
        result = StepResult(build_us=self.build_us, forward_us=self.forward_us)
        if self.tokens is not None:
            result.tokens = self.tokens.tolist()
            result.logprobs = [None] * len(result.tokens)
        if self.scores is not None:
            scored = self.scores.read()
            for index, item in enumerate(self.sampled):
                if (num_top := item.sequence.params.logprobs) is not None:
                    result.logprobs[index] = _trim(scored[index], num_top)
        for item, scores in self.prompts:
            result.prompt_logprobs[item.sequence.key] = scores.read()
        result.sample_us = self.sample_us + (perf_counter_ns() - begin) // 1000
        return result


def _to_host(tensor: Tensor) -> Tensor:
    """Behind what the device has to do by now, without waiting for it."""
    return tensor.to("cpu", non_blocking=True)


def _prompt_targets(item: ScheduledSequence) -> list[int]:
    """The prompt tokens that this chunk's rows predict."""
    first = item.start + 1
    last = min(first + item.num_tokens, item.sequence.num_prompt)
    return item.sequence.tokens[first:last]


def _trim(scored: TokenLogprobs, num_top: int) -> TokenLogprobs:
    return TokenLogprobs(scored.token, scored.logprob, scored.top[:num_top])
