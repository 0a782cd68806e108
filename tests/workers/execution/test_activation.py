"""Activated LoRA in the scheduler: which rows, which pages, and what is shared."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from memory.page_key import PAGE_TOKENS
from tests.workers.simulation import (
    Simulation,
    StubPool,
    assert_equals_alone,
    generate,
    prompt_of,
)
from tests.workers.simulator import prefix_digests

pytestmark = pytest.mark.usefixtures("both_ways")


@pytest.mark.full
@settings(max_examples=40, deadline=None)
@given(st.integers(0, 2**32), st.integers(14, 80), st.integers(5, 200), st.integers(0, 3))
def test_a_chunk_never_crosses_and_no_adapted_page_passes_for_a_base_page(
    seed: int, num_pages: int, max_batched_tokens: int, delay_steps: int
) -> None:
    """The simulator checks both at every row, under preemption, with the same tokens activated at
    different places by the same adapters."""
    rng = random.Random(seed)
    simulation = Simulation(
        num_pages=num_pages,
        max_batched_tokens=max_batched_tokens,
        pool=StubPool(num_slots=2, delay_steps=delay_steps),
    )
    shared = prompt_of(rng, 70)
    requests = []
    for number in range(24):
        prompt = shared[: rng.randrange(1, 70)]
        if rng.random() < 0.4:
            prompt = prompt + prompt_of(rng, rng.randrange(1, 20))
        activation = rng.choice([0, len(prompt) - 1, rng.randrange(len(prompt))])
        requests.append(
            generate(
                number,
                prompt,
                rng.randrange(1, 40),
                rng.choice([None, "a", "b", "c"]),
                activation=activation,
                priority=rng.randrange(2),
            )
        )
    for request in requests:
        simulation.submit(request)
        simulation.step(rng.randrange(3))
    simulation.run()
    assert_equals_alone(simulation, requests)
    simulation.assert_at_rest()


def test_pages_before_the_activation_are_the_base_s_for_everybody() -> None:
    simulation = Simulation(num_pages=128)
    prompt = prompt_of(random.Random(1), 70)
    asked = [
        (generate(0, prompt), 0),
        (generate(1, prompt, adapter="a", activation=50), 48),
        (generate(2, prompt, adapter="b", activation=48), 48),
        (generate(3, prompt, adapter="b", activation=47), 32),
        (generate(4, prompt, adapter="a", activation=50), 64),
        (generate(5, prompt, adapter="a", activation=51), 48),
        (generate(6, prompt, adapter="a"), 0),
        (generate(7, prompt, adapter="a", activation=15), 0),
        (generate(8, prompt), 64),
        (generate(9, prompt, adapter="c", activation=69), 64),
    ]
    for request, num_cached in asked:
        simulation.run(request)
        assert simulation.cached[request.id] == num_cached, request.id
    assert_equals_alone(simulation, [request for request, _ in asked])


def test_base_pages_of_an_adapted_request_serve_base_requests() -> None:
    simulation = Simulation(num_pages=128)
    prompt = prompt_of(random.Random(2), 70)
    simulation.run(generate(0, prompt, adapter="a", activation=60))
    simulation.run(generate(1, prompt))
    assert simulation.cached == {0: 0, 1: 48}


def test_base_pages_stay_inside_domain_and_salt() -> None:
    simulation = Simulation(num_pages=128)
    prompt = prompt_of(random.Random(3), 70)
    simulation.run(generate(0, prompt))
    simulation.run(generate(1, prompt, adapter="a", activation=60, cache_salt="s"))
    assert simulation.cached[1] == 0


def test_generated_tokens_begin_with_the_adapter_where_another_prompt_does_not() -> None:
    """The same tokens and the same adapter, activated at two places of one page: what the first
    request generated is the second one's prompt."""
    simulation = Simulation(num_pages=128)
    prompt = prompt_of(random.Random(6), 2 * PAGE_TOKENS + 4)
    first = generate(0, prompt, 30, "a", activation=2 * PAGE_TOKENS + 2)
    simulation.run(first)
    longer = prompt + simulation.outputs[0][:-1]
    assert len(longer) > 3 * PAGE_TOKENS
    second = generate(1, longer, 30, "a", activation=2 * PAGE_TOKENS + 3)
    simulation.run(second)
    assert simulation.cached[1] == 2 * PAGE_TOKENS
    assert_equals_alone(simulation, [first, second])


@pytest.mark.parametrize("max_batched_tokens", [5, 16, 64])
def test_an_activation_costs_at_most_one_more_step(max_batched_tokens: int) -> None:
    prompt = prompt_of(random.Random(5), 60)

    def steps(activation: int) -> int:
        simulation = Simulation(max_batched_tokens=max_batched_tokens)
        simulation.run(generate(0, prompt, 1, "a", activation=activation))
        return simulation.runner.num_steps

    assert {steps(activation) - steps(0) for activation in range(60)} == {0, 1}


def test_the_simulator_tells_adapters_apart() -> None:
    tokens = [1, 2, 3]
    plain = prefix_digests(["base"] * 3, tokens)
    late = prefix_digests(["base", "base", "a"], tokens)
    assert plain[:2] == late[:2]
    assert plain[2] != late[2]
