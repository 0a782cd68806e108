"""Four workers, two hundred adapters, one gateway: requests go where their adapters and prefixes
are, and a hot adapter spreads."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import pytest_asyncio

from gateway.dispatch.fleet import Fleet
from tests.e2e.cluster import Cluster
from tests.e2e.fleet import Answer, FleetPlane, FleetSetup, RoundRobin
from tests.e2e.open_loop import Ask
from tests.e2e.shares import FEW_ROWS, ORDINARY, capacity, make, paced
from tests.plane import START_TIMEOUT_S
from tests.scale import IS_FULL
from tests.waiting import eventually

pytestmark = pytest.mark.full

NUM_WORKERS = 4
NUM_ADAPTERS = 200
NUM_REQUESTS = 3000
SHARED_TOKENS = 320
"""Of each adapter's prompts."""


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def plane(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[FleetPlane]:
    """Each worker has room for an eighth of the adapters on the device, which prefixes do not take
    though they are worth more, and for twice as many on the host."""
    setup = FleetSetup(tmp_path_factory.mktemp("fleet"), NUM_ADAPTERS)
    room = {
        "max_loaded_adapters": 25,
        "adapter_memory_min": 2 << 20,
        "host_adapter_memory": 50 * 64 << 10,
        "memory": 12 << 20,
    }
    async with setup.plane(NUM_WORKERS, **room) as plane:
        yield plane


@dataclass(frozen=True)
class Rates:
    adapters: float
    """Requests that found their adapter on the device."""
    prefixes: float
    """Prompt tokens that were cached."""
    p50: float
    p99: float
    """Of the time to the first token."""


class Traffic:
    """Zipf over some adapters, each with its own beginning of all prompts."""

    def __init__(self, plane: FleetPlane, adapters: Sequence[str], fleet: Fleet) -> None:
        self._plane = plane
        self._fleet = fleet
        self._rng = random.Random(1)
        self._adapters = adapters
        self._popular = [1 / (rank + 1) for rank in range(len(adapters))]
        self._beginnings = {a: self._tokens(SHARED_TOKENS) for a in adapters}
        self._answers: list[Answer] = []
        self._num_loads = 0

    async def send(self, count: int, *, is_measured: bool) -> None:
        self._plane.gateway.fleet = self._fleet
        before = self._plane.num_adapter_loads
        answers = await self._plane.ask_many(self._draw, count, concurrency=8)
        await self._plane.told()
        if is_measured:
            self._answers += answers
            self._num_loads += self._plane.num_adapter_loads - before

    @property
    def rates(self) -> Rates:
        answers = self._answers
        times = sorted(answer.ttft_s for answer in answers)
        return Rates(
            1 - self._num_loads / len(answers),
            sum(a.num_cached for a in answers) / sum(a.num_prompt for a in answers),
            times[len(times) // 2],
            times[int(0.99 * len(times))],
        )

    def _draw(self) -> tuple[str, list[int]]:
        (adapter,) = self._rng.choices(self._adapters, self._popular)
        return adapter, self._beginnings[adapter] + self._tokens(40)

    def _tokens(self, count: int) -> list[int]:
        return [self._rng.randrange(256) for _ in range(count)]


@pytest.mark.timeout(300)
@pytest.mark.asyncio(loop_scope="module")
async def test_a_hot_adapter_spreads(plane: FleetPlane) -> None:
    """When it is nine tenths of the traffic, at least three of four workers get it."""
    rng = random.Random(2)
    hot, *others = plane.digests
    assert plane.holders(plane.digests[hot]) == 0

    def prompt() -> list[int]:
        return [rng.randrange(256) for _ in range(200)]

    def draw() -> tuple[str, list[int]]:
        return (hot if rng.random() < 0.9 else rng.choice(others)), prompt()

    async def flood() -> None:
        while True:
            await plane.ask_many(draw, 48, concurrency=24)

    traffic = asyncio.create_task(flood())
    try:
        await eventually(lambda: plane.holders(plane.digests[hot]) >= 3, 100.0)
    finally:
        traffic.cancel()
        await asyncio.wait([traffic])


@pytest.mark.soak
@pytest.mark.skipif(not IS_FULL, reason="measures a rate: make soak")
@pytest.mark.timeout(1800)
async def test_four_workers_serve_a_hot_adapter_three_times_as_fast_as_one(tmp_path: Path) -> None:
    room = {"num_adapters": 8, "max_num_seqs": FEW_ROWS}
    async with paced(tmp_path, NUM_WORKERS, **room) as (cluster, url):
        alone = cluster.add_gateway("alone", [cluster.workers["worker-0"].address])
        await alone.start()
        await eventually(cluster.serves_adapters, START_TIMEOUT_S)
        one = await hot_requests_per_s(cluster, alone.url, 1)
        four = await hot_requests_per_s(cluster, url, NUM_WORKERS)
    print(f"\none {one:.1f} requests/s, {NUM_WORKERS} {four:.1f}")
    assert four >= 3.0 * one


async def hot_requests_per_s(cluster: Cluster, url: str, num_workers: int) -> float:
    """Of a closed loop, nine tenths of whose requests are one adapter's, when it has spread."""
    rng = random.Random(3)
    hot, *others = cluster.setup.digests
    plain = make(rng, ORDINARY[0], cluster.keys[ORDINARY[0]])

    def ask() -> Ask:
        return replace(plain(), model=hot if rng.random() < 0.9 else rng.choice(others))

    num_clients = 2 * num_workers * FEW_ROWS
    await capacity(url, ask, num_clients, 10)
    return await capacity(url, ask, num_clients, 30)


@pytest.mark.soak
@pytest.mark.skipif(not IS_FULL, reason="measures a rate: make soak")
@pytest.mark.timeout(1800)
@pytest.mark.asyncio(loop_scope="module")
async def test_requests_go_where_their_adapters_and_prefixes_are(plane: FleetPlane) -> None:
    """Half of the adapters by turns, then the other half by prediction, so that it finds nothing
    that was brought before. As many requests as are measured fill the caches."""
    names, fleet = list(plane.digests), plane.gateway.fleet
    by_turns = Traffic(plane, names[::2], RoundRobin(fleet.clients))
    ours = Traffic(plane, names[1::2], fleet)
    for traffic in (by_turns, ours):
        await traffic.send(NUM_REQUESTS, is_measured=False)
        await traffic.send(NUM_REQUESTS, is_measured=True)
    plane.gateway.fleet = fleet
    print(f"\nround robin {by_turns.rates}\nours        {ours.rates}")
    assert ours.rates.adapters > by_turns.rates.adapters
    assert ours.rates.prefixes > by_turns.rates.prefixes + 0.05
