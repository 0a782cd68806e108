"""Workers, gateways, Postgres and the network fail at random under traffic; afterwards the log of
all that clients were told, the ledger and the limits are checked against what always holds.

LORAPLEX_TEST_CHAOS_SEED and LORAPLEX_TEST_CHAOS_S give the seed and the seconds of a run.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import random
import time
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import httpx
import pytest

from admin.quotas.quotas import QuotaDetails, set_quota
from store.database import EVERYTHING, Database
from tests.e2e.chaos_checker import RECOVERY_S, broken_promises
from tests.e2e.chaos_faults import Faults
from tests.e2e.chaos_log import (
    Answered,
    Asked,
    Billed,
    Calm,
    Held,
    Known,
    Limited,
    Log,
    Struck,
    now,
)
from tests.e2e.cluster import TENANTS, Cluster, running_cluster
from tests.e2e.cluster import Asked as Request
from tests.e2e.tiny import NAME
from tests.outcome import End, Outcome, complete
from tests.postgres import server
from tests.proxy import Proxy
from tests.scale import IS_FULL
from tests.waiting import eventually
from tests.worker_state import IN_USE, metrics_at

pytestmark = pytest.mark.full

SEED = int(os.environ.get("LORAPLEX_TEST_CHAOS_SEED", time.time_ns() % 10**6))
CHAOS_S = float(os.environ.get("LORAPLEX_TEST_CHAOS_S", 1200))
NUM_CLIENTS = 10
NUM_REQUESTS = 24
"""Different ones; each is asked many times."""
TIMEOUT_S = 20.0
LIMIT_S = 120.0
"""A connection that stays silent is given up after 10 s, a worker waited for for 30 s; twice."""
MODELS = (NAME, "a000", "a001", "a002")
REST_S = 60.0
LIMITED = TENANTS[1]
BUDGET = 100 * round(CHAOS_S)
"""Tokens, about half of what it would use."""
NUM_WORKERS = 2
NUM_GATEWAYS = 2


class Run:
    """Clients, and what they write down."""

    def __init__(self, cluster: Cluster, log: Log, chance: random.Random) -> None:
        self.log = log
        self.requests = [
            Request.draw(chance, MODELS, chance.randrange(4, 60), chance.randrange(20, 300))
            for _ in range(NUM_REQUESTS)
        ]
        self._cluster = cluster
        self._chance = chance
        self._numbers = itertools.count(1)
        self._clients: dict[str, httpx.AsyncClient] = {}
        self._is_over = False

    async def __aenter__(self) -> Run:
        for name, gateway in self._cluster.gateways.items():
            self._clients[name] = httpx.AsyncClient(base_url=gateway.url)
        return self

    async def __aexit__(self, *_: object) -> None:
        for client in self._clients.values():
            await client.aclose()

    async def know(self) -> None:
        """Asks everything once, when nothing is wrong."""

        async def ask(number: int, request: Request) -> None:
            asked = self._asked("gateway-0", TENANTS[0], number, is_streamed=False)
            outcome = await self._complete("gateway-0", TENANTS[0], request, is_streamed=False)
            assert outcome.end is End.FINISHED
            known = Known(number, len(request.prompt), outcome.tokens[0])
            self.log.add(known, asked, Answered(now(), asked.number, outcome))

        await asyncio.gather(*(ask(*each) for each in enumerate(self.requests)))

    async def ask_on(self) -> None:
        """One client, until `end`."""
        while not self._is_over:
            outcome = await self.ask(
                self._chance.choice(list(self._clients)), self._chance.choice(TENANTS)
            )
            if outcome.end is not End.FINISHED:
                await asyncio.sleep(0.3)

    def end(self) -> None:
        self._is_over = True

    async def ask(self, gateway: str, tenant: str) -> Outcome:
        index, is_streamed = self._chance.randrange(NUM_REQUESTS), self._chance.random() < 0.7
        asked = self._asked(gateway, tenant, index, is_streamed)
        self.log.add(asked)
        outcome = await self._complete(gateway, tenant, self.requests[index], is_streamed)
        self.log.add(Answered(now(), asked.number, outcome))
        return outcome

    def _asked(self, gateway: str, tenant: str, request: int, is_streamed: bool) -> Asked:
        number = next(self._numbers)
        return Asked(now(), number, request, gateway, tenant, is_streamed, TIMEOUT_S, LIMIT_S)

    async def _complete(
        self, gateway: str, tenant: str, request: Request, is_streamed: bool
    ) -> Outcome:
        body = {
            "model": request.model,
            "prompt": list(request.prompt),
            "max_tokens": request.max_tokens,
            "temperature": request.temperature,
            "seed": request.seed,
            "ignore_eos": True,
            "stream": is_streamed,
        }
        key = self._cluster.keys[tenant]
        return await complete(
            self._clients[gateway], body, key=key, timeout_s=TIMEOUT_S, limit_s=LIMIT_S
        )

    async def become_calm(self) -> None:
        """Returns when each gateway serves."""

        async def serves(gateway: str) -> bool:
            return (await self.ask(gateway, TENANTS[0])).end is End.FINISHED

        for gateway in self._clients:
            await eventually(lambda g=gateway: serves(g), RECOVERY_S + LIMIT_S)
        self.log.add(Calm(now()))


async def take_stock(cluster: Cluster, log: Log) -> None:
    """Ends the gateways. Writes down what is held when all is quiet, and what is billed."""
    in_use = {name: await at_rest(worker.health) for name, worker in cluster.workers.items()}
    for gateway in cluster.gateways.values():
        assert await gateway.end() == 0
    # Its own connections may be of a Postgres that was.
    database = await Database.connect(cluster.dsn, sees=EVERYTHING)
    async with database.acquire() as connection:
        rows = await connection.fetch(
            "SELECT usage.*, name FROM usage JOIN tenants ON id = tenant_id"
        )
        (leases,) = await connection.fetch("SELECT coalesce(sum(granted), 0) FROM quota_leases")
    await database.close()
    for name, metrics in in_use.items():
        log.add(*(Held(f"{metric} of {name}", metrics[metric]) for metric in IN_USE))
    for name in cluster.gateways:
        spool = cluster.setup.folder / name / "data" / "spool"
        log.add(Held(f"logs of usage of {name}", sum(path.is_dir() for path in spool.iterdir())))
    log.add(Held("granted of limits", float(leases["coalesce"])))
    log.add(
        *(
            Billed(
                *(row["request_id"], row["name"], row["status"]),
                *(row["prompt_tokens"], row["completion_tokens"], row["metered_tokens"]),
            )
            for row in rows
        )
    )


async def at_rest(health: str) -> dict[str, float]:
    """A worker's metrics once nothing is in use, or when it is in use for too long."""
    until = now() + REST_S
    while True:
        metrics = await metrics_at(health)
        if not any(metrics[name] for name in IN_USE) or now() > until:
            return metrics
        await asyncio.sleep(0.2)


