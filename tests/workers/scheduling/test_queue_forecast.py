"""A forecast of first tokens keeps to the speed of the device while sequences wait, whether a step
is collected before the next one is launched or after."""

from __future__ import annotations

import random

import pytest

from tests.workers.counting import Market, StepCost
from tests.workers.scheduling.test_fairness import ask
from workers.execution.speed import measure_speed
from workers.execution.step_input import PendingStep, StepInput
from workers.wire.queue_wait import ASSUMED_ANSWER_TOKENS

NUM_SLOTS = 8

pytestmark = pytest.mark.usefixtures("both_ways")


def backlogged(*, max_tokens: int) -> Market:
    """A worker that knows its speed, with ten times as many requests as it has slots."""
    market = Market(
        cost=StepCost(0.01, 0.0005), num_pages=2000, max_num_seqs=NUM_SLOTS, max_batched_tokens=256
    )
    measure_speed(market.engine, market.clock)
    burst(market, max_tokens=max_tokens)
    return market


def burst(market: Market, *, max_tokens: int) -> None:
    rng = random.Random(1)
    for _ in range(10 * NUM_SLOTS):
        market.submit(ask(rng, "t", rng.randrange(50, 400), max_tokens))


def prompt_tokens_per_s(market: Market) -> float:
    return market.scheduler.policy.status.prompt_tokens_per_s


def test_a_worker_that_starts_beside_others_knows_its_speed_all_the_same() -> None:
    """Every third step, and of each kind one, is held up by what else the machine does."""
    market = backlogged(max_tokens=2)
    known, runner = prompt_tokens_per_s(market), market.counts
    launch, num_before = runner.launch, runner.num_steps

    def held_up(step: StepInput) -> PendingStep:
        runner.slowdown = 3.0 if (runner.num_steps - num_before) % 3 == 1 else 1.0
        return launch(step)

    runner.launch = held_up
    measure_speed(market.engine, market.clock)
    assert prompt_tokens_per_s(market) == pytest.approx(known, rel=0.01)


@pytest.mark.parametrize("max_tokens", [1, 2, 40])
def test_steps_that_take_as_long_as_predicted_are_not_slow(max_tokens: int) -> None:
    market = backlogged(max_tokens=max_tokens)
    known = prompt_tokens_per_s(market)
    while len(market.scheduler.waiting):
        market.step()
        assert prompt_tokens_per_s(market) == pytest.approx(known, rel=0.01)


@pytest.mark.parametrize("max_tokens", [2, 40])
def test_steps_that_take_twice_as_long_halve_the_rate(max_tokens: int) -> None:
    market = backlogged(max_tokens=max_tokens)
    known = prompt_tokens_per_s(market)
    market.counts.slowdown = 2.0
    while len(market.scheduler.waiting):
        market.step()
        assert prompt_tokens_per_s(market) > 0.45 * known
    assert prompt_tokens_per_s(market) == pytest.approx(0.5 * known, rel=0.1)


@pytest.mark.parametrize("is_suspended", [False, True])
def test_time_without_steps_of_this_model_counts_for_nothing(is_suspended: bool) -> None:
    """Other models had the device, or no request came."""
    market = backlogged(max_tokens=40)
    known = prompt_tokens_per_s(market)
    while len(market.scheduler.waiting) > 5 * NUM_SLOTS if is_suspended else market.engine.has_work:
        market.step()
    if is_suspended:
        market.suspend()
    market.clock.now += 60.0
    burst(market, max_tokens=40)
    while len(market.scheduler.waiting):
        market.step()
        assert prompt_tokens_per_s(market) == pytest.approx(known, rel=0.01)


def test_the_mean_length_of_recent_answers_is_reported() -> None:
    market = backlogged(max_tokens=2)
    assert market.scheduler.policy.status.answer_tokens == ASSUMED_ANSWER_TOKENS
    while market.scheduler.has_work:
        market.step()
    assert market.scheduler.policy.status.answer_tokens == pytest.approx(2, abs=1)
