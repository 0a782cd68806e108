"""What one tenant floods a device with, others do not lose by it: engine, memory and pool are
real, the model is made of digests (see simulator.py)."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path

import pytest

from memory.page_key import PAGE_TOKENS
from tests.adapters.pools import PoolSetup, SteppedExecutor
from tests.workers.simulation import generate, prompt_of
from tests.workers.simulator import VOCAB, FakeClock, SimulatedRunner, Slots
from workers.execution.engine import Engine
from workers.execution.observer import NoObserver
from workers.policies.fair_scheduler import fair_scheduler
from workers.scheduling.constraint import Unconstrained
from workers.wire.protocol import Failed, ModelInfo, SequenceOutput
from workers.wire.request_check import RequestLimits

NUM_UNITS = 32
"""Of the arena: an extent is a unit, holds one adapter of rank 4, or four pages."""
NUM_FLOOD_ADAPTERS = 50
B_ADAPTER = NUM_FLOOD_ADAPTERS
"""Index of B's one adapter; those before it are A's."""
B_PROMPT = [7] * (4 * PAGE_TOKENS + 1)


class Worker:
    """An engine over a real pool, which loads between two steps."""

    def __init__(
        self,
        folder: Path,
        *,
        ranks: Sequence[int] = (4,) * (NUM_FLOOD_ADAPTERS + 1),
        num_rows: int = 8,
        extent_units: int = 1,
    ) -> None:
        self.setup = PoolSetup(
            folder,
            list(ranks),
            num_units=NUM_UNITS,
            num_slots=16,
            host_bytes=12 << 16,
            extent_units=extent_units,
        )
        self.clock = FakeClock()
        setup = self.setup
        slots = Slots()
        self.scheduler = fair_scheduler(
            setup.kv,
            setup.pool,
            setup.pool.device.commands,
            max_num_seqs=num_rows,
            max_batched_tokens=512,
        )
        slots.scheduler = self.scheduler
        self.engine = Engine(
            ModelInfo("model", "m", 4096),
            self.scheduler,
            SimulatedRunner(self.clock, slots),
            NoObserver(),
            Unconstrained(),
            RequestLimits(4096, setup.kv.num_total, VOCAB, frozenset()),
            clock=self.clock,
        )
        self.cached: dict[int, int] = {}
        self._number = 0

    def ask(self, tenant: str, prompt: list[int], adapter: int | None, num_tokens: int = 4) -> int:
        digest = None if adapter is None else self.setup.refs[adapter].digest
        self._number += 1
        request = generate(self._number, prompt, num_tokens, digest, tenant=tenant)
        assert self.engine.submit(0, request) is None
        return self._number

    def run(self, num_steps: int | None = None) -> None:
        """So many steps; None: until there is nothing to do."""
        assert isinstance(self.setup.executor, SteppedExecutor)
        for _ in range(20_000 if num_steps is None else num_steps):
            if not self.engine.has_work:
                return
            for _, event in self.engine.step():
                assert not isinstance(event, Failed), event
                if isinstance(event, SequenceOutput) and event.finish_reason is not None:
                    self.cached[event.id] = event.num_cached_tokens
            self.setup.executor.drain()
            self.setup.now = self.clock.now
            held = [page for s in self.scheduler.running for page in s.block_table.held_pages]
            self.setup.check(held)
        assert num_steps is not None, "it does not come to rest"

    def held(self, tenant: str) -> int:
        return self.setup.map.bytes_held.held.get(tenant, 0)


def flood(worker: Worker, turn: int) -> None:
    """Giant prompts, no two alike, each with another adapter."""
    for number in range(turn * 8, turn * 8 + 8):
        words = [1 + number % 30, 1 + number // 30]
        worker.ask("A", (words * 400)[: 12 * PAGE_TOKENS], number % NUM_FLOOD_ADAPTERS, 40)


@pytest.mark.full
def test_a_flood_ends_at_what_others_keep(tmp_path: Path) -> None:
    worker = Worker(tmp_path)
    worker.ask("B", B_PROMPT, B_ADAPTER)
    worker.run()
    kept = worker.held("B")
    assert worker.setup.tier(B_ADAPTER) == "device" and kept
    for turn in range(12):
        flood(worker, turn)
        worker.run(30)
        number = worker.ask("B", B_PROMPT, B_ADAPTER)
        assert worker.setup.tier(B_ADAPTER) == "device"
        while number not in worker.cached:
            worker.run(1)
        assert worker.cached[number] == 4 * PAGE_TOKENS, "its prefix is there still"
    worker.run()
    assert (
        worker.held("B") >= kept
        and worker.setup.pool.device.num_evictions > NUM_FLOOD_ADAPTERS // 2
    )
    assert worker.held("A") + worker.held("B") > 0.7 * worker.setup.map.num_bytes, (
        "A has all the rest"
    )


def test_who_is_alone_has_everything(tmp_path: Path) -> None:
    worker = Worker(tmp_path)
    for turn in range(4):
        flood(worker, turn)
    worker.run()
    assert worker.held("A") > 0.9 * worker.setup.map.num_bytes
    giant = worker.ask("A", [3] * (4 * (NUM_UNITS - 2) * PAGE_TOKENS), None)
    worker.run()
    assert giant in worker.cached


def test_a_prompt_larger_than_a_share_runs(tmp_path: Path) -> None:
    """At the cost of what others keep, and no more of it than it needs."""
    worker = Worker(tmp_path)
    for word in range(8, 20):
        worker.ask("B", [word] * (8 * PAGE_TOKENS), None)
    worker.run()
    giant = worker.ask("A", [3] * (80 * PAGE_TOKENS), None)
    worker.run()
    assert giant in worker.cached
    assert worker.held("B") >= worker.setup.map.num_bytes // 4


def test_an_adapter_does_not_wait_for_ever_for_pages_of_the_base(tmp_path: Path) -> None:
    """It takes two extents of sixteen pages, and sequences of the base, more than there is memory
    for at any time, take every page that comes free."""
    worker = Worker(tmp_path, ranks=[64], num_rows=32, extent_units=4)
    rng = random.Random(1)

    def crowd() -> None:
        while len(worker.scheduler.waiting) < 16:
            tenant = rng.choice(["A1", "A2", "A3", "A4"])
            worker.ask(tenant, prompt_of(rng, 60), None, rng.randrange(50, 100))

    while len(worker.cached) < 40:
        crowd()
        worker.run(1)
    own = worker.ask("B", prompt_of(rng, 20), 0)
    asked_s = worker.clock.now
    while own not in worker.cached and worker.clock.now < asked_s + 60.0:
        crowd()
        worker.run(1)
    assert own in worker.cached
