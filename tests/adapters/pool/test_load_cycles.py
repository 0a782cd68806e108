"""Adapters that come and go under traffic that comes and goes: nothing is ever left behind.

A real worker on a tiny model, its engine turned by hand so that the accounting can be proved after
every step; a real loader thread.
"""

from __future__ import annotations

import gc
import json
import os
import random
import time
import weakref
from pathlib import Path

import psutil
import pytest

from adapters.manifest import BaseModelShape
from adapters.pool.pool import AdapterPool
from adapters.reference import AdapterRef
from adapters.store.folder import LocalStore
from memory.eviction.adapter_memory import UNIT_BYTES
from tests.adapters.pools import PoolSetup, evict_one
from tests.doubles import write_adapter
from tests.memory.holder import num_placements
from tests.scale import scaled
from tests.workers.driver import store_adapter
from tests.workers.process.test_worker import Setup
from workers.observe.status import check_integrity
from workers.process.build import Worker
from workers.verification.adapter_verifier import ModelInstance
from workers.wire.protocol import FinishReason, Generate, PromptProgress, SequenceOutput

NUM_CYCLES = scaled(150, 1000)
NUM_ADAPTERS = 12
NUM_PROMPTS = 5
NUM_TOKENS = 6
MAX_IN_FLIGHT = 8
HOST_BYTES = 6 * UNIT_BYTES
RSS_SLACK = 24 << 20
"""What the allocators may keep beyond what they had after the first third."""

Question = tuple[str, int]
"""(adapter digest, number of the prompt)."""


class Traffic:
    """Requests that come, finish, or are cancelled at random, against an engine turned by hand."""

    def __init__(self, setup: Setup, worker: Worker, seed: int) -> None:
        self.setup = setup
        self.engine = worker.instances[setup.digest].engine
        self.pool = worker.instances[setup.digest].pool
        self.memory = worker.memory.broker.lock
        self.rng = random.Random(seed)
        prompts = random.Random(1)
        self.prompts = [
            [prompts.randrange(256) for _ in range(prompts.randrange(4, 60))]
            for _ in range(NUM_PROMPTS)
        ]
        self.open: dict[int, tuple[Question, list[int]]] = {}
        self.answers: dict[Question, list[int]] = {}
        self.num_asked = self.num_answered = self.num_cancelled = 0

    def ask(self, ref: AdapterRef, prompt: int) -> None:
        number, self.num_asked = self.num_asked, self.num_asked + 1
        self.open[number] = (ref.digest, prompt), []
        with self.memory:
            assert self.engine.submit(0, self.request(number, ref, prompt)) is None

    def request(self, number: int, ref: AdapterRef, prompt: int) -> Generate:
        return self.setup.generate(number, self.prompts[prompt], NUM_TOKENS, ref)

    def ask_at_random(self, refs: list[AdapterRef]) -> None:
        """One to three choices of a request, as a gateway sends them."""
        ref, prompt = self.rng.choice(refs), self.rng.randrange(NUM_PROMPTS)
        for _ in range(self.rng.choice([1, 1, 3])):
            self.ask(ref, prompt)

    def cancel_at_random(self) -> None:
        number = self.rng.choice(list(self.open))
        del self.open[number]
        with self.memory:
            self.engine.abort(0, number)
        self.num_cancelled += 1

    def hint_at_random(self, refs: list[AdapterRef]) -> None:
        """As gateways do when they have authenticated a request."""
        with self.memory:
            self.pool.prefetch(self.rng.choice(refs))

    def step(self) -> None:
        """Each answer is whole and the one that its adapter always gives."""
        for _, event in self.engine.step():
            if isinstance(event, PromptProgress):
                continue
            assert isinstance(event, SequenceOutput), event
            question, tokens = self.open[event.id]
            tokens += event.tokens
            if event.finish_reason is not None:
                assert event.finish_reason is FinishReason.LENGTH
                assert self.answers.setdefault(question, tokens) == tokens
                del self.open[event.id]
                self.num_answered += 1

    def finish(self) -> None:
        while self.open:
            self.step()


@pytest.fixture(scope="module")
def setup(tmp_path_factory: pytest.TempPathFactory) -> Setup:
    return Setup(tmp_path_factory.mktemp("cycles"), "llama", {})


@pytest.fixture(scope="module")
def refs(setup: Setup) -> list[AdapterRef]:
    config = json.loads((setup.model / "config.json").read_text())
    shape = BaseModelShape.from_config(config, setup.digest)
    store = LocalStore(setup.folder / "store")
    made: list[AdapterRef] = []
    for seed in range(NUM_ADAPTERS):
        folder = setup.folder / f"adapter{seed}"
        write_adapter(shape, folder, rank=[2, 4, 8, 16][seed % 4], seed=seed, b_std=0.5)
        made.append(store_adapter(store, folder, shape))
    return made


