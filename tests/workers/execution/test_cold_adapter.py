"""How many steps a cold adapter costs its first caller: the loop and the pool are real, the model
is made of digests (see simulator.py), and the loader works when a step's script says so."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import cast

import pytest

from adapters.reference import AdapterRef
from tests.adapters.pools import PoolSetup, SteppedExecutor
from tests.workers.no_models import make_loop
from tests.workers.simulation import generate
from tests.workers.simulator import VOCAB, FakeClock, SimulatedRunner, Slots
from workers.execution.engine import Engine
from workers.execution.step_input import PendingStep, StepInput
from workers.observe.report import EngineReport
from workers.observe.ring import StepRing
from workers.policies.fair_scheduler import fair_scheduler
from workers.process.server import Delivery
from workers.scheduling.constraint import Unconstrained
from workers.verification.adapter_verifier import ModelInstance
from workers.verification.effect_proof import EffectProof
from workers.wire.frames import Abort, Prefetch, StepFrame
from workers.wire.protocol import ModelInfo
from workers.wire.request_check import RequestLimits
from workers.wire.status import WorkerStatus

NUM_STEPS = 12
BACKGROUND, COLD = 0, 1
"""Ids of requests: one runs all the time, one comes while a step computes."""


class ScriptedRunner(SimulatedRunner):
    """Calls what the script has for a step, counted from 1, while that step computes."""

    script: dict[int, list[Callable[[], None]]]

    def launch(self, step: StepInput) -> PendingStep:
        launched = super().launch(step)
        for call in self.script.get(self.num_steps, []):
            call()
        return launched


class Worker:
    """A worker's loop, on the thread of the test, over a real pool of adapters of one unit."""

    def __init__(self, folder: Path, *, num_units: int = 16, max_num_seqs: int = 8) -> None:
        self.setup = setup = PoolSetup(folder, [4] * 3, num_units=num_units)
        slots = Slots()
        self.runner = ScriptedRunner(FakeClock(), slots)
        self.runner.script = {}
        self.scheduler = fair_scheduler(
            setup.kv,
            setup.pool,
            setup.pool.device.commands,
            max_num_seqs=max_num_seqs,
            max_batched_tokens=64,
        )
        slots.scheduler = self.scheduler
        info = ModelInfo("model", "m", 4096)
        report = EngineReport(info.name, self.scheduler, StepRing())
        engine = Engine(
            info,
            self.scheduler,
            self.runner,
            report,
            Unconstrained(),
            RequestLimits(4096, setup.kv.num_total, VOCAB, frozenset()),
            clock=self.runner.clock,
        )
        self.loop = make_loop(
            ModelInstance(engine, setup.pool, report, cast(EffectProof, None)),
            setup.broker.lock,
            self.runner.clock,
            deliver=self._take,
            status=lambda *_: WorkerStatus("w", False, [], [], 0, "", {}, 0, 0.0),
        )
        self.first_tokens: dict[int, int] = {}
        """The step that each request had its first token from."""

    @property
    def executor(self) -> SteppedExecutor:
        assert isinstance(self.setup.executor, SteppedExecutor)
        return self.setup.executor

    def bring(self, index: int, tier: str) -> None:
        if tier == "host":
            self.setup.pool.prefetch(self.setup.refs[index])
            self.setup.settle()
        elif tier == "device":
            self.setup.load(index).release()
        assert self.setup.tier(index) == (None if tier == "store" else tier)

    def during(self, step: int, *calls: Callable[[], None]) -> None:
        self.runner.script.setdefault(step, []).extend(calls)

    def ask(self, number: int, index: int | None = None, num_tokens: int = 1) -> None:
        adapter = None if index is None else self.setup.refs[index].digest
        self.loop.post(0, generate(number, [number + 1] * 4, num_tokens, adapter))

    def run(self, background: int | None = None) -> None:
        """NUM_STEPS steps of one request on the adapter `background`, beside what the script
        does."""
        for step in range(1, NUM_STEPS + 1):
            self.during(step, self._check)
        self.ask(BACKGROUND, background, NUM_STEPS)
        self.loop.run()

    def _check(self) -> None:
        held = [page for s in self.scheduler.running for page in s.block_table.held_pages]
        self.setup.check(held)

    def _take(self, delivery: Delivery) -> None:
        for _, message in delivery:
            for output in message.sequences if isinstance(message, StepFrame) else []:
                self.first_tokens.setdefault(output.id, self.runner.num_steps)
                if output.id == BACKGROUND and output.finish_reason is not None:
                    self.loop.stop()


@pytest.mark.parametrize("tier", ["device", "host", "store"])
def test_one_loaded_while_a_step_computes_runs_in_the_next(tmp_path: Path, tier: str) -> None:
    """From the host and from the store as from the device."""
    worker = Worker(tmp_path)
    worker.bring(0, tier)
    worker.during(3, lambda: worker.ask(COLD, 0), worker.executor.drain)
    worker.run()
    assert worker.first_tokens[COLD] == 4


def test_one_whose_copy_takes_longer_runs_in_the_first_step_after_it(tmp_path: Path) -> None:
    worker = Worker(tmp_path)
    worker.bring(0, "host")
    worker.during(3, lambda: worker.ask(COLD, 0))
    worker.during(6, worker.executor.drain)
    worker.run()
    assert worker.first_tokens[COLD] == 7


def test_a_hint_starts_the_load_while_a_step_computes(tmp_path: Path) -> None:
    worker = Worker(tmp_path)
    hint = Prefetch("model", AdapterRef(worker.setup.refs[0].digest))
    worker.during(3, lambda: worker.loop.post(0, hint), worker.executor.drain)
    seen: list[str | None] = []
    worker.during(3, lambda: seen.append(worker.setup.tier(0)))
    worker.run()
    assert seen == ["host"]


def test_a_load_takes_nothing_that_the_step_reads(tmp_path: Path) -> None:
    """Room for one adapter, which is in use."""
    worker = Worker(tmp_path, num_units=2)
    worker.bring(1, "host")
    worker.bring(0, "device")
    for step in range(3, NUM_STEPS):
        worker.during(step, worker.executor.drain)
    worker.during(3, lambda: worker.ask(COLD, 1))
    seen: list[set[int]] = []
    worker.during(NUM_STEPS, lambda: seen.append(worker.setup.on_device()))
    worker.run(background=0)
    assert seen == [{0}] and COLD not in worker.first_tokens


def test_one_that_must_wait_for_a_row_pushes_nothing_off_the_device(tmp_path: Path) -> None:
    worker = Worker(tmp_path, max_num_seqs=1)
    worker.bring(0, "host")
    worker.during(3, lambda: worker.ask(COLD, 0), worker.executor.drain)
    worker.during(5, worker.executor.drain, lambda: worker.loop.post(0, Abort(COLD)))
    worker.run()
    assert worker.setup.tier(0) == "host"


def test_nor_does_one_behind_another_that_takes_the_last_row(tmp_path: Path) -> None:
    worker = Worker(tmp_path, max_num_seqs=2)
    worker.bring(0, "host")
    worker.during(3, lambda: worker.ask(2, num_tokens=NUM_STEPS), lambda: worker.ask(COLD, 0))
    worker.during(4, worker.executor.drain)
    worker.during(5, worker.executor.drain, lambda: worker.loop.post(0, Abort(COLD)))
    worker.run()
    assert worker.first_tokens[2] == 4 and worker.setup.tier(0) == "host"
