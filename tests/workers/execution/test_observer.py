"""What every observer of an engine is told, and that it changes nothing."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable

import numpy as np
import pytest

from tests.workers.simulation import Simulation, StubPool, generate, prompt_of
from tests.workers.simulator import Late, SimulatedRunner
from workers.execution.observer import FinishedStep, NoObserver, StepObserver
from workers.execution.step_input import PendingStep, StepInput, StepOutput
from workers.observe.report import EngineReport
from workers.scheduling.sequence import Sequence
from workers.wire.protocol import ErrorCode, FinishReason, OutputKind


class Checked:
    """Passes on to another observer, and checks the order of the calls."""

    def __init__(self, observer: StepObserver) -> None:
        self._observer = observer
        self.num_tokens = Counter[int]()
        self.ends: dict[int, FinishReason | ErrorCode] = {}
        self.num_steps = 0
        self._last_s = 0.0

    def on_tokens(self, sequence: Sequence, num_tokens: int, now: float) -> None:
        assert sequence.request.id not in self.ends and num_tokens > 0
        self._advance(now)
        self.num_tokens[sequence.request.id] += num_tokens
        self._observer.on_tokens(sequence, num_tokens, now)

    def on_end(self, sequence: Sequence, end: FinishReason | ErrorCode, now: float) -> None:
        assert sequence.request.id not in self.ends
        self._advance(now)
        self.ends[sequence.request.id] = end
        self._observer.on_end(sequence, end, now)

    def on_step(self, step: FinishedStep, now: float) -> None:
        self._advance(now)
        assert step.device_s >= 0 and step.start_s <= now
        self.num_steps += 1
        self._observer.on_step(step, now)

    def _advance(self, now: float) -> None:
        assert now >= self._last_s
        self._last_s = now


@pytest.mark.parametrize("runs_ahead", [False, True], ids=["in-turn", "ahead"])
@pytest.mark.parametrize(
    "make", [lambda report: report, lambda _: NoObserver()], ids=["report", "none"]
)
def test_it_is_told_of_each_token_step_and_end_once(
    make: Callable[[EngineReport], StepObserver], runs_ahead: bool
) -> None:
    rng = random.Random(3)
    observers: list[Checked] = []

    def observe(report: EngineReport) -> StepObserver:
        observers.append(Checked(make(report)))
        return observers[0]

    pool = StubPool(num_slots=2, broken=frozenset(["bad"]))
    simulation = Simulation(num_pages=20, pool=pool, runs_ahead=runs_ahead, observe=observe)
    for number in range(24):
        adapter = rng.choice([None, "a", "b", "c", "bad"])
        simulation.submit(generate(number, prompt_of(rng, rng.randrange(1, 60)), 12, adapter))
        simulation.step()
    aborted = [number for number in range(24) if number not in simulation.finished][:3]
    for number in aborted:
        simulation.engine.abort(0, number)
    simulation.run()
    (observer,) = observers
    assert observer.ends == simulation.finished | dict.fromkeys(aborted, FinishReason.ABORT)
    lengths = {number: len(tokens) for number, tokens in simulation.outputs.items() if tokens}
    assert observer.num_tokens == lengths
    assert observer.num_steps > 0


class VectorRunner(SimulatedRunner):
    def launch(self, step: StepInput) -> PendingStep:
        pending = super().launch(step)

        def compute() -> StepOutput:
            output = pending.result()
            for pool in step.pools:
                output.sequences[pool.sequence].vector = np.ones(2, np.float32)
            return output

        return Late(compute)


def test_it_is_told_of_the_end_that_a_vector_has() -> None:
    observers: list[Checked] = []

    def observe(report: EngineReport) -> StepObserver:
        observers.append(Checked(report))
        return observers[0]

    simulation = Simulation(runner=VectorRunner, observe=observe)
    simulation.run(generate(0, [1, 2, 3], 0, kind=OutputKind.EMBED))
    assert observers[0].ends == simulation.finished == {0: FinishReason.STOP}
