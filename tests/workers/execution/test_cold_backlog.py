"""Order of loads while tenants have backlogs of cold adapters. Everything is real except the model
(see simulator.py) and the store, which reads one adapter for each step of the engine."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from threading import Event, Lock
from typing import Any

import pytest

from adapters.pool.loads import Loads
from adapters.pool.packed_image import AdapterImage
from adapters.pool.pool import AdapterPool
from adapters.pool.source import AdapterUnavailable
from adapters.pool.turns import MAX_ASKERS
from adapters.reference import AdapterSignature
from memory.eviction.copy_queue import Copy, CopyQueue
from tests.adapters.pools import PoolSetup, SteppedExecutor
from tests.workers.simulation import generate
from tests.workers.simulator import VOCAB, FakeClock, SimulatedRunner, Slots
from workers.execution.engine import Engine
from workers.execution.observer import NoObserver
from workers.policies.fair_scheduler import fair_scheduler
from workers.policies.queue_limits import QueueBounds
from workers.scheduling.constraint import Unconstrained
from workers.wire.protocol import Failed, ModelInfo, ServiceClass
from workers.wire.request_check import RequestLimits

BACKLOG = 500
UNIT_IMAGE_RANK = 4


class SlowStore:
    """Loader of images that records the order in which they are fetched."""

    def __init__(self, image: AdapterImage, cached: set[str]) -> None:
        self.image = image
        self.cached = cached
        self.fetched: list[str] = []

    def is_cached(self, digest: str) -> bool:
        return digest in self.cached

    def fetch(
        self, digest: str, proved: str, signed: AdapterSignature | None, *, keeps_file: bool
    ) -> AdapterImage:
        self.fetched.append(digest)
        return replace(self.image, digest=digest)


class Worker:
    """An engine over a real pool. In each step, the store gives one image."""

    def __init__(
        self, folder: Path, *, num_slots: int = 64, max_num_seqs: int = 64, num_units: int = 256
    ) -> None:
        self.setup = setup = PoolSetup(
            *(folder, [UNIT_IMAGE_RANK]), num_units=num_units, adapter_units=(0, num_slots)
        )
        image = setup.loader.fetch(setup.refs[0].digest)
        self.store = SlowStore(image, set())
        self.fetcher, self.copier = SteppedExecutor(), SteppedExecutor()
        self.clock = FakeClock()
        setup.num_slots = num_slots
        device = setup.make_pool().device
        loads = Loads(
            *(self.store, setup.host, device),
            lock=setup.broker.lock,
            fetcher=self.fetcher,
            copier=self.copier,
            disk_bytes=1 << 30,
            clock=self.clock,
        )
        self.pool = AdapterPool(loads, requests=setup.requests, clock=self.clock)
        slots = Slots()
        scheduler = fair_scheduler(
            *(setup.kv, self.pool, self.pool.device.commands),
            max_num_seqs=max_num_seqs,
            max_batched_tokens=256,
            bounds=QueueBounds(max_wait_s=1e9),
        )
        slots.scheduler = scheduler
        self.engine = Engine(
            *(ModelInfo("model", "m", 4096), scheduler, SimulatedRunner(self.clock, slots)),
            *(NoObserver(), Unconstrained()),
            RequestLimits(4096, setup.kv.num_total, VOCAB, frozenset()),
            clock=self.clock,
        )
        self.failed: list[Failed] = []
        self.first_tokens: dict[int, int] = {}
        self.num_steps = self.num_asked = 0

    def ask(
        self, tenant: str, adapters: Iterable[str], num_tokens: int = 1, **fields: object
    ) -> int:
        """Requests the adapters. Returns the id of the last request."""
        for adapter in adapters:
            self.num_asked += 1
            request = generate(
                *(self.num_asked, [self.num_asked % 90] * 4, num_tokens, adapter),
                **{"tenant": tenant, **fields},
            )
            with self.setup.broker.lock:
                self.failed += [
                    event
                    for _, event in self.engine.offer(0, request, self.clock.now)
                    if isinstance(event, Failed)
                ]
        return self.num_asked

    def step(self, times: int = 1) -> None:
        for _ in range(times):
            self.num_steps += 1
            self.clock.now += 0.05
            self.setup.now = self.clock.now
            for _, event in self.engine.step():
                if isinstance(event, Failed):
                    self.failed.append(event)
                else:
                    self.first_tokens.setdefault(event.id, self.num_steps)
            self.fetcher.step()
            self.copier.drain()

    def check(self) -> None:
        assert not self.failed
        with self.setup.broker.lock:
            self.pool.check_integrity()


def names(tenant: str, count: int = BACKLOG) -> list[str]:
    return [f"{tenant}{number}" for number in range(count)]


def num_before(worker: Worker, digest: str, since: int) -> int:
    """Number of fetches that began after the first `since` and before the adapter's."""
    return worker.store.fetched.index(digest) - since


@pytest.mark.parametrize("after", [0, 1, 100])
def test_one_cold_adapter_is_fetched_next_whatever_another_tenant_waits_for(
    tmp_path: Path, after: int
) -> None:
    worker = Worker(tmp_path)
    worker.ask("a", names("a"))
    worker.step(after)
    since = len(worker.store.fetched)
    number = worker.ask("b", ["b"])
    worker.step(8)
    assert num_before(worker, "b", since) <= 1
    assert worker.first_tokens[number] <= after + 5
    worker.check()


