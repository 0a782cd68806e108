"""Sampling of tokens and log-probabilities from logits."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from ops.base import Ops, SamplingBatch
from ops.copies import to_host, upload
from workers.execution.scores import SampleScores, score_samples
from workers.execution.step_input import Array, SampleInput, SequenceResult, StepInput
from workers.layers.unnamed_rows import UnnamedRows
from workers.wire.protocol import ErrorCode

MIN_TEMPERATURE = 1e-6
"""Temperature below which the likeliest token is drawn, because scaled logits might overflow."""


@dataclass(frozen=True, slots=True)
class SamplerInputs:
    """Inputs for the samples and scores of a step, on the device.

    scored int64 [M]     indices of the samples whose log-probabilities are requested
    named_rows, named int64   for each token that a scored sample names: index in `scored`, token id
    unnamed int64 [2, ...]   result of `UnnamedRows.find_named`
    masked int64 [K], masks int32 [K, ceil(V / 32)]   indices of the samples with masks, and masks
    targets              int32, the targets of each `ScoreInput`
    """

    samples: list[SampleInput]
    batch: SamplingBatch
    scored: Tensor
    named_rows: Tensor
    named: Tensor
    unnamed: Tensor
    masked: Tensor
    masks: Tensor
    targets: list[Tensor]


@dataclass(frozen=True, slots=True)
class Drawn:
    """Drawn tokens int32 [N], -1 for a row with a NaN logit. scores: log-probabilities for the
    samples that request them, or None if no sample does."""

    samples: list[SampleInput]
    tokens: Tensor
    scores: SampleScores | None

    def read_into(self, results: list[SequenceResult]) -> None:
        """Adds the tokens to the sequences' results. Called once the tokens are on the host."""
        logprobs = iter([] if self.scores is None else self.scores.read())
        for sample, token in zip(self.samples, self.tokens.tolist(), strict=True):
            result = results[sample.sequence]
            if sample.params.logprobs is not None:
                result.logprobs = [next(logprobs)]
            if token < 0:
                result.error = ErrorCode.LOGITS_NAN
            else:
                result.tokens.append(token)


class Sampler:
    """Sampler that draws and scores tokens. Drawn tokens are written to the token buffer, where the
    next step reads them. Results are copied to the host without waiting for the device."""

    def __init__(self, ops: Ops, buffer: Tensor, unnamed_ids: Sequence[int] = ()) -> None:
        """buffer: the token buffer, int32 [slots, max_model_len]."""
        self._ops = ops
        self._buffer = buffer
        self._unnamed = UnnamedRows(unnamed_ids, ops.device)

    def upload(self, step: StepInput) -> SamplerInputs:
        """Copies the inputs of the step's samples and scores to the device, in one copy."""
        samples = step.samples
        columns = _columns(step)
        scored = [i for i, sample in enumerate(samples) if sample.params.logprobs is not None]
        named = [samples[i].params.logprob_token_ids for i in scored]
        masks = {i: sample.mask for i, sample in enumerate(samples) if sample.mask is not None}
        arrays = columns | {
            "scored": np.array(scored, np.int64),
            "named_rows": np.repeat(np.arange(len(named)), list(map(len, named))),
            "named": np.array([token for tokens in named for token in tokens], np.int64),
            "unnamed": self._unnamed.find_named((s.params.named_ids, s.mask) for s in samples),
            "masked": np.array(list(masks), np.int64),
            "masks": np.stack(list(masks.values())) if masks else np.zeros((0, 0), np.int32),
        }
        targets = [np.array(score.targets, np.int32) for score in step.scores]
        uploaded = upload([*arrays.values(), *targets], self._ops.device)
        tensors = dict(zip(arrays, uploaded, strict=False))
        batch = SamplingBatch(
            **{name: tensors.pop(name) for name in columns},
            token_buffer=self._buffer,
            all_greedy=not columns["temperature"].any(),
            has_penalties=any(map(_has_penalties, samples)),
            has_bias=len(columns["bias_ids"]) > 0,
        )
        return SamplerInputs(samples, batch, **tensors, targets=uploaded[len(arrays) :])

    def draw(self, logits: Tensor, inputs: SamplerInputs) -> Drawn:
        """Draws a token for each sample, and scores the tokens of the samples in `inputs.scored`.

        logits: float32 [N, V], one row per sample. May be overwritten.
        """
        batch = inputs.batch
        raw = logits[inputs.scored] if len(inputs.scored) else None
        self._unnamed.exclude(logits, inputs.unnamed)
        if len(inputs.masked):
            logits[inputs.masked] = _masked(logits[inputs.masked], inputs.masks)
        drawn = self._ops.sample(logits, batch)
        # The next step may read a token before the host sees that it is -1, which is no token id.
        tokens = drawn.clamp_min(0)
        self._buffer[batch.buffer_slot, batch.position] = tokens
        scores = None
        if raw is not None:
            params = [s.params for s in inputs.samples if s.params.logprobs is not None]
            named = inputs.named_rows, inputs.named
            scores = score_samples(self._ops, raw, tokens[inputs.scored], params, named)
        return Drawn(inputs.samples, to_host(drawn), scores)


def _columns(step: StepInput) -> dict[str, Array]:
    """Returns the columns of a `SamplingBatch`, one entry per sample."""
    samples = step.samples
    params = [sample.params for sample in samples]
    biases = [_bias(sample) for sample in samples]
    bias_start = np.zeros(len(samples) + 1, np.int32)
    np.cumsum([len(bias) for bias in biases], out=bias_start[1:])
    temperatures = [p.temperature if p.temperature >= MIN_TEMPERATURE else 0.0 for p in params]
    positions = np.array([sample.position for sample in samples], np.int64)
    return {
        "temperature": np.array(temperatures, np.float32),
        "top_k": np.array([p.top_k for p in params], np.int32),
        "top_p": np.array([p.top_p for p in params], np.float32),
        "min_p": np.array([p.min_p for p in params], np.float32),
        "seed": np.array([p.seed for p in params], np.int64),
        "position": positions,
        "choice": np.array([p.choice for p in params], np.int64),
        "presence": np.array([p.presence_penalty for p in params], np.float32),
        "frequency": np.array([p.frequency_penalty for p in params], np.float32),
        "repetition": np.array([p.repetition_penalty for p in params], np.float32),
        "buffer_slot": step.sequence_slots[[s.sequence for s in samples]].astype(np.int32),
        "prompt_len": np.array([sample.num_prompt for sample in samples], np.int32),
        "total_len": positions.astype(np.int32),
        "bias_start": bias_start,
        "bias_ids": np.array([token for bias in biases for token in bias], np.int32),
        "bias_values": np.array([v for bias in biases for v in bias.values()], np.float32),
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
