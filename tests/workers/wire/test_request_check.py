"""What a worker refuses although a gateway should have: by the name of the field."""

from __future__ import annotations

import math
from typing import Any

import msgspec
import pytest

from workers.wire.protocol import ErrorCode, Generate, SamplingParams
from workers.wire.request_check import RANGES, RequestLimits, check_request

LIMITS = RequestLimits(512, max_pages=32, vocab_size=320, end_tokens=frozenset([257]))
USUAL = Generate(1, "1", "m", [1, 2, 3], SamplingParams(max_tokens=8, seed=0), cache_domain="t")


def refusal(**params: Any) -> str:
    """The message, or nothing if the request is taken."""
    changed = msgspec.structs.replace(USUAL.params, **params)
    found = check_request(msgspec.structs.replace(USUAL, params=changed), LIMITS)
    assert found is None or found[0] is ErrorCode.INVALID
    return "" if found is None else found[1]


@pytest.mark.parametrize("name", RANGES)
def test_values_up_to_the_bounds_are_taken_and_none_beyond_them(name: str) -> None:
    low, high = RANGES[name]
    assert refusal(**{name: low}) == refusal(**{name: high}) == ""
    for value in (low - 1, high + 1 if isinstance(high, int) else high * 2):
        assert refusal(**{name: value}) == f"{name} must be in {low}..{high}, not {value}"


@pytest.mark.parametrize("name", ["temperature", "top_p", "min_p", "repetition_penalty"])
def test_what_is_no_number_is_refused(name: str) -> None:
    assert refusal(**{name: math.nan}).startswith(f"{name} must be in ")


@pytest.mark.parametrize("token", [-1, 320, -(1 << 40), 1 << 40])
def test_ids_outside_the_vocabulary_are_refused(token: int) -> None:
    where = f"ids must lie in 0..319, not {token}"
    assert refusal(stop_token_ids=(5, token)) == f"stop_token_ids {where}"
    assert refusal(logit_bias={5: 1.0, token: 1.0}) == f"logit_bias {where}"


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, 1e300])
def test_a_bias_that_no_float32_holds_is_refused(value: float) -> None:
    assert refusal(logit_bias={5: value}).startswith("logit_bias values must be in ")


def test_all_log_probabilities_of_a_prompt_are_refused_by_name() -> None:
    assert refusal(prompt_logprobs=-1) == "prompt_logprobs must be in 0..128, not -1"


@pytest.mark.parametrize("field", ["timeout_s", "waited_s"])
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_times_that_have_no_order_are_refused(field: str, value: float) -> None:
    found = check_request(msgspec.structs.replace(USUAL, **{field: value}), LIMITS)
    assert found == (ErrorCode.INVALID, "timeout_s and waited_s must be finite")