def prove(instance: ModelInstance) -> None:
    check_integrity(instance.engine, instance.pool, instance.report)
    assert instance.report.num_integrity_failures == 0
    on_host = sum(
        entry.num_bytes for entry in instance.pool.entries.values() if entry.tier == "host"
    )
    assert on_host <= HOST_BYTES


def at_rest(pool: AdapterPool) -> tuple[int, int]:
    """Resident bytes and open descriptors of the process while no file is being read."""
    while pool.loads.num_open:
        time.sleep(0.001)
    gc.collect()
    return psutil.Process().memory_info().rss, len(os.listdir("/proc/self/fd"))


@pytest.mark.soak
def test_load_cycles_leave_nothing_behind(setup: Setup, refs: list[AdapterRef]) -> None:
    """As many loads onto the device, each in place of another adapter."""
    worker = Worker(
        setup.config(
            memory=24 * UNIT_BYTES,
            adapter_memory_max=12 * UNIT_BYTES,
            host_adapter_memory=HOST_BYTES,
            max_loaded_adapters=4,
            max_num_seqs=4,
        ),
        instance_id="cycles",
        progress=lambda *_: None,
    )
    instance = worker.instances[setup.digest]
    pool = instance.pool
    traffic = Traffic(setup, worker, seed=5)
    for ref in refs:
        for prompt in range(NUM_PROMPTS):
            traffic.ask(ref, prompt)
            traffic.finish()
    expected = dict(traffic.answers)
    assert len({tuple(tokens) for tokens in expected.values()}) > NUM_ADAPTERS
    begin = pool.device.num_evictions
    rss = descriptors = 0
    while (num_cycles := pool.device.num_evictions - begin) < NUM_CYCLES:
        if len(traffic.open) < MAX_IN_FLIGHT and traffic.rng.random() < 0.6:
            traffic.ask_at_random(refs)
        if traffic.open and traffic.rng.random() < 0.15:
            traffic.cancel_at_random()
        if traffic.rng.random() < 0.1:
            traffic.hint_at_random(refs)
        traffic.step()
        with worker.memory.broker.lock:
            prove(instance)
        if not rss and num_cycles >= NUM_CYCLES // 3:
            rss, descriptors = at_rest(pool)
    traffic.finish()
    assert traffic.answers == expected
    assert traffic.num_cancelled > NUM_CYCLES // 20
    rss_at_end, descriptors_at_end = at_rest(pool)
    assert rss_at_end - rss < RSS_SLACK
    assert descriptors_at_end == descriptors
    assert not any(entry.leases for entry in pool.entries.values())
    while evict_one(pool.device):
        pass
    prove(instance)
    assert num_placements(worker.memory.adapters) == 0 and "a" not in worker.memory.arena.map()
    pool.close()


def test_a_request_keeps_its_adapter_whatever_else_wants_the_room(
    setup: Setup, refs: list[AdapterRef]
) -> None:
    """Room for one: a request of three choices runs to its end, and only then it is the next
    adapter's turn; it does come."""
    worker = Worker(
        setup.config(memory=24 * UNIT_BYTES, max_loaded_adapters=1),
        instance_id="one",
        progress=lambda *_: None,
    )
    instance = worker.instances[setup.digest]
    engine, pool = instance.engine, instance.pool
    traffic = Traffic(setup, worker, seed=6)
    for ref in refs[:2]:
        traffic.ask(ref, 0)
        traffic.finish()
    for _ in range(3):
        traffic.ask(refs[0], 0)
    while len(engine.scheduler.running) < 3:
        traffic.step()
    traffic.ask(refs[1], 0)
    while engine.scheduler.running[0].adapter == refs[0]:
        with worker.memory.broker.lock:
            on_device = [s.digest for s in pool.entries.values() if s.tier == "device"]
            assert on_device == [refs[0].digest]
            assert not evict_one(pool.device)
        traffic.step()
        if not engine.scheduler.running:
            break
    traffic.finish()
    assert traffic.num_answered == 6 and not instance.report.num_integrity_failures
    pool.close()


def test_what_leaves_host_and_device_is_free_memory(tmp_path: Path) -> None:
    """At once, not when garbage is collected some day."""
    small = PoolSetup(tmp_path, [4, 4], num_units=1, host_bytes=UNIT_BYTES // 2)
    gc.collect()
    gc.disable()
    try:
        small.load(0).release()
        image = small.pool.entries[small.refs[0].digest].image
        assert image is not None
        payload = weakref.ref(image.payload)
        del image
        for _ in range(3):
            small.load(1).release()
        assert payload() is None
    finally:
        gc.enable()
    assert (small.tier(0), small.tier(1)) == ("disk", "device")
    assert num_placements(small.placements) == 1
    small.check()
