"""What a row's sampling costs has a bound, whatever its parameters, its logits and its neighbours.

Costs are CPU time of the calling thread, as multiples of a plain row's: one row is computed there.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from ops.base import Ops
from tests.ops.test_sampling import bias, make_batch

VOCAB, CONTEXT = 128_256, 131_072
MOST = 4.0
"""Times a plain row. Measured are 1.0 to 2.3; a partition of the vocabulary is 5 to 15."""

TOKENS = torch.randint(
    0, VOCAB, (1, CONTEXT), dtype=torch.int32, generator=torch.Generator().manual_seed(0)
)
HISTORY: dict[str, Any] = {
    "token_buffer": TOKENS,
    "prompt_len": CONTEXT // 2,
    "total_len": CONTEXT,
    "has_penalties": True,
}
PARAMETERS: dict[str, dict[str, Any]] = {
    "top_k of one": {"top_k": 1},
    "top_k of nearly all": {"top_k": VOCAB - 1},
    "small top_p": {"top_p": 0.1},
    "large top_p": {"top_p": 0.9999},
    "min_p": {"min_p": 1e-6},
    "penalties": {**HISTORY, "presence": 0.5, "frequency": 0.25, "repetition": 1.3},
    "a neighbour's penalties": HISTORY,
    "logit_bias": bias({token * 400: 1.0 for token in range(300)}),
}


def spread() -> Tensor:
    return torch.randn(1, VOCAB, generator=torch.Generator().manual_seed(0)) * 3


def far() -> Tensor:
    """A bias of 100 and a temperature near 0 make one token's lead so large."""
    logits = spread() * 1e7
    logits[0, 7] += 1e9
    return logits


ROWS: dict[str, Callable[[], Tensor]] = {
    "spread": spread,
    "equal": lambda: torch.zeros(1, VOCAB),
    "far": far,
}


def seconds(run: Callable[[Tensor], object], logits: Tensor) -> float:
    """The least of several runs, each on a fresh copy."""
    best = float("inf")
    for _ in range(7):
        copy = logits.clone()
        begin = time.thread_time()
        run(copy)
        best = min(best, time.thread_time() - begin)
    return best


@pytest.fixture(scope="module")
def plain(cpu: Ops) -> float:
    batch = make_batch(1)
    return seconds(lambda logits: cpu.sample(logits, batch), spread())


@pytest.mark.parametrize("row", ROWS)
@pytest.mark.parametrize("parameter", PARAMETERS)
def test_no_parameter_makes_a_row_many_times_as_long(
    cpu: Ops, plain: float, parameter: str, row: str
):
    batch = make_batch(1, **PARAMETERS[parameter])
    assert seconds(lambda logits: cpu.sample(logits, batch), ROWS[row]()) < MOST * plain


def test_log_probabilities_of_twenty_are_cheaper_than_a_draw(cpu: Ops, plain: float):
    tokens = torch.zeros(1, dtype=torch.int32)
    assert seconds(lambda logits: cpu.log_softmax_top(logits, tokens, 20), spread()) < plain


@pytest.mark.parametrize("row", ROWS)
def test_all_parameters_together_cost_less_than_their_sum(cpu: Ops, plain: float, row: str):
    together: dict[str, Any] = {"top_k": VOCAB - 1, "top_p": 0.9999, "min_p": 1e-6}
    batch = make_batch(1, **PARAMETERS["logit_bias"], **PARAMETERS["penalties"], **together)
    assert seconds(lambda logits: cpu.sample(logits, batch), ROWS[row]()) < 1.5 * MOST * plain
