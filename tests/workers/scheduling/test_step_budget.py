"""How many prompt tokens a step takes, where a token takes a millisecond and a step ten more."""

from __future__ import annotations

import math

import msgspec
import pytest

from tests.workers.simulation import ANY_RATIO, Simulation, generate
from workers.policies.over_share import ADDED_PART
from workers.policies.step_budget import MIN_TOKENS, StepBudget
from workers.policies.step_cost import StepTime
from workers.wire.protocol import SamplingParams


def budget(
    *, num_decoding: int, seconds: float, num_tokens: int = 512, num_over_share: int = 0
) -> StepBudget:
    learned = StepTime()
    for rows in range(10, 200, 10):
        learned.record(rows, rows, 0.01 + 0.001 * rows)
    return StepBudget(
        learned,
        num_tokens=num_tokens,
        decode_s=learned.predict(num_decoding, 0),
        over_share_s=(
            (1 + ADDED_PART) * learned.predict(num_decoding - num_over_share, 0)
            if num_decoding
            else math.inf
        ),
        seconds=seconds,
    )


def test_prompts_get_the_time_that_is_left() -> None:
    step = budget(num_decoding=10, seconds=0.22)
    assert step.room(0, is_over_share=False) == pytest.approx(200, abs=1)
    step.deduct(150, 0)
    assert step.room(0, is_over_share=False) == pytest.approx(50, abs=1)
    assert not step.is_spent(is_over_share=False)
    step.deduct(51, 0)
    assert step.is_spent(is_over_share=False)


def test_prompts_get_some_tokens_even_when_tokens_are_late() -> None:
    step = budget(num_decoding=10, seconds=0.0)
    assert step.room(0, is_over_share=True) == step.room(0, is_over_share=False) == MIN_TOKENS
    step.deduct(MIN_TOKENS - 1, 0)
    assert step.room(0, is_over_share=False) == 1 and not step.is_spent(is_over_share=True)
    step.deduct(1, 0)
    assert step.is_spent(is_over_share=False) and step.num_tokens == 0


def test_no_more_tokens_than_a_step_has() -> None:
    step = budget(num_decoding=10, seconds=math.inf, num_tokens=100)
    assert step.room(0, is_over_share=False) == 100
    step.deduct(70, 0)
    assert step.room(0, is_over_share=False) == 30


def test_over_share_tenants_add_two_fifths_of_what_a_step_takes_without_them() -> None:
    step = budget(num_decoding=190, seconds=0.5)
    assert step.room(0, is_over_share=True) == pytest.approx(80, abs=1)
    assert step.room(0, is_over_share=False) == pytest.approx(300, abs=1)
    step.deduct(20, 0)
    assert step.room(0, is_over_share=True) == pytest.approx(60, abs=1)
    step.deduct(81, 0)
    assert step.is_spent(is_over_share=True) and not step.is_spent(is_over_share=False)
    assert step.room(0, is_over_share=False) == pytest.approx(199, abs=2)


def test_generated_tokens_of_over_share_tenants_are_in_their_part() -> None:
    """190 tokens take 0.2 s; 180 take 0.19, and two fifths more is 0.266."""
    step = budget(num_decoding=190, seconds=0.5, num_over_share=10)
    assert step.room(0, is_over_share=True) == pytest.approx(66, abs=1)
    assert step.room(0, is_over_share=False) == pytest.approx(300, abs=1)
    full = budget(num_decoding=190, seconds=0.5, num_over_share=190)
    assert full.room(0, is_over_share=True) == MIN_TOKENS
    full.deduct(MIN_TOKENS, 0)
    assert full.is_spent(is_over_share=True) and not full.is_spent(is_over_share=False)


def test_over_share_tenants_are_bounded_by_late_tokens_too() -> None:
    step = budget(num_decoding=190, seconds=0.27)
    assert step.room(0, is_over_share=True) == pytest.approx(70, abs=1)


def test_without_generating_sequences_all_tenants_are_alike() -> None:
    step = budget(num_decoding=0, seconds=math.inf)
    assert step.room(0, is_over_share=True) == 512


@pytest.mark.parametrize(("max_token_gap_s", "most"), [(0.05, 0.075), (0.25, 0.375), (60.0, 1.0)])
def test_no_gap_of_a_stream_is_longer_than_the_setting(max_token_gap_s: float, most: float) -> None:
    """Though two streams are far ahead of what they are due, and a prompt of 3,000 tokens waits: a
    token takes a millisecond. With no bound the steps would be as large as they may."""
    simulation = Simulation(
        num_pages=512,
        max_batched_tokens=512,
        max_token_gap_s=max_token_gap_s,
        max_gap_ratio=ANY_RATIO,
        runs_ahead=False,
    )
    for number in range(2):
        endless = SamplingParams(300, 0, temperature=0.0, ignore_eos=True)
        stream = msgspec.structs.replace(generate(number, [number] * 8), params=endless)
        assert simulation.submit(stream) is None
    for _ in range(40):
        simulation.step()
    assert simulation.submit(generate(2, [7] * 3_000, 1)) is None
    gaps: list[float] = []
    while 2 not in simulation.finished:
        before, told = simulation.clock.now, len(simulation.outputs[0])
        simulation.step()
        assert len(simulation.outputs[0]) == told + 1, "a stream waits for no prompt"
        gaps.append(simulation.clock.now - before)
    assert max(gaps) <= most
    assert max(gaps) >= min(max_token_gap_s, 0.5) * 0.75, "the gap is used, or the prompt waits"
    print(f"\ngap {max_token_gap_s} s: {len(gaps)} steps, the longest {max(gaps):.3f} s")
