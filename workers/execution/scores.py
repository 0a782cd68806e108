"""Log-probabilities that a step computes, and their conversion to messages."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from ops.base import Ops
from ops.copies import to_host
from workers.execution.step_input import ScoreInput, SequenceResult, StepInput
from workers.layers.lm_head import Head
from workers.wire.protocol import SamplingParams, TokenLogprobs

MAX_SCORED_ROWS = 256
"""Maximum number of rows of logits in memory while prompts are scored. With a vocabulary of 128k,
256 rows take 200 MB. All rows of a chunk of 2,048 tokens would take 1.6 GB, which may not be free
if the device is full of pages."""


class Scores(NamedTuple):
    """Log-probabilities of tokens, and of the likeliest tokens at the same positions.

    tokens [N]: token ids. chosen [N]: their log-probabilities. top_ids [N, num_top]: ids of the
    likeliest tokens. top_values [N, num_top]: log-probabilities of the likeliest tokens.
    """

    tokens: Tensor
    chosen: Tensor
    top_ids: Tensor
    top_values: Tensor

    def read(self) -> list[TokenLogprobs]:
        """Converts the scores to messages. Called when the tensors have been copied to the host."""
        columns = (tensor.tolist() for tensor in self)
        return [
            TokenLogprobs(token, logprob, list(zip(ids, values, strict=True)))
            for token, logprob, ids, values in zip(*columns, strict=True)
        ]


class PromptScores(NamedTuple):
    """Scores of the prompt tokens that each `ScoreInput` requests."""

    inputs: list[ScoreInput]
    scores: list[Scores]

    def read_into(self, results: list[SequenceResult]) -> None:
        """Adds the scores to the sequences' results. Called once the scores are on the host."""
        for score, scores in zip(self.inputs, self.scores, strict=True):
            results[score.sequence].prompt_logprobs = scores.read()


class SampleScores(NamedTuple):
    """Scores of drawn tokens, one row per sample, and scores of other tokens that the samples
    request."""

    scores: Scores
    params: Sequence[SamplingParams]
    named: Tensor
    """Log-probabilities of the token ids that samples request, float32, concatenated by sample."""
    whole: Sequence[Tensor]
    """Log-probabilities of all tokens, float32 [V], for each sample that requests them."""

    def read(self) -> list[TokenLogprobs]:
        """Converts the scores to messages. Called when the tensors have been copied to the host."""
        named, whole = iter(self.named.tolist()), iter(self.whole)
        return [
            TokenLogprobs(entry.token, entry.logprob, _others(entry, params, named, whole))
            for entry, params in zip(self.scores.read(), self.params, strict=True)
        ]


def _others(
    entry: TokenLogprobs, params: SamplingParams, named: Iterator[float], whole: Iterator[Tensor]
) -> list[tuple[int, float]]:
    """Returns the tokens to report with a drawn token, and their log-probabilities: the token ids
    that the request lists, in this order, or else the likeliest tokens, the likeliest first."""
    if params.logprob_token_ids:
        return [(token, next(named)) for token in params.logprob_token_ids]
    if params.lists_vocabulary:
        values = next(whole).numpy()
        tokens = np.argsort(-values, kind="stable")
        return list(zip(tokens.tolist(), values[tokens].tolist(), strict=True))
    return entry.top[: params.logprobs]


def score_samples(
    ops: Ops,
    logits: Tensor,
    tokens: Tensor,
    params: list[SamplingParams],
    named: tuple[Tensor, Tensor],
) -> SampleScores:
    """Scores drawn tokens, and starts the copy of the scores to the host.

    logits: raw logits, float32 [M, V]. tokens: drawn tokens, int32 [M]. named: row and token id,
    both int64, of each token id that `params` request.
    """
    num_top = max(0, *(each.logprobs or 0 for each in params))
    chosen, *top = ops.log_softmax_top(logits, tokens, num_top)
    # A token's logit minus its log-probability is log(sum(exp(row))). This saves a second pass.
    sums = logits.gather(1, tokens.long().unsqueeze(1)).squeeze(1) - chosen
    rows, ids = named
    return SampleScores(
        Scores(*map(to_host, (tokens, chosen, *top))),
        params,
        to_host(logits[rows, ids] - sums[rows]),
        [to_host(logits[i] - sums[i]) for i, each in enumerate(params) if each.lists_vocabulary],
    )


def score_prompts(
    ops: Ops, step: StepInput, all_targets: list[Tensor], hidden: Tensor, head: Head
) -> PromptScores:
    """Scores the targets of each `ScoreInput`, and starts the copy of the scores to the host.
    Computes logits of `MAX_SCORED_ROWS` tokens at a time.

    all_targets: targets of each `ScoreInput`, int32. hidden [T, K]: hidden states of the step's
    tokens.
    """
    scored: list[Scores] = []
    first_tokens = (step.counts.cumsum() - step.counts).tolist()
    for score, targets in zip(step.scores, all_targets, strict=True):
        first = first_tokens[score.sequence]
        rows = hidden[first : first + len(targets)].split(MAX_SCORED_ROWS)
        slot = step.adapter_slots[score.sequence]
        parts = [
            ops.log_softmax_top(head(some, np.repeat(slot, len(some))), tokens, score.num_top)
            for some, tokens in zip(rows, targets.split(MAX_SCORED_ROWS), strict=True)
        ]
        columns = map(torch.cat, zip(*parts, strict=True))
        scored.append(Scores(*map(to_host, (targets, *columns))))
    return PromptScores(step.scores, scored)
