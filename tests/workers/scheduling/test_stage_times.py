from __future__ import annotations

import math

import msgspec
import pytest

from adapters.pool.source import AdapterLoad
from tests.workers.simulation import Simulation, StubPool, generate
from workers.scheduling.stage_times import MAX_PREEMPTIONS
from workers.wire.protocol import AdapterLoadTimes, FinishReason, Generate, SequenceTimes

PARENT = "00-" + "ab" * 16 + "-" + "cd" * 8 + "-01"


def traced(request: Generate) -> Generate:
    """As long as its `max_tokens`."""
    params = msgspec.structs.replace(request.params, ignore_eos=True)
    return msgspec.structs.replace(request, params=params, traceparent=PARENT)


def times_of(simulation: Simulation, number: int) -> SequenceTimes:
    times = simulation.times[number]
    assert times is not None
    return times


def test_only_a_traced_sequence_has_times() -> None:
    simulation = Simulation()
    simulation.run(generate(0, [1] * 20), traced(generate(1, [2] * 20)))
    assert simulation.times[0] is None and simulation.times[1] is not None


def test_queue_prefill_and_decode_follow_each_other() -> None:
    """One slot: the second sequence starts when the first has ended."""
    simulation = Simulation(max_num_seqs=1)
    for number in (0, 1):
        simulation.submit(traced(generate(number, [number] * 200, 5)))
    arrival_s = simulation.clock.now
    simulation.run()
    first, second = times_of(simulation, 0), times_of(simulation, 1)
    assert first.started_s == pytest.approx(1e-6)
    assert second.started_s == pytest.approx(first.told_s - 1e-6)
    for times in (first, second):
        assert times.started_s is not None and times.first_token_s is not None
        assert times.first_token_s - times.started_s == pytest.approx(0.2), "a ms a token"
        assert times.told_s - times.first_token_s == pytest.approx(0.004)
        assert times.model_wait is None and times.adapter_load is None
    assert arrival_s + second.told_s == pytest.approx(simulation.clock.now)


def test_one_that_never_ran_has_only_waited() -> None:
    simulation = Simulation(max_num_seqs=1)
    simulation.submit(traced(generate(0, [1] * 20, 200)))
    simulation.step()
    simulation.submit(msgspec.structs.replace(traced(generate(1, [2] * 20)), timeout_s=0.1))
    while 1 not in simulation.finished:
        simulation.step()
    times = times_of(simulation, 1)
    assert times.told_s >= 0.1
    assert times.started_s is times.first_token_s is None


def test_a_model_that_is_away_is_waited_for() -> None:
    """The second sequence arrives while the model is away."""
    simulation = Simulation(num_pages=128)
    simulation.submit(traced(generate(0, [1] * 20, 30)))
    simulation.step(3)
    simulation.suspend()
    left_s = simulation.clock.now
    runner = simulation.engine.runner
    simulation.engine.set_runner(None)
    assert runner is not None
    simulation.clock.now += 1.0
    simulation.submit(traced(generate(1, [2] * 20)))
    simulation.clock.now += 2.0
    simulation.step()
    simulation.engine.set_runner(runner)
    simulation.run()
    first, second = times_of(simulation, 0), times_of(simulation, 1)
    assert first.model_wait == pytest.approx((left_s - 1e-6, left_s - 1e-6 + 3.000001))
    assert first.preempted_s == pytest.approx([left_s - 1e-6])
    assert second.model_wait == pytest.approx((0.0, 2.0))
    assert second.started_s == pytest.approx(2.0)


def test_of_many_preemptions_the_first_are_told() -> None:
    simulation = Simulation(num_pages=128)
    simulation.submit(traced(generate(0, [1] * 20, 60)))
    for _ in range(MAX_PREEMPTIONS + 3):
        simulation.step()
        simulation.suspend()
    simulation.run()
    times = times_of(simulation, 0)
    assert times.num_preemptions == MAX_PREEMPTIONS + 3
    assert len(times.preempted_s) == MAX_PREEMPTIONS
    assert times.preempted_s == sorted(times.preempted_s)


def test_the_load_of_the_adapter_begins_with_the_sequence_at_the_earliest() -> None:
    simulation = Simulation(
        pool=StubPool(4, last_load=AdapterLoad("disk", -math.inf, 0.5, 0.25, 1))
    )
    simulation.run(traced(generate(0, [1] * 20, 2, "a")))
    assert simulation.finished[0] is FinishReason.LENGTH
    load = times_of(simulation, 0).adapter_load
    assert load is not None
    assert (load.tier, load.begun_s, load.ended_s) == ("disk", 0.0, pytest.approx(0.5 - 1e-6))
    assert load.copy_begun_s == pytest.approx(0.25 - 1e-6)
    assert load.num_evicted == 1
    assert isinstance(load, AdapterLoadTimes)
