"""Log-probabilities computed by a step, and their conversion to messages."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from workers.wire.protocol import ALL_TOKENS, SamplingParams, TokenLogprobs


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
