"""The last invocation in a prompt, as peft finds it, in linear time."""

from __future__ import annotations

import time

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from peft import LoraConfig
from peft.tuners.lora.variants import calculate_alora_offsets

from gateway.dispatch.prompts import find_activation

token_lists = st.lists(st.integers(0, 2), min_size=1, max_size=24)


def as_peft(tokens: list[int], invocation: list[int]) -> int | None:
    config = LoraConfig(task_type="CAUSAL_LM", alora_invocation_tokens=invocation)
    (offset,) = calculate_alora_offsets({"a": config}, "a", torch.tensor([tokens]))
    return None if offset is None else len(tokens) - offset


@given(token_lists, st.lists(st.integers(0, 2), min_size=1, max_size=5))
def test_equals_peft(tokens: list[int], invocation: list[int]) -> None:
    assert find_activation(tokens, invocation) == as_peft(tokens, invocation)


@given(token_lists, st.integers(0, 23), st.integers(1, 24))
def test_a_part_of_the_prompt_is_found(tokens: list[int], start: int, length: int) -> None:
    invocation = tokens[start % len(tokens) :][:length]
    found = find_activation(tokens, tuple(invocation))
    assert found is not None and found >= start % len(tokens)
    assert found == as_peft(tokens, invocation)


@pytest.mark.parametrize(
    ("tokens", "invocation", "expected"),
    [
        ([1, 2, 3], (), 0),
        ([1, 2, 3], (1, 2, 3), 0),
        ([1, 2, 3], (3,), 2),
        ([1, 2, 3], (2, 3, 4), None),
        ([1, 2], (1, 2, 1), None),
        ([1, 2, 1, 2, 1], (1, 2, 1), 2),
        ([1, 1, 1, 1], (1, 1), 2),
        ([1, 1, 2, 1, 1, 1, 2, 3], (1, 1, 2), 4),
    ],
)
def test_overlaps_and_ends(
    tokens: list[int], invocation: tuple[int, ...], expected: int | None
) -> None:
    assert find_activation(tokens, invocation) == expected


def test_hostile_prompts_take_linear_time() -> None:
    """A comparison at each position would take 10^8 steps: over ten seconds."""
    started = time.process_time()
    assert find_activation([0] * 200_000, (1, *[0] * 1023)) is None
    assert find_activation([0] * 200_000, (*[0] * 512, 1, *[0] * 511)) is None
    assert time.process_time() - started < 2.0
