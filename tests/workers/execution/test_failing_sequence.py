"""A sequence with which every step fails: it fails alone, wherever the step fails, and the tokens
of its neighbours are those that they have without it."""

from __future__ import annotations

import random
from typing import Any

import pytest

from tests.workers.simulation import Simulation, assert_equals_alone, generate, prompt_of
from tests.workers.simulator import Late, SimulatedRunner
from workers.execution import engine
from workers.execution.engine import MAX_FAILED_STEPS
from workers.execution.step_input import PendingStep, StepInput, StepOutput
from workers.wire.protocol import ErrorCode, FinishReason, Generate, SamplingParams

SEED_OF_THE_BAD = 666


class FragileRunner(SimulatedRunner):
    """Fails in `launch` or in `result` if a sequence of the step samples with a certain seed."""

    where = "launch"

    def launch(self, step: StepInput) -> PendingStep:
        is_bad = any(sample.params.seed == SEED_OF_THE_BAD for sample in step.samples)
        if is_bad and self.where == "launch":
            raise ValueError("this seed is not taken")
        late = super().launch(step)

        def result() -> StepOutput:
            if is_bad:
                raise ValueError("this seed is not taken")
            return late.result()

        return Late(result)


class LateFragileRunner(FragileRunner):
    where = "result"


def bad(request: Generate) -> Generate:
    return Generate(
        *(request.id, request.request_id, request.model, request.tokens),
        SamplingParams(max_tokens=12, seed=SEED_OF_THE_BAD, temperature=0.0),
        cache_domain="tenant",
    )


@pytest.mark.parametrize("runs_ahead", [False, True], ids=["in-turn", "ahead"])
@pytest.mark.parametrize("runner", [FragileRunner, LateFragileRunner], ids=["launch", "result"])
def test_only_the_sequence_fails(runner: type[SimulatedRunner], runs_ahead: bool) -> None:
    rng = random.Random(7)
    simulation = Simulation(num_pages=256, runner=runner, runs_ahead=runs_ahead)
    requests = [
        generate(number, prompt_of(rng, rng.randrange(1, 90)), adapter=rng.choice([None, "a", "b"]))
        for number in range(60)
    ]
    is_bad = [rng.random() < 0.2 for _ in requests]
    for request, fails in zip(requests, is_bad, strict=True):
        simulation.submit(bad(request) if fails else request)
        if rng.random() < 0.3:
            simulation.step()
    simulation.run()
    failed = {number for number, end in simulation.finished.items() if end is ErrorCode.INTERNAL}
    assert failed == {number for number, fails in enumerate(is_bad) if fails} and failed
    assert_equals_alone(simulation, [r for r in requests if r.id not in failed])
    simulation.assert_at_rest()


@pytest.mark.parametrize("runs_ahead", [False, True], ids=["in-turn", "ahead"])
def test_a_sequence_whose_input_cannot_be_built_fails_alone(
    monkeypatch: pytest.MonkeyPatch, runs_ahead: bool
) -> None:
    build = engine.build_step_input

    def build_some(items: list[Any], tables: Any, commands: Any) -> StepInput:
        if any(item.sequence.request.params.seed == SEED_OF_THE_BAD for item in items):
            raise OverflowError("Python integer out of bounds")
        return build(items, tables, commands)

    monkeypatch.setattr(engine, "build_step_input", build_some)
    rng = random.Random(7)
    simulation = Simulation(runs_ahead=runs_ahead)
    requests = [generate(number, prompt_of(rng, 10)) for number in range(7)]
    for request in requests:
        simulation.submit(bad(request) if request.id == 3 else request)
    simulation.run()
    assert simulation.finished[3] is ErrorCode.INTERNAL
    assert_equals_alone(simulation, [r for r in requests if r.id != 3])
    simulation.assert_at_rest()


def test_steps_that_fail_in_part_do_not_end_the_engine() -> None:
    """Ever so many, beside a sequence that gets its tokens."""
    rng = random.Random(7)
    simulation = Simulation(runner=FragileRunner)
    simulation.submit(generate(0, prompt_of(rng, 5), max_tokens=4 * MAX_FAILED_STEPS))
    for number in range(1, 3 * MAX_FAILED_STEPS):
        simulation.submit(bad(generate(number, prompt_of(rng, 5))))
        simulation.step()
    simulation.run()
    assert simulation.finished.pop(0) in (FinishReason.LENGTH, FinishReason.STOP)
    assert set(simulation.finished.values()) == {ErrorCode.INTERNAL}


@pytest.mark.parametrize("runs_ahead", [False, True], ids=["in-turn", "ahead"])
@pytest.mark.parametrize("num_others", [0, 3])
def test_pages_of_a_failed_sequence_are_not_cached(num_others: int, runs_ahead: bool) -> None:
    """Their KV was not computed."""
    rng = random.Random(7)
    simulation = Simulation(num_pages=256, runner=FragileRunner, runs_ahead=runs_ahead)
    requests = [generate(number, prompt_of(rng, 50)) for number in range(num_others + 1)]
    failing, *others = requests
    simulation.run(*(bad(failing), *others))
    assert simulation.finished[0] is ErrorCode.INTERNAL
    again = generate(100, failing.tokens)
    simulation.run(again)
    assert simulation.cached[100] == 0
    assert_equals_alone(simulation, [*others, again])
