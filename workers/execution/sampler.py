"""From logits to tokens and log-probabilities."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from ops.base import Ops, SamplingBatch
from workers.execution.step_input import Array, SampleInput, StepInput
from workers.execution.token_buffer import TokenBuffer
from workers.execution.upload import upload
from workers.wire.protocol import TokenLogprobs

MIN_TEMPERATURE = 1e-6
"""Logits that are divided by much less overflow. Below it only the likeliest token is drawn, which
is all that could be."""


@dataclass(frozen=True, slots=True)
class SamplerInputs:
    """A step's samples and scores on the device.

    scored int64 [M]     the samples whose log-probabilities are asked for
    masked int64 [K], masks int32 [K, ceil(V / 32)]   the samples that have a mask, and the masks
    targets              for each `ScoreInput` its targets, int32
    """

    batch: SamplingBatch
    scored: Tensor
    num_top: int
    masked: Tensor
    masks: Tensor | None
    targets: list[Tensor]


class Scores(NamedTuple):
    """Log-probabilities of tokens, and of the likeliest ones at their places: tokens, chosen [N];
    top_ids, top_values [N, num_top]."""

    tokens: Tensor
    chosen: Tensor
    top_ids: Tensor
    top_values: Tensor

    def read(self) -> list[TokenLogprobs]:
        """Once they are on the host."""
        columns = (tensor.tolist() for tensor in self)
        return [
            TokenLogprobs(token, logprob, list(zip(ids, values, strict=True)))
            for token, logprob, ids, values in zip(*columns, strict=True)
        ]


class Sampler:
    """Draws tokens and scores them. Drawn tokens are written to the token buffer, where the next
    step reads them; results are copied to the host without waiting for the device."""

    def __init__(self, ops: Ops, buffer: TokenBuffer) -> None:
        self._ops = ops
        self._buffer = buffer

    def upload(self, step: StepInput) -> SamplerInputs:
        """Builds what the step's samples and scores need and copies it to the device at once."""
        samples = step.samples
        columns = _columns(step)
        scored = [i for i, sample in enumerate(samples) if sample.params.logprobs is not None]
        masked = [i for i, sample in enumerate(samples) if sample.mask is not None]
        arrays = [
            *columns.values(),
            np.array(scored, np.int64),
            np.array(masked, np.int64),
            *(np.array(score.targets, np.int32) for score in step.scores),
            *([np.stack([s.mask for s in samples if s.mask is not None])] if masked else []),
        ]
        tensors = upload(arrays, self._ops.device)
        first = len(columns)
        targets = tensors[first + 2 : first + 2 + len(step.scores)]
        batch = SamplingBatch(
            **dict(zip(columns, tensors[:first], strict=True)),
            token_buffer=self._buffer.tokens,
            all_greedy=not columns["temperature"].any(),
            has_penalties=any(map(_has_penalties, samples)),
            has_bias=len(columns["bias_ids"]) > 0,
        )
        return SamplerInputs(
            batch,
            scored=tensors[first],
            num_top=max((samples[i].params.logprobs or 0 for i in scored), default=0),
            masked=tensors[first + 1],
            masks=tensors[-1] if masked else None,
            targets=targets,
        )

    def draw(self, logits: Tensor, inputs: SamplerInputs) -> tuple[Tensor, Scores | None]:
        """Tokens int32 [N], -1 where a logit is NaN, and the scores of those in `inputs.scored`.

        logits: float32 [N, V] of the samples; they may be changed.
        """
        batch = inputs.batch
        raw = logits[inputs.scored] if len(inputs.scored) else None
        if inputs.masks is not None:
            logits[inputs.masked] = _masked(logits[inputs.masked], inputs.masks)
        drawn = self._ops.sample(logits, batch)
        # The next step may be launched before the host sees which sample has no token.
        tokens = drawn.clamp_min(0)
        self._buffer.tokens[batch.buffer_slot, batch.position] = tokens
        scores = None
        if raw is not None:
            scores = self._score(raw, tokens[inputs.scored], inputs.num_top)
        return _to_host(drawn), scores

    def score_prompts(
        self,
        step: StepInput,
        inputs: SamplerInputs,
        hidden: Tensor,
        head: Callable[[Tensor], Tensor],
    ) -> list[Scores]:
        """Scores of each `ScoreInput`. Logits are computed for one sequence at a time.

        hidden [T, K]: of the step's tokens. head: hidden [n, K] -> logits float32 [n, V].
        """
        scored: list[Scores] = []
        first_tokens = (step.counts.cumsum() - step.counts).tolist()
        for score, targets in zip(step.scores, inputs.targets, strict=True):
            first = first_tokens[score.sequence]
            logits = head(hidden[first : first + len(targets)])
            scored.append(self._score(logits, targets, score.num_top))
        return scored

    def _score(self, logits: Tensor, tokens: Tensor, num_top: int) -> Scores:
        return Scores(*map(_to_host, (tokens, *self._ops.log_softmax_top(logits, tokens, num_top))))


def _columns(step: StepInput) -> dict[str, Array]:
    """The columns of a `SamplingBatch`, one entry a sample."""
    samples = step.samples
    params = [sample.params for sample in samples]
    biases = [_bias(sample) for sample in samples]
    bias_start = np.zeros(len(samples) + 1, np.int32)
    np.cumsum([len(bias) for bias in biases], out=bias_start[1:])

    def column(values: list[float] | list[int], dtype: type[Any]) -> Array:
        return np.array(values, dtype)

    temperatures = [p.temperature if p.temperature >= MIN_TEMPERATURE else 0.0 for p in params]
    positions = column([sample.position for sample in samples], np.int64)
    return {
        "temperature": column(temperatures, np.float32),
        "top_k": column([p.top_k for p in params], np.int32),
        "top_p": column([p.top_p for p in params], np.float32),
        "min_p": column([p.min_p for p in params], np.float32),
        "seed": column([p.seed for p in params], np.int64),
        "position": positions,
        "choice": column([p.choice for p in params], np.int64),
        "presence": column([p.presence_penalty for p in params], np.float32),
        "frequency": column([p.frequency_penalty for p in params], np.float32),
        "repetition": column([p.repetition_penalty for p in params], np.float32),
        "buffer_slot": step.sequence_slots[[s.sequence for s in samples]].astype(np.int32),
        "prompt_len": column([sample.num_prompt for sample in samples], np.int32),
        "total_len": positions.astype(np.int32),
        "bias_start": bias_start,
        "bias_ids": column([token for bias in biases for token in bias], np.int32),
        "bias_values": column([value for bias in biases for value in bias.values()], np.float32),
    }


def _bias(sample: SampleInput) -> dict[int, float]:
    bias = sample.params.logit_bias or {}
    if sample.banned:
        return {**bias, **dict.fromkeys(sample.banned, float("-inf"))}
    return bias


def _has_penalties(sample: SampleInput) -> bool:
    p = sample.params
    return bool(p.presence_penalty or p.frequency_penalty or p.repetition_penalty != 1)


def _masked(logits: Tensor, masks: Tensor) -> Tensor:
    """The logits [K, V], with -inf for each token whose bit in `masks` is not set."""
    bits = torch.arange(32, dtype=torch.int32, device=masks.device)
    is_allowed = (masks.unsqueeze(-1) >> bits & 1).flatten(1)[:, : logits.shape[1]]
    return logits.masked_fill(is_allowed == 0, float("-inf"))


def _to_host(tensor: Tensor) -> Tensor:
    """Copied behind what the device has to do by now, without waiting for it."""
    return tensor.to("cpu", non_blocking=True)
