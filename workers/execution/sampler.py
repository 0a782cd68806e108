"""Sampling of tokens and log-probabilities from logits."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ops.base import Ops, SamplingBatch
from ops.copies import to_host, upload
from workers.execution.batch import TokenBuffer
from workers.execution.scores import SampleScores, score_samples
from workers.execution.step_input import Array, SampleInput, StepInput
from workers.wire.protocol import SamplingParams

MIN_TEMPERATURE = 1e-6
"""Temperature below which the likeliest token is drawn, because dividing by less may overflow."""


@dataclass(frozen=True, slots=True)
class SamplerInputs:
    """Inputs for the samples and scores of a step, on the device.

    scored int64 [M]     indices of the samples whose log-probabilities are requested
    named_rows, named int64   index below M and token id, for each token that those samples name
    masked int64 [K], masks int32 [K, ceil(V / 32)]   indices of the samples with masks, and masks
    targets              int32, the targets of each `ScoreInput`
    """

    batch: SamplingBatch
    scored: Tensor
    scored_params: list[SamplingParams]
    num_top: int
    named_rows: Tensor
    named: Tensor
    masked: Tensor
    masks: Tensor | None
    targets: list[Tensor]


class Sampler:
    """Sampler that draws and scores tokens. Drawn tokens are written to the token buffer, where the
    next step reads them. Results are copied to the host without waiting for the device."""

    def __init__(self, ops: Ops, buffer: TokenBuffer) -> None:
        self._ops = ops
        self._buffer = buffer

    def upload(self, step: StepInput) -> SamplerInputs:
        """Copies the inputs of the step's samples and scores to the device, in one copy."""
        samples = step.samples
        columns = _columns(step)
        scored = [i for i, sample in enumerate(samples) if sample.params.logprobs is not None]
        masked = [i for i, sample in enumerate(samples) if sample.mask is not None]
        scored_params = [samples[i].params for i in scored]
        named = [each.logprob_token_ids for each in scored_params]
        arrays = [
            *columns.values(),
            np.array(scored, np.int64),
            np.repeat(np.arange(len(named)), list(map(len, named))),
            np.array([token for tokens in named for token in tokens], np.int64),
            np.array(masked, np.int64),
            *(np.array(score.targets, np.int32) for score in step.scores),
            *([np.stack([s.mask for s in samples if s.mask is not None])] if masked else []),
        ]
        tensors = upload(arrays, self._ops.device)
        first = len(columns)
        scored_tensor, named_rows, named_tensor, masked_tensor, *rest = tensors[first:]
        targets = rest[: len(step.scores)]
        batch = SamplingBatch(
            **dict(zip(columns, tensors[:first], strict=True)),
            token_buffer=self._buffer.tokens,
            all_greedy=not columns["temperature"].any(),
            has_penalties=any(map(_has_penalties, samples)),
            has_bias=len(columns["bias_ids"]) > 0,
        )
        return SamplerInputs(
            batch,
            scored=scored_tensor,
            scored_params=scored_params,
            num_top=max((each.logprobs or 0 for each in scored_params), default=0),
            named_rows=named_rows,
            named=named_tensor,
            masked=masked_tensor,
            masks=tensors[-1] if masked else None,
            targets=targets,
        )

    def draw(self, logits: Tensor, inputs: SamplerInputs) -> tuple[Tensor, SampleScores | None]:
        """Draws tokens int32 [N] (-1 for a row with a NaN logit) and scores the tokens of the
        samples in `inputs.scored`.

        logits: float32 [N, V], a row for each sample. They may be overwritten.
        """
        batch = inputs.batch
        raw = logits[inputs.scored] if len(inputs.scored) else None
        if inputs.masks is not None:
            logits[inputs.masked] = _masked(logits[inputs.masked], inputs.masks)
        drawn = self._ops.sample(logits, batch)
        # The next step may read the tokens before the host sees that one is -1, not a token id.
        tokens = drawn.clamp_min(0)
        self._buffer.tokens[batch.buffer_slot, batch.position] = tokens
        scores = None
        if raw is not None:
            named = inputs.named_rows, inputs.named
            scores = score_samples(
                *(self._ops, raw, tokens[inputs.scored], inputs.scored_params),
                *(max(inputs.num_top, 0), named),
            )
        return to_host(drawn), scores


def _columns(step: StepInput) -> dict[str, Array]:
    """Returns the columns of a `SamplingBatch`, one entry per sample."""
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
    """Returns the logits [K, V], with -inf for each token whose bit in `masks` is not set."""
    bits = torch.arange(32, dtype=torch.int32, device=masks.device)
    is_allowed = (masks.unsqueeze(-1) >> bits & 1).flatten(1)[:, : logits.shape[1]]
    return logits.masked_fill(is_allowed == 0, float("-inf"))
