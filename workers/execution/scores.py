"""Log-probabilities that a step computed, from tensors to what is sent."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from workers.wire.protocol import ALL_TOKENS, SamplingParams, TokenLogprobs


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


class SampleScores(NamedTuple):
    """The scores of drawn tokens, one row a sample, and of the other tokens that each asks for."""

    scores: Scores
    params: Sequence[SamplingParams]
    """Of each row."""
    named: Tensor
    """float32, the log-probabilities of the tokens that rows name, one row after the other."""
    whole: Sequence[Tensor]
    """float32 [V] of each row that asks for all tokens."""

    def read(self) -> list[TokenLogprobs]:
        """Once they are on the host."""
        named, whole = iter(self.named.tolist()), iter(self.whole)
        return [
            TokenLogprobs(entry.token, entry.logprob, _others(entry, params, named, whole))
            for entry, params in zip(self.scores.read(), self.params, strict=True)
        ]


def _others(
    entry: TokenLogprobs, params: SamplingParams, named: Iterator[float], whole: Iterator[Tensor]
) -> list[tuple[int, float]]:
    """The tokens that are told beside a drawn one: those that the request names in their order,
    else the likeliest first."""
    if params.logprob_token_ids:
        return [(token, next(named)) for token in params.logprob_token_ids]
    if params.logprobs == ALL_TOKENS:
        values, tokens = torch.sort(next(whole), descending=True, stable=True)
        return list(zip(tokens.tolist(), values.tolist(), strict=True))
    return entry.top[: params.logprobs]
