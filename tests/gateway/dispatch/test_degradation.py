"""Postgres stopped, hanging or slow under load: who is known is served, who is not is told to come
again, and nothing that was used is lost."""

from __future__ import annotations

import asyncio
import os
import signal
import statistics
import time
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from admin.keys import keys
from loraplex.box.postgres import EmbeddedPostgres
from loraplex.roles.bootstrap import migrate_database
from store.database import EVERYTHING, Database
from store.records import TENANT_SCOPES, new_key
from tests.gateway.live import Live
from tests.gateway.pepper import PEPPER
from tests.plane import Plane
from tests.postgres import own_server
from tests.proxy import PostgresProxy, Way, everything
from tests.scale import IS_FULL, scaled
from tests.waiting import eventually

pytestmark = pytest.mark.full

AWAY_S = scaled(0, 60)
NUM_CLIENTS = 8
GROWTH_BYTES = 64 << 20
REPLAY_S = 300.0
NOTICE_S = 60.0
"""A hang is seen by the poll's time limit alone."""
SLOWNESS_S = 2.0


class Load:
    """Clients that ask one after the other, whole and streamed; `async with` it."""

    def __init__(self, gateway: Plane, key: str) -> None:
        self.statuses: Counter[int | str] = Counter()
        self.request_ids: list[str] = []
        self.first_ms: list[float] = []
        """To the first line of each stream, since the last time it was cleared."""
        self._gateway = gateway
        self._key = key
        self._is_over = False

    async def __aenter__(self) -> Load:
        self._clients = [asyncio.create_task(self._ask()) for _ in range(NUM_CLIENTS)]
        return self

    async def __aexit__(self, *_: object) -> None:
        self._is_over = True
        await asyncio.gather(*self._clients)

    async def _ask(self) -> None:
        async with self._gateway.new_client(self._key) as client:
            while not self._is_over:
                await self._ask_whole(client)
                await self._ask_streamed(client)

    async def _ask_whole(self, client: httpx.AsyncClient) -> None:
        answer = await client.post("/v1/completions", json=BODY)
        self._note(answer, answer.status_code)

    async def _ask_streamed(self, client: httpx.AsyncClient) -> None:
        began = time.perf_counter()
        async with client.stream("POST", "/v1/completions", json=BODY | {"stream": True}) as answer:
            lines = answer.aiter_lines()
            await anext(lines)
            self.first_ms.append((time.perf_counter() - began) * 1e3)
            last = [line async for line in lines if line][-1]
        self._note(answer, answer.status_code if last == "data: [DONE]" else last)

    def _note(self, answer: httpx.Response, status: int | str) -> None:
        self.statuses[status] += 1
        if status == 200:
            self.request_ids.append(answer.headers["x-request-id"])


BODY = {"model": "tiny", "prompt": "Hi", "max_tokens": 3}


class Setup:
    """A Postgres of its own, what a gateway needs, and one gateway in a process of its own."""

    def __init__(self, postgres: EmbeddedPostgres, live: Live, gateway: Plane) -> None:
        self.live = live
        self.gateway = gateway
        self._postgres = postgres

    @asynccontextmanager
    async def stopped(self) -> AsyncIterator[None]:
        await asyncio.to_thread(self._postgres.stop)
        try:
            yield
        finally:
            await asyncio.to_thread(self._postgres.start)

    @asynccontextmanager
    async def hanging(self) -> AsyncIterator[None]:
        """All its processes are held: connections stay, and nothing answers."""
        self._signal(signal.SIGSTOP)
        try:
            yield
        finally:
            self._signal(signal.SIGCONT)

    def _signal(self, number: signal.Signals) -> None:
        children = Path(f"/proc/{self._postgres.pid}/task/{self._postgres.pid}/children")
        # The postmaster first, or it would go on making children.
        for pid in (self._postgres.pid, *map(int, children.read_text().split())):
            os.kill(pid, number)

    async def status(self, key: str) -> tuple[int, str | None]:
        """Of a request with the key, and the code of the refusal."""
        async with self.gateway.new_client(key) as client:
            answer = await client.get("/v1/models")
            error = answer.json().get("error", {})
            return answer.status_code, error.get("code")

    async def num_rows(self) -> int:
        return (await self.live.fetch("SELECT count(*) AS n FROM usage"))[0]["n"]


@pytest.fixture
async def postgres() -> AsyncIterator[EmbeddedPostgres]:
    with own_server() as postgres:
        await migrate_database(postgres.dsn())
        yield postgres


@asynccontextmanager
async def setup_on(
    postgres: EmbeddedPostgres, folder: Path, dsn: str = "", **options: Any
) -> AsyncIterator[Setup]:
    """`dsn`: the gateway's way to the database."""
    database = await Database.connect(postgres.dsn(), sees=EVERYTHING)
    live = Live(database, folder)
    try:
        await live.prepare()
        async with live.worker:
            gateway = live.process(dsn or postgres.dsn(), **options)
            await gateway.start()
            try:
                yield Setup(postgres, live, gateway)
            finally:
                await gateway.kill()
    finally:
        await database.close()


KINDS = {"stopped": Setup.stopped, "hanging": Setup.hanging}