def test_the_order_of_requests_makes_no_difference(tmp_path: Path) -> None:
    worker = Worker(tmp_path)
    worker.ask("a", names("a")[:250])
    worker.ask("b", ["b"])
    worker.ask("a", names("a")[250:])
    worker.step(8)
    assert num_before(worker, "b", 0) <= 1


def test_two_backlogs_delay_a_third_tenant_no_more_than_one(tmp_path: Path) -> None:
    worker = Worker(tmp_path)
    worker.ask("a", names("a"))
    worker.ask("c", names("c"))
    worker.step(20)
    since = len(worker.store.fetched)
    worker.ask("b", ["b"])
    worker.step(8)
    assert num_before(worker, "b", since) <= 1
    counts = Counter(digest[0] for digest in worker.store.fetched)
    assert abs(counts["a"] - counts["c"]) <= 2


@pytest.mark.parametrize("own", list(ServiceClass))
@pytest.mark.parametrize("others", list(ServiceClass))
def test_no_class_keeps_another_tenants_adapter_waiting(
    tmp_path: Path, own: ServiceClass, others: ServiceClass
) -> None:
    worker = Worker(tmp_path)
    worker.ask("a", names("a"), service_class=others)
    worker.step(10)
    since = len(worker.store.fetched)
    worker.ask("b", ["b"], service_class=own)
    worker.step(8)
    assert num_before(worker, "b", since) <= 1


def test_a_tenants_own_backlog_is_fetched_in_the_order_of_the_policy(tmp_path: Path) -> None:
    worker = Worker(tmp_path)
    worker.ask("a", names("a"), service_class=ServiceClass.BATCH)
    worker.step(10)
    since = len(worker.store.fetched)
    worker.ask("a", ["urgent"], service_class=ServiceClass.INTERACTIVE)
    worker.step(4)
    assert num_before(worker, "urgent", since) <= 1


def test_an_adapter_that_two_tenants_want_counts_for_both(tmp_path: Path) -> None:
    """The last of a's backlog is also b's only adapter."""
    worker = Worker(tmp_path)
    worker.ask("a", names("a"))
    worker.step(10)
    since = len(worker.store.fetched)
    worker.ask("b", ["a499"])
    worker.ask("a", ["a499"])
    worker.step(4)
    assert num_before(worker, "a499", since) <= 1


def test_the_tiers_make_no_difference(tmp_path: Path) -> None:
    """The backlog comes from the store, b's adapter from the disk and then from the host."""
    worker = Worker(tmp_path)
    worker.store.cached.add("b")
    worker.ask("a", names("a"))
    worker.step(10)
    since = len(worker.store.fetched)
    worker.ask("b", ["b"])
    worker.step(8)
    assert num_before(worker, "b", since) <= 1
    with worker.setup.broker.lock:
        worker.pool.device.free(worker.pool.entries["b"])
    begun = worker.num_steps
    number = worker.ask("b", ["b"])
    worker.step(3)
    assert worker.first_tokens[number] <= begun + 3


@pytest.mark.parametrize("max_num_seqs", [4, 64])
@pytest.mark.parametrize("own", list(ServiceClass))
def test_a_full_device_gives_the_next_room_to_the_tenant_that_has_none(
    tmp_path: Path, max_num_seqs: int, own: ServiceClass
) -> None:
    """All adapters in use are a's, and many others of a starve. One of those in use ends at least
    every `num_tokens` steps, and b's adapter gets its room."""
    num_tokens = 40
    worker = Worker(tmp_path, num_slots=4, max_num_seqs=max_num_seqs)
    worker.ask("a", names("a"), num_tokens, service_class=ServiceClass.STANDARD)
    worker.step(200)
    number, asked = worker.ask("b", ["b"], service_class=own), worker.num_steps
    worker.step(num_tokens + 8)
    assert number in worker.first_tokens, worker.num_steps - asked
    worker.check()


def test_requests_to_the_pool_are_bounded_however_many_tenants_wait(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each request takes time of the engine thread in every step."""
    worker, requested = Worker(tmp_path), Counter[int]()
    entry_of = worker.pool._entry  # pyright: ignore[reportPrivateUsage]

    def count(*args: Any) -> Any:
        requested[worker.num_steps] += 1
        return entry_of(*args)

    monkeypatch.setattr(worker.pool, "_entry", count)
    for number in range(3 * MAX_ASKERS):
        worker.ask(f"t{number}", [f"t{number}"])
    since = len(worker.store.fetched)
    while worker.engine.has_work:
        worker.step()
        # What starts in a step has found its adapter on the device.
        assert requested[worker.num_steps] <= MAX_ASKERS + 64
    assert len(worker.store.fetched) - since == 3 * MAX_ASKERS == len(worker.first_tokens)
    worker.check()


@pytest.mark.parametrize("num_threads", [2, 4])
def test_a_tenant_whose_store_hangs_leaves_a_thread_to_others(num_threads: int) -> None:
    lock, may_end, came = Lock(), Event(), Event()

    def hang() -> None:
        assert may_end.wait(60)
        raise AdapterUnavailable("adapter.store.unreadable", "timed out")

    with ThreadPoolExecutor(num_threads) as executor:
        queue = CopyQueue[None](executor, lock, num_threads=num_threads)
        ended: list[object] = []
        with lock:
            for _ in range(20):
                queue.submit(Copy(hang, ended.append, {"a": (0.0, 0)}))
            queue.submit(Copy(came.set, ended.append, {"b": (0.0, 0)}))
        assert came.wait(30), "b waits for a's store"
        may_end.set()
        while queue.num_open:
            pass
    assert len(ended) == 21
