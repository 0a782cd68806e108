"""Log-probabilities computed by a step, and their conversion to messages."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from ops.base import Ops
from workers.execution.step_input import StepInput
from workers.execution.upload import to_host
from workers.layers.lm_head import Head
from workers.wire.protocol import ALL_TOKENS, SamplingParams, TokenLogprobs

MAX_SCORED_ROWS = 256
"""Maximum rows of logits in memory while prompts are scored: 200 MB for a vocabulary of 128k, not
the 1.6 GB of a chunk of 2,048 tokens, which a device full of pages may not have."""


class Scores(NamedTuple):
    """Log-probabilities of tokens and of the likeliest alternatives: tokens, chosen [N]; top_ids,
    top_values [N, num_top]."""

    tokens: Tensor
    chosen: Tensor
    top_ids: Tensor
    top_values: Tensor

    def read(self) -> list[TokenLogprobs]:
        """Converts the scores. Called once the tensors are on the host."""
        columns = (tensor.tolist() for tensor in self)
        return [
            TokenLogprobs(token, logprob, list(zip(ids, values, strict=True)))
            for token, logprob, ids, values in zip(*columns, strict=True)
        ]


class SampleScores(NamedTuple):
    """Scores of drawn tokens, one row per sample, and of other tokens that each sample requests."""

    scores: Scores
    params: Sequence[SamplingParams]
    named: Tensor
    """float32, log-probabilities of the tokens that rows name, concatenated."""
    whole: Sequence[Tensor]
    """float32 [V] for each row that requests all tokens."""

    def read(self) -> list[TokenLogprobs]:
        """Converts the scores. Called once the tensors are on the host."""
        named, whole = iter(self.named.tolist()), iter(self.whole)
        return [
            TokenLogprobs(entry.token, entry.logprob, _others(entry, params, named, whole))
            for entry, params in zip(self.scores.read(), self.params, strict=True)
        ]


def _others(
    entry: TokenLogprobs, params: SamplingParams, named: Iterator[float], whole: Iterator[Tensor]
) -> list[tuple[int, float]]:
    """Returns the tokens to report with a drawn one: those that the request names, in its order, or
    else the likeliest first."""
    if params.logprob_token_ids:
        return [(token, next(named)) for token in params.logprob_token_ids]
    if params.logprobs == ALL_TOKENS:
        values, tokens = torch.sort(next(whole), descending=True, stable=True)
        return list(zip(tokens.tolist(), values.tolist(), strict=True))
    return entry.top[: params.logprobs]


def score_samples(
    ops: Ops,
    logits: Tensor,
    tokens: Tensor,
    params: list[SamplingParams],
    num_top: int,
    named: tuple[Tensor, Tensor],
) -> SampleScores:
    """Scores drawn tokens, and starts the copy of the scores to the host.

    logits: float32 [M, V], raw. tokens: int32 [M]. named: rows and ids of the tokens that the
    parameters name, int64.
    """
    chosen, *top = ops.log_softmax_top(logits, tokens, num_top)
    # log(sum(exp(row))) without a second pass over the row.
    sums = logits.gather(1, tokens.long().unsqueeze(1)).squeeze(1) - chosen
    rows, ids = named
    return SampleScores(
        Scores(*map(to_host, (tokens, chosen, *top))),
        params,
        to_host(logits[rows, ids] - sums[rows]),
        [to_host(logits[i] - sums[i]) for i, each in enumerate(params) if _scores_all(each)],
    )


def score_prompts(
    ops: Ops, step: StepInput, all_targets: list[Tensor], hidden: Tensor, head: Head
) -> list[Scores]:
    """Returns the scores of each `ScoreInput`, computing logits of `MAX_SCORED_ROWS` tokens at a
    time, and starts their copy to the host.

    all_targets: of each `ScoreInput`, int32. hidden [T, K]: of the step's tokens.
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
    return scored


def _scores_all(params: SamplingParams) -> bool:
    return params.logprobs == ALL_TOKENS and not params.logprob_token_ids
