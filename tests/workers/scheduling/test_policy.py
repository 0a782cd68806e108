"""What every policy does for the scheduler, whatever their order: sequences end with the
tokens that they have alone, and nothing stays behind."""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import partial

import pytest

from memory.kv_cache import KVCache
from memory.page_key import PAGE_TOKENS
from ops.commands import PendingCommands
from tests.workers.simulation import (
    ANY_RATIO,
    Simulation,
    StubPool,
    assert_equals_alone,
    generate,
    prompt_of,
)
from tests.workers.simulator import SimulatedRunner
from workers.execution.step_input import PendingStep, StepInput
from workers.policies.fair_scheduler import fair_scheduler
from workers.scheduling.policy import FifoPolicy
from workers.scheduling.schedule import Schedule
from workers.scheduling.scheduler import Scheduler
from workers.scheduling.sequence import Sequence
from workers.wire.protocol import ErrorCode, Generate

pytestmark = pytest.mark.usefixtures("both_ways")


def fifo(
    kv: KVCache,
    pool: StubPool,
    commands: PendingCommands,
    *,
    max_num_seqs: int,
    max_batched_tokens: int,
    make_policy: Callable[[int], FifoPolicy] = FifoPolicy,
    **_: object,
) -> Scheduler:
    return Scheduler(
        *(kv, pool, commands, make_policy(max_batched_tokens)),
        max_num_seqs=max_num_seqs,
        max_batched_tokens=max_batched_tokens,
    )


@pytest.fixture(params=[fifo, fair_scheduler])
def simulation(request: pytest.FixtureRequest) -> Simulation:
    pool = StubPool(num_slots=2, delay_steps=2)
    return Simulation(
        num_pages=24, pool=pool, make_scheduler=request.param, max_gap_ratio=ANY_RATIO
    )


def mixed(count: int) -> list[Generate]:
    rng = random.Random(11)
    shared = prompt_of(rng, 2 * PAGE_TOKENS)
    return [
        generate(
            *(number, rng.choice([[], shared]) + prompt_of(rng, rng.randrange(1, 60))),
            *(rng.randrange(1, 30), rng.choice([None, "a", "b", "c"])),
            tenant=rng.choice(["x", "y"]),
        )
        for number in range(count)
    ]


class Charging(FifoPolicy):
    """Policy by which what a start is charged leaves its sequence no room in the step, as it may if
    it puts the tenant over its share."""

    def start(self, sequence: Sequence) -> None:
        self._room = 0


def test_no_chunk_of_a_prompt_is_empty() -> None:
    class Watching(SimulatedRunner):
        def launch(self, step: StepInput) -> PendingStep:
            assert step.counts.min() > 0
            return super().launch(step)

    pool = StubPool(num_slots=2, loaded_bytes=1 << 20)
    simulation = Simulation(
        pool=pool, runner=Watching, make_scheduler=partial(fifo, make_policy=Charging)
    )
    request = generate(0, [1] * 20, adapter="a")
    simulation.run(request)
    assert_equals_alone(simulation, [request])


def test_sequences_end_as_alone_under_preemption(simulation: Simulation) -> None:
    requests = mixed(24)
    for request in requests:
        simulation.submit(request)
        simulation.step()
    simulation.run()
    assert simulation.scheduler.num_preemptions > 0
    assert_equals_alone(simulation, requests)
    assert len(simulation.scheduler.waiting) == simulation.scheduler.num_waiting_tokens == 0
    assert not list(simulation.scheduler.policy.in_turn(Schedule()))
    simulation.assert_at_rest()


def test_aborted_and_suspended_sequences_leave_nothing(simulation: Simulation) -> None:
    requests = mixed(16)
    for request in requests:
        simulation.submit(request)
    simulation.step(6)
    aborted = [number for number in range(0, 16, 3) if number not in simulation.finished]
    for number in aborted:
        simulation.engine.abort(0, number)
    simulation.step()
    simulation.suspend()
    first = simulation.scheduler.first_waiting
    assert first is not None and first.is_waiting
    simulation.run()
    assert_equals_alone(simulation, [each for each in requests if each.id not in aborted])
    simulation.assert_at_rest()


def test_a_sequence_that_waits_beyond_its_deadline_expires(simulation: Simulation) -> None:
    requests = mixed(12)
    for request in requests:
        simulation.submit(request)
    simulation.submit(generate(12, [1] * 20, timeout_s=0.5))
    simulation.clock.now += 1.0
    simulation.run()
    assert simulation.finished[12] is ErrorCode.EXPIRED
    assert_equals_alone(simulation, requests)


def test_a_held_model_starts_nothing(simulation: Simulation) -> None:
    simulation.is_held = True
    for request in mixed(4):
        simulation.submit(request)
    simulation.step(3)
    assert not simulation.scheduler.running and len(simulation.scheduler.waiting) == 4
    simulation.is_held = False
    simulation.run()
    simulation.assert_at_rest()
