"""Resident models share the device by weight, and nobody saves up what it did not use."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from workers.process.device_scheduler import DeviceScheduler


@dataclass(eq=False)
class Stub:
    """An engine as the turns see it."""

    weight: int = 1
    step_s: float = 1.0
    has_work: bool = True
    is_stalled: bool = False
    given_s: float = 0.0


def run(scheduler: DeviceScheduler, engines: list[Stub], seconds: float) -> None:
    end_s = sum(engine.given_s for engine in engines) + seconds
    while sum(engine.given_s for engine in engines) < end_s:
        for engine in scheduler.order(engines):  # pyright: ignore[reportArgumentType]
            if engine.has_work and not engine.is_stalled:
                engine.given_s += engine.step_s  # pyright: ignore[reportAttributeAccessIssue]
                scheduler.charge(engine, engine.step_s)  # pyright: ignore
                break


@pytest.mark.parametrize("weights", [(1, 1), (1, 3), (5, 2)])
def test_time_is_shared_by_weight_whatever_a_step_takes(weights: tuple[int, int]) -> None:
    engines = [Stub(weights[0], 0.3), Stub(weights[1], 1.1)]
    run(DeviceScheduler(), engines, 1000.0)
    shares = [engine.given_s / engine.weight for engine in engines]
    assert shares[0] == pytest.approx(shares[1], rel=0.02)


@pytest.mark.parametrize("away", ["has_work", "is_stalled"])
def test_one_that_could_not_run_comes_back_as_an_equal(away: str) -> None:
    scheduler, engines = DeviceScheduler(), [Stub(), Stub()]
    setattr(engines[0], away, away == "is_stalled")
    run(scheduler, engines, 500.0)
    setattr(engines[0], away, away != "is_stalled")
    run(scheduler, engines, 100.0)
    assert engines[0].given_s == pytest.approx(50.0, abs=2.0)


def test_one_that_could_not_run_is_looked_at_first() -> None:
    scheduler, engines = DeviceScheduler(), [Stub(), Stub(is_stalled=True), Stub()]
    run(scheduler, engines, 10.0)
    assert scheduler.order(engines)[0] is engines[1]  # pyright: ignore