async def limit(cluster: Cluster, tenant: str, tokens: int) -> None:
    """Before its gateways have heard of a request of the tenant."""
    async with cluster.database.transaction() as connection:
        (row,) = await connection.fetch("SELECT id FROM tenants WHERE name = $1", tenant)
        quota = QuotaDetails(row["id"], tokens_per_month=tokens)
        await set_quota(connection, row["id"], None, quota)


@asynccontextmanager
async def proxied_cluster(folder: Path) -> AsyncIterator[tuple[Cluster, dict[str, Proxy]]]:
    """Gateways reach each worker through a proxy of its own."""
    async with AsyncExitStack() as stack:
        proxies: dict[str, Proxy] = {}
        for number in range(NUM_WORKERS):
            name = f"worker-{number}"
            proxy = Proxy(f"unix:{folder}/proxy-{number}", f"unix:{folder}/{name}/socket")
            proxies[name] = await stack.enter_async_context(proxy)
        reached_at = {proxy.target: proxy.address for proxy in proxies.values()}
        cluster = await stack.enter_async_context(
            running_cluster(
                folder,
                num_workers=NUM_WORKERS,
                num_gateways=NUM_GATEWAYS,
                num_adapters=len(MODELS) - 1,
                reached_at=reached_at.__getitem__,
            )
        )
        yield cluster, proxies


@pytest.mark.chaos
@pytest.mark.skipif(not IS_FULL, reason="a load of fixed length: make chaos")
@pytest.mark.timeout(CHAOS_S + 900)
async def test_random_faults_break_no_promise(tmp_path: Path) -> None:
    print(f"\nseed {SEED}, {CHAOS_S:g} s")
    chance = random.Random(SEED)
    log = Log(tmp_path / "chaos.jsonl")
    async with (
        proxied_cluster(tmp_path) as (cluster, proxies),
        Run(cluster, log, chance) as run,
    ):
        await limit(cluster, LIMITED, BUDGET)
        log.add(Limited(LIMITED, BUDGET))
        await run.know()
        faults = Faults(cluster, proxies, server(), log, random.Random(SEED + 1))
        async with asyncio.TaskGroup() as clients:
            for _ in range(NUM_CLIENTS):
                clients.create_task(run.ask_on())
            await faults.strike(CHAOS_S)
            run.end()
        await run.become_calm()
        for gateway, tenant in itertools.product(cluster.gateways, TENANTS):
            await asyncio.gather(*(run.ask(gateway, tenant) for _ in range(4)))
        await take_stock(cluster, log)
    print(summary(log))
    broken = broken_promises(log.events)
    assert not broken, f"{broken[:10]} (seed {SEED}), {log.path} ends with\n{log.tail()}"


def summary(log: Log) -> str:
    ends = Counter(e.outcome.code or e.outcome.end for e in log.events if isinstance(e, Answered))
    faults = Counter(event.kind for event in log.events if isinstance(event, Struck))
    return f"{dict(ends)} through {dict(faults)}"
