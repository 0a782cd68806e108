"""`python -m benchmarks.refusals`: measures the cost of refused requests, and their effect on other
tenants.

There are three parts. The first measures the gateway's CPU time for a refusal before the body is
read, over 10,000 requests of each kind. The second measures first tokens and gaps between tokens of
another tenant, alone and during a flood of 1 MB requests. The third counts the prompts of 4,000
tokens that 32 clients finish if they wait for `retry-after`, and if they retry at once. Gateway,
Postgres and worker are separate processes. The worker serves a tiny model with the step times of a
large GPU (tests/e2e/paced_worker.py). `--small` only checks that everything runs.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import tempfile
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import msgspec
import psutil
from openai import AsyncOpenAI
from rich.console import Console
from rich.table import Table

from benchmarks.machine import describe
from tests.e2e.attack_client import Answers, AttackClient
from tests.e2e.cluster import Cluster
from tests.e2e.floods import (
    NO_TOKEN,
    NUM_CLIENTS,
    Noticed,
    finished_per_s,
    flood_order,
    flooded,
    flooding,
    large_request,
    limit,
    other_tenant,
)
from tests.e2e.shares import HEAVY, ORDINARY
from tests.e2e.tiny import NAME

NUM_CONNECTIONS = 8
SMALL_BODY = msgspec.json.encode({"model": NAME, "prompt": [NO_TOKEN] * 16, "max_tokens": 64})
"""Invalid request. If the limit of refusals has refilled a little, so that the body is read, the
request is still refused."""
BODIES = {"100 B": SMALL_BODY, "20 KB": SMALL_BODY.ljust(20_000)}
TOO_MANY = "too_many_refusals"

console = Console()


async def refusal_cost(cluster: Cluster, body: bytes, count: int) -> tuple[float, float, Answers]:
    """Returns the gateway's CPU time per refusal in milliseconds, the median milliseconds of a
    refusal if there is only one client, and all answers."""
    gateway, answers = cluster.gateways["gateway-0"], Answers()
    process = psutil.Process(gateway.pid)
    order = flood_order(gateway.url, cluster.keys[HEAVY])
    clients = [AttackClient(order, answers) for _ in range(NUM_CONNECTIONS)]
    seconds: list[float] = []
    for _ in range(100):
        began = time.perf_counter()
        await clients[0].ask(body)
        seconds.append(time.perf_counter() - began)

    async def ask(client: AttackClient) -> None:
        for _ in range(count // NUM_CONNECTIONS):
            await client.ask(body)

    before = sum(process.cpu_times()[:2])
    await asyncio.gather(*map(ask, clients))
    cpu_s = sum(process.cpu_times()[:2]) - before
    for client in clients:
        client.close()
    return cpu_s / count * 1e3, sorted(seconds)[len(seconds) // 2] * 1e3, answers


@asynccontextmanager
async def running_request(cluster: Cluster) -> AsyncIterator[None]:
    """Keeps a request of the tenant running in this context. It would take 90 seconds."""
    async with AsyncOpenAI(
        base_url=f"{cluster.gateways['gateway-0'].url}/v1", api_key=cluster.keys[HEAVY]
    ) as client:
        chunks = await client.completions.create(
            model=NAME, prompt=[1], max_tokens=8000, stream=True, extra_body={"ignore_eos": True}
        )
        await anext(chunks)
        yield
        await chunks.close()


async def use_up_refusals(cluster: Cluster) -> None:
    """Exhausts the tenant's limit of refusals, with requests that are refused after their bodies
    are read."""
    answers = Answers()
    order = flood_order(cluster.gateways["gateway-0"].url, cluster.keys[HEAVY])
    client = AttackClient(order, answers)
    body = large_request(random.Random(0), NO_TOKEN)
    while TOO_MANY not in answers.codes:
        await client.ask(body)
    client.close()


async def show_costs(cluster: Cluster, count: int) -> None:
    table = Table("refused for", "body", "CPU of the gateway", "time, median", "answers")
    for kind in ("requests_per_minute", "concurrent_requests", TOO_MANY):
        await limit(cluster, HEAVY, **({} if kind == TOO_MANY else {kind: 1}))
        for name, body in BODIES.items():
            async with AsyncExitStack() as stack:
                if kind == "concurrent_requests":
                    await stack.enter_async_context(running_request(cluster))
                if kind == TOO_MANY:
                    await use_up_refusals(cluster)
                cpu_ms, wall_ms, answers = await refusal_cost(cluster, body, count)
            told = f"{answers.statuses} {answers.codes}"
            table.add_row(kind, name, f"{cpu_ms:.3f} ms", f"{wall_ms:.2f} ms", told)
    console.print(table)


def noticed_row(name: str, noticed: Noticed) -> Sequence[str]:
    times = (noticed.p50_ttft_s, noticed.p99_ttft_s, noticed.p50_gap_s, noticed.p99_gap_s)
    served = f"{noticed.num_served} of {noticed.num_asked}"
    return (name, served, *(f"{seconds * 1e3:.1f}" for seconds in times))


async def show_other_tenant(cluster: Cluster, seconds: float) -> None:
    url, keys = cluster.gateways["gateway-0"].url, cluster.keys
    table = Table("beside", "served", "first token p50", "p99", "gap p50", "p99, in ms")
    for limits, last_token in (
        ({"requests_per_minute": 3}, 0),
        ({"concurrent_requests": 1}, 0),
        ({}, NO_TOKEN),
    ):
        await limit(cluster, HEAVY, **limits)
        alone = await other_tenant(url, keys[ORDINARY[0]], seconds)
        body = large_request(random.Random(0), last_token)
        async with flooding(url, keys[HEAVY], body) as answers:
            beside = await other_tenant(url, keys[ORDINARY[0]], seconds)
        table.add_row(*noticed_row("nothing", alone))
        table.add_row(*noticed_row(f"{limits or 'wrong requests'}", beside))
        console.print(f"{limits or 'wrong requests'}: {answers.statuses} {answers.codes}")
    console.print(table)


async def show_clients(cluster: Cluster, seconds: float) -> None:
    url, key = cluster.gateways["gateway-0"].url, cluster.keys[ORDINARY[1]]
    for is_patient in (True, False):
        per_s, answers = await finished_per_s(url, key, seconds, is_patient=is_patient)
        what = "wait as they are told" if is_patient else "ask again at once"
        console.print(
            f"{NUM_CLIENTS} clients that {what}: {per_s:.2f} prompts/s, {answers.statuses}"
        )


async def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--small", action="store_true")
    is_small = parser.parse_args().small
    console.print(describe())
    with tempfile.TemporaryDirectory() as folder:
        async with flooded(Path(folder)) as cluster:
            await show_costs(cluster, 400 if is_small else 10_000)
            await show_other_tenant(cluster, 3 if is_small else 60)
            await show_clients(cluster, 3 if is_small else 60)


if __name__ == "__main__":
    asyncio.run(main())
