"""Three gateways as processes share the limits of one tenant: never more than the limit, nobody
refused who had room, nothing held for ever by the dead."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import httpx
import pytest

from gateway.limits.leases import REFUSED_S
from store.database import EVERYTHING, Database
from tests.gateway.live import Live
from tests.postgres import fresh_database
from tests.scale import IS_FULL, scaled
from tests.scripted_worker import Reply
from tests.waiting import eventually
from workers.wire.protocol import Generate

pytestmark = pytest.mark.full

NUM_GATEWAYS = 3
NUM_STREAMS = 200
NUM_ROUNDS = scaled(2, 100)
NUM_KILLS = scaled(3, 50)
PROMPT_TOKENS = 2
MAX_TOKENS = 30
EACH = PROMPT_TOKENS + MAX_TOKENS
BUDGET = 40 * EACH
OFF = 1 << 40
LIMITS_WAIT_S = 1.0 if IS_FULL else 10.0
"""Gateways that share a busy machine take longer to give back."""


class Plane:
    """The gateways, and a client for each."""

    def __init__(self, live: Live, dsn: str) -> None:
        self.live = live
        self.gateways = [
            live.process(dsn, limits_wait_s=LIMITS_WAIT_S) for _ in range(NUM_GATEWAYS)
        ]
        self.clients: list[httpx.AsyncClient] = []
        self.random = random.Random(14)

    async def limit(self, *, key: bool = False, **limits: int) -> None:
        """All gateways know of it when this returns."""
        await self.live.limit(key=key, **limits)
        (row,) = await self.live.fetch("SELECT generation FROM catalog_generation")

        async def all_know() -> bool:
            behind = "SELECT 1 FROM gateways WHERE generation < $1"
            return not await self.live.fetch(behind, row["generation"])

        await eventually(all_know)

    async def complete(self, which: int, **fields: Any) -> httpx.Response:
        body = {"model": "tiny", "prompt": "Hi", "max_tokens": MAX_TOKENS} | fields
        return await self.clients[which % NUM_GATEWAYS].post("/v1/completions", json=body)

    async def used(self) -> int:
        """Metered tokens, once all that ended is loaded."""
        await eventually(self._is_quiet, timeout_s=60)
        (row,) = await self.live.fetch("SELECT coalesce(sum(metered_tokens), 0) AS n FROM usage")
        return int(row["n"])

    async def _is_quiet(self) -> bool:
        """Nothing is held for what is under way or not loaded."""
        (row,) = await self.live.fetch("SELECT coalesce(sum(granted), 0) AS n FROM quota_leases")
        return row["n"] == 0


@pytest.fixture
async def plane(tmp_path: Path) -> AsyncIterator[Plane]:
    with fresh_database() as dsn:
        database = await Database.connect(dsn, sees=EVERYTHING)
        live = Live(database, tmp_path)
        live.worker.step_s = 0.001
        await live.prepare()
        plane = Plane(live, dsn)
        async with live.worker, AsyncExitStack() as stack:
            await asyncio.gather(*(gateway.start() for gateway in plane.gateways))
            for gateway in plane.gateways:
                stack.push_async_callback(gateway.kill)
                client = gateway.new_client(live.key)
                client.timeout = httpx.Timeout(120)
                plane.clients.append(await stack.enter_async_context(client))
            yield plane
        await database.close()


def drawn(request: Generate) -> Reply:
    """As long as its seed says, at most what it may."""
    return Reply([65] * random.Random(request.params.seed).randint(1, request.params.max_tokens))


@pytest.mark.chaos
@pytest.mark.timeout(1800)
async def test_a_budget_is_never_exceeded(plane: Plane) -> None:
    """200 streams at once with room for 40, again and again. All of the budget is used but for less
    than one request."""
    plane.live.worker.script = drawn
    used = 0
    for _ in range(NUM_ROUNDS):
        budget = used + BUDGET
        await plane.limit(tokens_per_day=budget)
        answers = await asyncio.gather(
            *(
                plane.complete(
                    i, stream=plane.random.random() < 0.7, seed=plane.random.randrange(OFF)
                )
                for i in range(NUM_STREAMS)
            )
        )
        statuses = [answer.status_code for answer in answers]
        assert set(statuses) == {200, 429}
        assert statuses.count(200) >= 40
        # Whoever comes now gets what is left, however it is spread, once a gateway that has just
        # refused one asks the others again.
        for _ in range(2):
            await asyncio.sleep(REFUSED_S)
            while (await plane.complete(plane.random.randrange(3), seed=1)).status_code == 200:
                pass
        used = await plane.used()
        assert budget - EACH < used <= budget


@pytest.mark.chaos
@pytest.mark.timeout(1800)
async def test_the_dead_hold_nothing(plane: Plane) -> None:
    """kill -9 amid streams; what a gateway had promised is free once its usage is loaded."""
    plane.live.worker.script = drawn
    await plane.limit(tokens_per_day=OFF, concurrent_requests=400)
    for _ in range(NUM_KILLS):
        which = plane.random.randrange(NUM_GATEWAYS)
        streams = [
            asyncio.create_task(
                plane.complete(which + (i % 2), stream=True, seed=i, max_tokens=300)
            )
            for i in range(20)
        ]
        await asyncio.sleep(plane.random.uniform(0.0, 0.3))
        await plane.gateways[which].kill()
        await asyncio.gather(*streams, return_exceptions=True)
        await plane.gateways[which].start()
    used = await plane.used()
    (row,) = await plane.live.fetch(
        "SELECT metered_tokens AS n FROM usage_totals WHERE subject = $1 AND span = 'day'",
        plane.live.tenant_id,
    )
    assert row["n"] == used

    async def living_hold() -> bool:
        (row,) = await plane.live.fetch(
            "SELECT count(*) AS n FROM quota_holders WHERE gateway_id <> ''"
        )
        return row["n"] == NUM_GATEWAYS

    await eventually(living_hold)
