"""What one tenant floods a device with, others do not lose by it: engine, memory and pool are
real, the model is made of digests (see simulator.py)."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path

import pytest

from memory.page_key import PAGE_TOKENS
from tests.adapters.pools import House, SteppedExecutor
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


class Box:
    """An engine over a real pool, which loads between two steps."""

    def __init__(
        self,
        folder: Path,
        *,
        ranks: Sequence[int] = (4,) * (NUM_FLOOD_ADAPTERS + 1),
        num_rows: int = 8,
        extent_units: int = 1,
    ) -> None:
        self.house = House(
            folder,
            list(ranks),
            num_units=NUM_UNITS,
            num_slots=16,
            host_bytes=12 << 16,
            extent_units=extent_units,
        )
        self.clock = FakeClock()
        house = self.house
        slots = Slots()
        self.scheduler = fair_scheduler(
            house.kv,
            house.pool,
            house.pool.device.commands,
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
            RequestLimits(4096, house.kv.num_total, VOCAB, frozenset()),
            clock=self.clock,
        )
        self.cached: dict[int, int] = {}
        self._number = 0

    def ask(self, tenant: str, prompt: list[int], adapter: int | None, num_tokens: int = 4) -> int:
        digest = None if adapter is None else self.house.refs[adapter].digest
        self._number += 1
        request = generate(self._number, prompt, num_tokens, digest, tenant=tenant)
        assert self.engine.submit(0, request) is None
        return self._number

    def run(self, num_steps: int | None = None) -> None:
        """So many steps; None: until there is nothing to do."""
        assert isinstance(self.house.executor, SteppedExecutor)
        for _ in range(20_000 if num_steps is None else num_steps):
            if not self.engine.has_work:
                return
            for _, event in self.engine.step():
                assert not isinstance(event, Failed), event
                if isinstance(event, SequenceOutput) and event.finish_reason is not None:
                    self.cached[event.id] = event.num_cached_tokens
            self.house.executor.drain()
            self.house.now = self.clock.now
            held = [page for s in self.scheduler.running for page in s.block_table.held_pages]
            self.house.check(held)
        assert num_steps is not None, "it does not come to rest"

    def held(self, tenant: str) -> int:
        return self.house.map.bytes_held.held.get(tenant, 0)


def flood(box: Box, turn: int) -> None:
    """Giant prompts, no two alike, each with another adapter."""
    for number in range(turn * 8, turn * 8 + 8):
        words = [1 + number % 30, 1 + number // 30]
        box.ask("A", (words * 400)[: 12 * PAGE_TOKENS], number % NUM_FLOOD_ADAPTERS, 40)


@pytest.mark.full
def test_a_flood_ends_at_what_others_keep(tmp_path: Path) -> None:
    box = Box(tmp_path)
    box.ask("B", B_PROMPT, B_ADAPTER)
    box.run()
    kept = box.held("B")
    assert box.house.tier(B_ADAPTER) == "device" and kept
    for turn in range(12):
        flood(box, turn)
        box.run(30)
        number = box.ask("B", B_PROMPT, B_ADAPTER)
        assert box.house.tier(B_ADAPTER) == "device"
        while number not in box.cached:
            box.run(1)
        assert box.cached[number] == 4 * PAGE_TOKENS, "its prefix is there still"
    box.run()
    assert box.held("B") >= kept and box.house.pool.device.num_evictions > NUM_FLOOD_ADAPTERS // 2
    assert box.held("A") + box.held("B") > 0.7 * box.house.map.num_bytes, "A has all the rest"


def test_who_is_alone_has_everything(tmp_path: Path) -> None:
    box = Box(tmp_path)
    for turn in range(4):
        flood(box, turn)
    box.run()
    assert box.held("A") > 0.9 * box.house.map.num_bytes
    giant = box.ask("A", [3] * (4 * (NUM_UNITS - 2) * PAGE_TOKENS), None)
    box.run()
    assert giant in box.cached


def test_a_prompt_larger_than_a_share_runs(tmp_path: Path) -> None:
    """At the cost of what others keep, and no more of it than it needs."""
    box = Box(tmp_path)
    for word in range(8, 20):
        box.ask("B", [word] * (8 * PAGE_TOKENS), None)
    box.run()
    giant = box.ask("A", [3] * (80 * PAGE_TOKENS), None)
    box.run()
    assert giant in box.cached
    assert box.held("B") >= box.house.map.num_bytes // 4


def test_an_adapter_does_not_wait_for_ever_for_pages_of_the_base(tmp_path: Path) -> None:
    """It takes two extents of sixteen pages, and sequences of the base, more than there is memory
    for at any time, take every page that comes free."""
    box = Box(tmp_path, ranks=[64], num_rows=32, extent_units=4)
    rng = random.Random(1)

    def crowd() -> None:
        while box.scheduler.num_waiting < 16:
            tenant = rng.choice(["A1", "A2", "A3", "A4"])
            box.ask(tenant, prompt_of(rng, 60), None, rng.randrange(50, 100))

    while len(box.cached) < 40:
        crowd()
        box.run(1)
    own = box.ask("B", prompt_of(rng, 20), 0)
    asked_s = box.clock.now
    while own not in box.cached and box.clock.now < asked_s + 60.0:
        crowd()
        box.run(1)
    assert own in box.cached
