"""kill -9 of the gateway and of Postgres amid requests: whoever saw the end of an answer finds its
row, once and with the tokens that were told."""

from __future__ import annotations

import asyncio
import json
import os
import random
import signal
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from loraplex.box.postgres import EmbeddedPostgres
from loraplex.roles.bootstrap import migrate_database
from store.database import EVERYTHING, Database
from tests.gateway.live import Live
from tests.postgres import own_server
from tests.scale import scaled
from tests.scripted_worker import Reply
from workers.wire.protocol import Generate

pytestmark = pytest.mark.full

SEED = 17
NUM_REQUESTS = scaled(500, 20_000)
NUM_CLIENTS = 16
KILLS = ["gateway", "postgres", "gateway"] * scaled(1, 10)

Tokens = tuple[int, int]


class Plane:
    """Postgres as it is shipped, and a gateway; either is started again after a kill."""

    def __init__(self, postgres: EmbeddedPostgres, live: Live) -> None:
        self.seen: dict[str, Tokens] = {}
        """Request id to prompt and completion tokens, of answers whose end was seen."""
        self.num_broken = 0
        self._postgres = postgres
        self._live = live
        self.gateway = live.process(postgres.dsn())
        self._chance = random.Random(SEED)

    async def kill(self, what: str) -> None:
        if what == "gateway":
            await self.gateway.kill()
            await self.gateway.start()
        else:
            os.kill(self._postgres.pid, signal.SIGKILL)
            while self._postgres.running:
                await asyncio.sleep(0.01)
            await asyncio.sleep(self._chance.uniform(0, 2))
            await asyncio.to_thread(self._postgres.restart)

    async def ask(self) -> None:
        """One client, until all together have seen enough answers."""
        async with self.gateway.new_client(self._live.key) as client:
            while len(self.seen) < NUM_REQUESTS:
                try:
                    await self._ask_once(client)
                except httpx.TransportError:
                    self.num_broken += 1
                    await asyncio.sleep(0.1)

    async def _ask_once(self, client: httpx.AsyncClient) -> None:
        body = {
            "model": "tiny",
            "prompt": "Hi" * self._chance.randrange(1, 9),
            "max_tokens": self._chance.randrange(1, 9),
            "n": self._chance.choice([1, 1, 2]),
        }
        if self._chance.random() < 0.5:
            body |= {"stream": True, "stream_options": {"include_usage": True}}
        answer = await client.post("/v1/completions", json=body)
        if answer.status_code == 503:
            # It has no worker or no catalog yet.
            await asyncio.sleep(0.05)
            return
        assert answer.status_code == 200, answer.text
        usage = _usage(answer.text) if "stream" in body else answer.json()["usage"]
        if usage is None:
            self.num_broken += 1
            return
        request_id = answer.headers["x-request-id"]
        self.seen[request_id] = usage["prompt_tokens"], usage["completion_tokens"]

    async def rows(self) -> list[Any]:
        return await self._live.fetch("SELECT * FROM usage")

    async def sums(self) -> tuple[int, int, int]:
        query = "SELECT sum(requests), sum(prompt_tokens), sum(completion_tokens) FROM usage_hourly"
        (found,) = await self._live.fetch(query)
        requests, prompt, completion = map(int, found.values())
        return requests, prompt, completion

    async def kill_now_and_then(self) -> None:
        for number, what in enumerate(KILLS, start=1):
            while len(self.seen) < number * NUM_REQUESTS // (len(KILLS) + 1):
                await asyncio.sleep(0.01)
            await self.kill(what)


def _usage(text: str) -> Any:
    """Of a stream, None if its end was not seen."""
    if not text.endswith("data: [DONE]\n\n"):
        return None
    last = [line for line in text.splitlines() if line.startswith("data: ")][-2]
    return json.loads(last.removeprefix("data: "))["usage"]


@pytest.fixture
async def plane(tmp_path: Path) -> AsyncIterator[Plane]:
    with own_server() as postgres:
        await migrate_database(postgres.dsn())
        database = await Database.connect(postgres.dsn(), sees=EVERYTHING)
        live = Live(database, tmp_path)
        await live.prepare()
        live.worker.script = lambda request: Reply([65] * _length(request))
        async with live.worker:
            plane = Plane(postgres, live)
            await plane.gateway.start()
            try:
                yield plane
            finally:
                await plane.gateway.kill()
                await database.close()


def _length(request: Generate) -> int:
    return 1 + hash(tuple(request.tokens)) % 8


@pytest.mark.chaos
@pytest.mark.timeout(scaled(300, 3600))
async def test_usage_is_exact_through_kills(plane: Plane, tmp_path: Path) -> None:
    killing = asyncio.create_task(plane.kill_now_and_then())
    await asyncio.gather(*(plane.ask() for _ in range(NUM_CLIENTS)))
    await killing
    # Its clean end loads what is in the write-ahead log, what the killed ones left included.
    await plane.gateway.stop()
    assert [path for path in (tmp_path / "spool").iterdir() if path.is_dir()] == []
    assert plane.num_broken > 0, "no kill met a request"
    rows = await plane.rows()
    assert len(rows) == len({row["request_id"] for row in rows})
    told = {row["request_id"]: (row["prompt_tokens"], row["completion_tokens"]) for row in rows}
    assert {request_id: told.get(request_id) for request_id in plane.seen} == plane.seen
    assert await plane.sums() == (
        len(rows),
        sum(prompt for prompt, _ in told.values()),
        sum(completion for _, completion in told.values()),
    )