@pytest.mark.chaos
@pytest.mark.timeout(900)
@pytest.mark.parametrize("kind", KINDS)
async def test_postgres_away_under_load(
    postgres: EmbeddedPostgres, tmp_path: Path, kind: str
) -> None:
    async with setup_on(postgres, tmp_path, poll_interval_s=scaled(1, 10)) as setup:
        stranger = new_key().text
        async with Load(setup.gateway, setup.live.key) as load:
            await asyncio.sleep(1)
            assert await setup.status(stranger) == (401, "invalid_api_key")
            resident = setup.gateway.resident_bytes
            async with KINDS[kind](setup):
                ends_at = time.monotonic() + AWAY_S
                # The gateway finds out by itself: at once if it is told, else by its next look.
                await eventually(lambda: _is_unconfirmed(setup, stranger), NOTICE_S)
                assert await setup.status(stranger[:-1] + "!") == (401, "invalid_api_key")
                await asyncio.sleep(max(ends_at - time.monotonic(), 0))
                grown = setup.gateway.resident_bytes - resident
            back_at = time.monotonic()
            asked = list(load.request_ids)
            await eventually(lambda: _is_unknown(setup, stranger))
        assert set(load.statuses) == {200}, load.statuses
        assert grown <= GROWTH_BYTES

        async def is_replayed() -> bool:
            found = "SELECT count(*) AS n FROM usage WHERE request_id = ANY ($1)"
            return (await setup.live.fetch(found, asked))[0]["n"] == len(asked)

        await eventually(is_replayed, REPLAY_S)
        print(
            f"{kind} for {AWAY_S} s: {load.statuses.total()} requests, memory + {grown >> 10} KiB,"
            f" replayed in {time.monotonic() - back_at:.1f} s"
        )
        await setup.gateway.stop()
        rows = await setup.live.fetch("SELECT request_id FROM usage")
        told = Counter(row["request_id"] for row in rows)
        assert max(told.values()) == 1
        assert told.keys() >= set(load.request_ids)


async def _is_unconfirmed(setup: Setup, key: str) -> bool:
    return await setup.status(key) == (503, "key_unconfirmed")


async def _is_unknown(setup: Setup, key: str) -> bool:
    return await setup.status(key) == (401, "invalid_api_key")


async def test_a_key_made_while_the_gateway_could_not_look(
    postgres: EmbeddedPostgres, tmp_path: Path
) -> None:
    """It is let in as soon as the gateway can."""
    async with (
        PostgresProxy(postgres.dsn(), tmp_path / "proxy") as proxy,
        setup_on(postgres, tmp_path, proxy.dsn, poll_interval_s=1) as setup,
    ):
        proxy.ways["client"] = Way(swallows=everything)
        proxy.reset()
        await eventually(lambda: _is_unconfirmed(setup, new_key().text))
        async with setup.live.database.transaction() as connection:
            made = await keys.create_key(connection, PEPPER, setup.live.tenant_id, TENANT_SCOPES)
        assert await setup.status(made[1]) == (503, "key_unconfirmed")
        proxy.ways["client"] = Way()
        proxy.reset()
        await eventually(lambda: _is_let_in(setup, made[1]))
        assert await setup.status(new_key().text) == (401, "invalid_api_key")


async def _is_let_in(setup: Setup, key: str) -> bool:
    return await setup.status(key) == (200, None)


async def test_too_long_without_postgres(postgres: EmbeddedPostgres, tmp_path: Path) -> None:
    """Nobody is served by a catalog of which it is not known any more whether it still holds."""
    async with setup_on(postgres, tmp_path, catalog_stale_s=3) as setup:
        async with setup.stopped():
            await eventually(lambda: _is_refused(setup, "catalog_stale"))
            async with setup.gateway.new_client(setup.live.key) as client:
                refused = await client.post("/v1/completions", json=BODY)
                ready = await client.get("/readyz")
            assert refused.status_code == 503
            assert refused.json()["error"]["code"] == "catalog_stale"
            assert int(refused.headers["retry-after"]) > 0
            assert ready.status_code == 503
            assert "stale" in ready.json()["reason"]
        await eventually(lambda: _is_let_in(setup, setup.live.key))


async def _is_refused(setup: Setup, code: str) -> bool:
    return await setup.status(setup.live.key) == (503, code)


@pytest.mark.chaos
@pytest.mark.skipif(not IS_FULL, reason="measures times: make chaos")
async def test_slow_postgres_slows_no_token(postgres: EmbeddedPostgres, tmp_path: Path) -> None:
    """Whatever waited for one answer of the database would take twice the delay."""
    async with (
        PostgresProxy(postgres.dsn(), tmp_path / "proxy") as proxy,
        setup_on(postgres, tmp_path, proxy.dsn) as setup,
        Load(setup.gateway, setup.live.key) as load,
    ):
        await asyncio.sleep(2)
        before = list(load.first_ms)
        proxy.set_both(Way(delay_s=SLOWNESS_S))
        load.first_ms.clear()
        await asyncio.sleep(60)
        during = list(load.first_ms)
    print(
        f"to the first token: {statistics.median(before):.1f} ms, at most {max(before):.1f};"
        f" Postgres slower by {SLOWNESS_S} s: {statistics.median(during):.1f}, {max(during):.1f}"
    )
    assert set(load.statuses) == {200}, load.statuses
    assert statistics.median(during) < 10 * statistics.median(before)
    assert max(during) < SLOWNESS_S * 1e3
