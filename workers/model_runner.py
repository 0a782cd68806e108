"""From a schedule to tokens: builds the batch, runs the model, samples. Owns no request state."""

from __future__ import annotations

from time import perf_counter_ns

import torch
from torch import Tensor

from adapters.residency import AdapterLease
from memory.kv_cache import KVCache
from ops.base import AdapterTables, KVCacheView, LoRABatch, Ops, Site
from workers.batch_builder import build_forward_batch, build_sampling_batch
from workers.models.decoder import Decoder
from workers.protocol import TokenLogprobs
from workers.sequence import Sequence
from workers.step import Schedule, ScheduledSequence, StepResult
from workers.token_buffer import TokenBuffer


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
    ) -> None:
        self.model = model
        self._ops = ops
        self._kv = kv
        self._view = KVCacheView(arena, model.plan.kv_layout)
        self._buffer = buffer
        self._tables = tables

    @torch.inference_mode()
    def run(self, schedule: Schedule) -> StepResult:
        """Computes every scheduled row and draws a token for each sequence in
        `schedule.sampled`."""
        result = StepResult()
        begin = perf_counter_ns()
        batch = build_forward_batch(schedule, self._buffer, self._kv, self._view, self._tables)
        built = perf_counter_ns()
        hidden = self.model.forward(batch)
        self._score_prompts(schedule, hidden, result)
        sampled = schedule.sampled
        last_rows = torch.tensor(schedule.last_rows, dtype=torch.int64, device=hidden.device)
        logits = self.model.logits(hidden[last_rows]) if sampled else None
        self._ops.synchronize()
        computed = perf_counter_ns()
        if logits is not None:
            self._sample([item.sequence for item in sampled], logits, result)
        result.build_us = (built - begin) // 1000
        result.forward_us = (computed - built) // 1000
        result.sample_us = (perf_counter_ns() - computed) // 1000
        return result

    @torch.inference_mode()
    def lora_deltas(
        self, lease: AdapterLease, layer: int, inputs: list[tuple[Site, Tensor]]
    ) -> list[Tensor]:
        """What the leased adapter adds at sites of the layer, by the op and tables of `run`.

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

    def _sample(self, sequences: list[Sequence], logits: Tensor, result: StepResult) -> None:
        wanted = [s.params.logprobs for s in sequences if s.params.logprobs is not None]
        raw = logits.clone() if wanted else logits
        sampling = build_sampling_batch(sequences, self._buffer, logits.device)
        tokens = self._ops.sample(logits, sampling)
        self._buffer.scatter(sampling.buffer_row, sampling.position, tokens)
        result.tokens = tokens.tolist()
        result.logprobs = [None] * len(sequences)
        if wanted:
            scored = self._logprobs(raw, tokens, max(wanted))
            for index, sequence in enumerate(sequences):
                if (num_top := sequence.params.logprobs) is not None:
                    result.logprobs[index] = _trim(scored[index], num_top)

    def _score_prompts(self, schedule: Schedule, hidden: Tensor, result: StepResult) -> None:
        first_row = 0
        for item in schedule.items:
            sequence = item.sequence
            num_top = sequence.params.prompt_logprobs
            if num_top is not None and (targets := _prompt_targets(item)):
                logits = self.model.logits(hidden[first_row : first_row + len(targets)])
                tokens = torch.tensor(targets, dtype=torch.int32, device=hidden.device)
                result.prompt_logprobs[sequence.key] = self._logprobs(logits, tokens, num_top)
            first_row += item.num_tokens

    def _logprobs(self, logits: Tensor, tokens: Tensor, num_top: int) -> list[TokenLogprobs]:
        chosen, top_ids, top_values = self._ops.log_softmax_top(logits, tokens, num_top)
        return [
            TokenLogprobs(token, logprob, list(zip(ids, values, strict=True)))
            for token, logprob, ids, values in zip(
                tokens.tolist(), chosen.tolist(), top_ids.tolist(), top_values.tolist(), strict=True
            )
        ]


def _prompt_targets(item: ScheduledSequence) -> list[int]:
    """The prompt tokens that this chunk's rows predict."""
    first = item.sequence.num_computed + 1
    last = min(first + item.num_tokens, item.sequence.num_prompt)
    return item.sequence.tokens[first:last]


def _trim(scored: TokenLogprobs, num_top: int) -> TokenLogprobs:
    return TokenLogprobs(scored.token, scored.logprob, scored.top[:num_top])
