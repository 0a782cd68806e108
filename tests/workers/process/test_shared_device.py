"""Steps of two models never overlap on the device, whichever wakes while the other runs ahead."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, cast

import pytest

from tests.workers.no_models import make_loop
from tests.workers.simulation import Simulation, StubPool, generate
from tests.workers.simulator import FakeClock, Late, SimulatedRunner, Slots
from workers.base_models.residency import ModelState
from workers.base_models.served_model import ServedModel
from workers.execution.observer import FinishedStep, NoObserver
from workers.execution.step_input import PendingStep, StepInput, StepOutput
from workers.models.plan import ModelPlan
from workers.process.loop import WorkerLoop
from workers.wire.status import WorkerStatus


class Device:
    """Computes one step after the other, each in the seconds that its model takes."""

    def __init__(self) -> None:
        self.clock = FakeClock()
        self.free_s = 0.0
        self.in_flight: list[str] = []
        """Model of each step in flight."""
        self.overlaps: list[tuple[str, set[str]]] = []
        self.busy_s: dict[str, float] = {}


class Runner(SimulatedRunner):
    device: Device
    name: str
    step_s: float

    def launch(self, step: StepInput) -> PendingStep:
        device = self.device
        if others := {*device.in_flight} - {self.name}:
            device.overlaps.append((self.name, others))
        launched = super().launch(step)
        device.free_s = end_s = max(device.free_s, device.clock.now) + self.step_s
        device.busy_s[self.name] = device.busy_s.get(self.name, 0.0) + self.step_s
        device.in_flight.append(self.name)

        def result() -> StepOutput:
            device.clock.now = max(device.clock.now, end_s)
            device.in_flight.remove(self.name)
            return launched.result()

        return Late(result)


class Durations(NoObserver):
    def __init__(self) -> None:
        self.seconds: list[float] = []

    def on_step(self, step: FinishedStep, now: float) -> None:
        self.seconds.append(step.device_s)


def model(device: Device, name: str, step_s: float, delay_steps: int) -> Simulation:
    def make(clock: FakeClock, slots: Slots) -> Runner:
        runner = Runner(clock, slots, seconds_per_token=0.0)
        runner.device, runner.name, runner.step_s = device, name, step_s
        return runner

    simulation = Simulation(
        runner=make,
        runs_ahead=True,
        observe=lambda _: Durations(),
        pool=StubPool(num_slots=4, delay_steps=delay_steps),
    )
    simulation.clock = device.clock
    simulation.engine._clock = device.clock  # pyright: ignore[reportPrivateUsage]
    simulation.runner.clock = device.clock  # pyright: ignore[reportAttributeAccessIssue]
    return simulation


def loop_of(device: Device, models: dict[str, Simulation]) -> WorkerLoop:
    first = next(iter(models.values()))
    loop = make_loop(
        first.instance,
        first.kv.lock,
        device.clock,
        status=lambda *_: WorkerStatus("w", False, [], [], 0, "", {}, 0, 0.0),
    )
    served = {
        name: ServedModel(
            *(each.engine, each.instance.pool, each.report, cast(Any, None)),
            plan=cast(ModelPlan, None),
            state=ModelState(name, 0, 0.0, tier="device"),
            make_runner=cast(Callable[..., Any], None),
            num_bytes=0,
        )
        for name, each in models.items()
    }
    loop._served = cast(Any, ActiveModels(served))  # pyright: ignore[reportPrivateUsage]
    return loop


class ActiveModels:
    def __init__(self, active: dict[str, ServedModel]) -> None:
        self.active = active


@pytest.mark.parametrize("step_s", [0.001, 0.5])
@pytest.mark.parametrize("delay_steps", [0, 3])
def test_a_model_that_wakes_waits_for_the_step_in_flight(step_s: float, delay_steps: int) -> None:
    """delay_steps: of the adapter of the second model's request, which stalls in the meantime."""
    device = Device()
    models = {"a": model(device, "a", 0.1, 0), "b": model(device, "b", step_s, delay_steps)}
    loop = loop_of(device, models)
    models["a"].submit(generate(1, [1, 2, 3], 60))
    step: Callable[[], Any] = partial(loop._step)  # pyright: ignore[reportPrivateUsage]
    for _ in range(5):
        step()
    assert device.in_flight == ["a"], "a runs ahead"
    models["b"].submit(generate(2, [4, 5, 6], 5, "adapter"))
    for _ in range(40):
        step()
    assert not models["b"].engine.has_work and models["a"].engine.has_work
    assert not device.overlaps
    for name, own_s in (("a", 0.1), ("b", step_s)):
        durations = models[name].observer
        assert isinstance(durations, Durations)
        assert durations.seconds == pytest.approx([own_s] * len(durations.seconds))
    scheduler = loop._device_scheduler  # pyright: ignore[reportPrivateUsage]
    given_s = scheduler._virtual_s[models["a"].engine]  # pyright: ignore[reportPrivateUsage]
    assert given_s == pytest.approx(device.busy_s["a"], abs=0.21)
