"""Clients that leave at any moment: the worker is free again soon, and the gateway keeps nothing of
them."""

from __future__ import annotations

import asyncio
import json
import random
import signal
import time
from collections.abc import AsyncIterator
from pathlib import Path

import httpx
import pytest

from tests.e2e.cluster import TENANTS, Cluster, running_cluster
from tests.e2e.tiny import NAME
from tests.plane import START_TIMEOUT_S
from tests.scale import IS_FULL, scaled
from tests.waiting import eventually
from tests.worker_state import IN_USE, metrics_at

pytestmark = pytest.mark.full

SEED = 37
NUM_STREAMS = scaled(100, 1000)
NUM_CLIENTS = 16
FREE_S = 1
CENSUS_S = 30
"""A request that ends early is settled at most 2 s later, and a query takes milliseconds."""
MODELS = (NAME, "a000", "a001", "a002", "a003")
BOUNDED = {"Pool": 2 + 1 + 2 * (len(MODELS) - 1)}
"""Objects that follow the worker's reports, at most: the pool of all workers and the empty one, one
of the model, and two of each adapter. How many there are is up to which adapters are loaded."""


@pytest.fixture
async def cluster(tmp_path: Path) -> AsyncIterator[Cluster]:
    async with running_cluster(
        tmp_path, num_workers=1, num_gateways=0, num_adapters=4, max_num_seqs=8
    ) as cluster:
        addresses = [worker.address for worker in cluster.workers.values()]
        await cluster.add_gateway("gateway-0", addresses, "tests.e2e.census").start()
        await eventually(cluster.serves_adapters, START_TIMEOUT_S)
        yield cluster


@pytest.mark.soak
@pytest.mark.timeout(scaled(180, 900))
async def test_closed_streams_leave_nothing_behind(cluster: Cluster) -> None:
    """Streamed and whole, with an adapter and without, while they wait and while they run; with
    more clients than rows."""
    chance = random.Random(SEED)
    for model in MODELS:
        await ask(cluster, model)
    await leave_all(cluster, chance, NUM_CLIENTS)
    await free_again(cluster)
    before = await steady_census(cluster)
    await leave_all(cluster, chance, NUM_STREAMS)
    took_s = await free_again(cluster)
    after = await census_without_more(cluster, before)
    print(f"{NUM_STREAMS} streams closed, all free {took_s:.2f} s later; {after}")
    assert not IS_FULL or took_s < FREE_S
    await ask(cluster, NAME)


def client_of(cluster: Cluster) -> httpx.AsyncClient:
    headers = {"authorization": f"Bearer {cluster.keys[TENANTS[0]]}"}
    return httpx.AsyncClient(base_url=cluster.gateways["gateway-0"].url, headers=headers)


async def ask(cluster: Cluster, model: str) -> None:
    """And stay for the answer."""
    async with client_of(cluster) as client:
        body = {"model": model, "prompt": [1, 2, 3], "max_tokens": 4, "ignore_eos": True}
        answer = await client.post("/v1/completions", json=body, timeout=60)
    assert answer.json()["usage"]["completion_tokens"] == 4


async def leave_all(cluster: Cluster, chance: random.Random, count: int) -> None:
    left = iter(range(count))

    async def one_client() -> None:
        for _ in left:
            async with client_of(cluster) as client:
                if chance.random() < 0.7:
                    await leave_stream(client, chance)
                else:
                    await leave_soon(client, chance)

    await asyncio.gather(*(one_client() for _ in range(NUM_CLIENTS)))


async def leave_stream(client: httpx.AsyncClient, chance: random.Random) -> None:
    """After a number of tokens."""
    num_left = chance.randrange(1, 40)
    body = body_of(chance, stream=True)
    async with client.stream("POST", "/v1/completions", json=body, timeout=60) as answer:
        assert answer.status_code == 200
        async for line in answer.aiter_lines():
            num_left -= line.startswith("data: ")
            if not num_left:
                return


async def leave_soon(client: httpx.AsyncClient, chance: random.Random) -> None:
    """Most of the time before there is an answer."""
    body = body_of(chance, stream=chance.random() < 0.5)
    asking = asyncio.create_task(client.post("/v1/completions", json=body, timeout=60))
    await asyncio.wait([asking], timeout=chance.uniform(0.0, 0.2))
    asking.cancel()
    await asyncio.wait([asking])


def body_of(chance: random.Random, *, stream: bool) -> dict[str, object]:
    return {
        "model": chance.choice(MODELS),
        "prompt": [chance.randrange(256) for _ in range(20)],
        "max_tokens": 400,
        "ignore_eos": True,
        "n": chance.choice([1, 1, 2]),
        "stream": stream,
    }


async def free_again(cluster: Cluster) -> float:
    """Seconds until the worker says that nothing is in use."""
    began = time.monotonic()
    async with asyncio.timeout(60):
        while True:
            metrics = await metrics_at(cluster.workers["worker-0"].health)
            if not any(metrics[name] for name in IN_USE):
                return time.monotonic() - began
            await asyncio.sleep(0.02)


async def steady_census(cluster: Cluster) -> dict[str, int]:
    """The first census that a second one, half a second later, repeats. The gateway's control tasks
    query the database every few seconds, and a census in the middle of a query counts it."""
    async with asyncio.timeout(CENSUS_S):
        last = await census(cluster)
        while True:
            await asyncio.sleep(0.5)
            if (found := await census(cluster)) == last:
                return found
            last = found


async def census_without_more(cluster: Cluster, before: dict[str, int]) -> dict[str, int]:
    """The first census with no more of anything than `before`. What is left behind stays, in each
    census until the deadline."""
    deadline = time.monotonic() + CENSUS_S
    while True:
        found = await census(cluster)
        more = {kind: n for kind, n in found.items() if n > BOUNDED.get(kind, before.get(kind, 0))}
        if not more:
            return found
        assert time.monotonic() < deadline, f"more than before: {more}; before: {before}"
        await asyncio.sleep(0.1)


async def census(cluster: Cluster) -> dict[str, int]:
    """What the gateway has in memory now."""
    gateway = cluster.gateways["gateway-0"]
    path = cluster.setup.folder / gateway.name / "data" / "census.json"
    path.unlink(missing_ok=True)
    gateway.send(signal.SIGUSR1)
    async with asyncio.timeout(60):
        while not path.exists():
            await asyncio.sleep(0.05)
    return json.loads(path.read_text())
