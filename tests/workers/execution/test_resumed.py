"""A sequence that another worker began goes on here as it would have gone on there."""

from __future__ import annotations

import random
from pathlib import Path

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from adapters.reference import AdapterRef
from tests.workers.driver import Driver
from tests.workers.process.test_worker import Setup
from tests.workers.simulation import Simulation, StubPool, generate, prompt_of
from tests.workers.simulator import END, alone
from workers.wire.protocol import ErrorCode, FinishReason, Generate, SamplingParams, TokenLogprobs


def resumed(request: Generate, generated: list[int]) -> Generate:
    tokens = request.tokens + generated
    return msgspec.structs.replace(request, tokens=tokens, num_resumed=len(generated))


@pytest.mark.full
@pytest.mark.usefixtures("both_ways")
@settings(max_examples=20, deadline=None)
@given(st.integers(0, 2**32), st.integers(14, 60), st.integers(16, 100))
def test_it_generates_the_rest(seed: int, num_pages: int, max_batched_tokens: int) -> None:
    """Among others, some of them resumed too, with preemption."""
    rng = random.Random(seed)
    simulation = Simulation(
        num_pages=num_pages,
        max_batched_tokens=max_batched_tokens,
        pool=StubPool(num_slots=2, delay_steps=1),
    )
    expected: dict[int, list[int]] = {}
    num_prompts: dict[int, int] = {}
    for number in range(16):
        prompt = prompt_of(rng, rng.randrange(1, 50))
        adapter = rng.choice([None, "a", "b"])
        activation = rng.randrange(len(prompt))
        request = generate(
            number, prompt, rng.randrange(1, 60), adapter, activation=activation if adapter else 0
        )
        whole = alone(request)
        num_resumed = rng.randrange(len(whole))
        expected[number], num_prompts[number] = whole[num_resumed:], len(prompt)
        assert simulation.submit(resumed(request, whole[:num_resumed])) is None
        simulation.step()
    simulation.run()
    assert simulation.outputs == expected
    for number, rest in expected.items():
        ended = FinishReason.STOP if rest[-1] == END else FinishReason.LENGTH
        assert simulation.finished[number] is ended
        assert simulation.cached[number] <= num_prompts[number]
    simulation.assert_at_rest()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_resumed": 4}, "leave a prompt"),
        ({"num_resumed": -1}, "leave a prompt"),
        ({"num_resumed": 2, "params": SamplingParams(2, 0)}, "less than max_tokens"),
        ({"num_resumed": 1, "tokens": [1, 2, END]}, "end token"),
        ({"num_resumed": 1, "params": SamplingParams(4, 0, prompt_logprobs=0)}, "first token"),
        ({"num_resumed": 2, "activation": 2, "adapter": AdapterRef("a")}, "activation"),
    ],
)
def test_what_cannot_be_resumed_is_refused(changes: dict[str, object], message: str) -> None:
    simulation = Simulation()
    failed = simulation.submit(msgspec.structs.replace(generate(0, [1, 2, 3, 4]), **changes))
    assert failed is not None
    assert failed.code is ErrorCode.INVALID
    assert message in failed.message
    assert not simulation.engine.has_work


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Setup:
    folder: Path = tmp_path_factory.mktemp("tiny")
    return Setup(folder, "llama", {"r4": {"rank": 4}})


PARAMS = {
    "greedy": SamplingParams(40, 0, temperature=0.0, ignore_eos=True, logprobs=2),
    "seeded": SamplingParams(
        40,
        -7,
        choice=3,
        temperature=4.0,
        top_p=0.95,
        presence_penalty=1.0,
        frequency_penalty=0.5,
        repetition_penalty=1.3,
        logit_bias={9: 2.0},
        min_tokens=30,
        logprobs=2,
    ),
}


@pytest.mark.parametrize("params", PARAMS.values(), ids=PARAMS)
@pytest.mark.parametrize(
    ("adapter", "runs_ahead"),
    [(None, False), ("r4", False), ("r4", True)],
    ids=["base", "r4", "r4-ahead"],
)
def test_a_real_model_goes_on_alike(
    tiny: Setup, params: SamplingParams, adapter: str | None, runs_ahead: bool
) -> None:
    """On a worker that has seen nothing of it, among strangers, and tells some tokens at a time."""
    ref = None if adapter is None else tiny.refs[adapter]
    request = Generate(0, "", tiny.digest, [3, 1, 4, 1, 5], params, cache_domain="t", adapter=ref)
    config = tiny.config(runs_ahead=runs_ahead)
    with Driver(config) as driver:
        driver.run(request)
    whole, scores = driver.answers[0], _scores(driver)
    assert len(whole) >= 30
    for num_resumed in (1, 17, len(whole) - 1):
        with Driver(config) as driver:
            for number in range(3):
                driver.submit(tiny.generate(number + 1, [number], 8, None))
            rest = resumed(request, whole[:num_resumed])
            driver.run(msgspec.structs.replace(rest, stream_interval=7))
        assert driver.answers[0] == whole[num_resumed:]
        for one, other in zip(_scores(driver), scores[num_resumed:], strict=True):
            assert one.logprob == pytest.approx(other.logprob, abs=1e-4)
            assert [token for token, _ in one.top] == [token for token, _ in other.top]


def _scores(driver: Driver) -> list[TokenLogprobs]:
    return [entry for output in driver.outputs[0] for entry in output.logprobs or []]
