"""A key that is revoked, begins or ends is refused by every gateway soon, notified or not."""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import httpx
import pytest

from admin.keys import keys
from admin.keys.schemas import KeyCreate
from admin.tenants import tenants
from gateway.catalog.catalog import POLL_INTERVAL_S
from store.records import TENANT_SCOPES
from tests.gateway.live import Live
from tests.gateway.pepper import PEPPER
from tests.plane import Plane
from tests.proxy import PostgresProxy, Way
from tests.scale import scaled
from tests.scripted_worker import Reply
from tests.waiting import WAIT_S, eventually

pytestmark = pytest.mark.full

NUM_GATEWAYS = 3
TOLD_S = 1.0
"""Asked for where notifications arrive; ten times as much is the deadline here."""
UNTOLD_S = 60.0
"""Asked for where they do not."""
NEVER_S = 3600.0
LISTENS = re.compile(rb"(?<!UN)LISTEN")
"""Each connection that goes back to a pool says UNLISTEN."""


async def issue(live: Live, rights: KeyCreate) -> str:
    async with live.database.transaction() as connection:
        return (await keys.issue_key(connection, PEPPER, live.tenant_id, rights))[1]


@asynccontextmanager
async def gateways(live: Live, dsn: str, poll_interval_s: float) -> AsyncIterator[list[Plane]]:
    async with AsyncExitStack() as stack:
        await stack.enter_async_context(live.worker)
        made = [live.process(dsn, poll_interval_s=poll_interval_s) for _ in range(NUM_GATEWAYS)]
        for gateway in made:
            await gateway.start()
            stack.push_async_callback(gateway.kill)
        yield made


async def lets_in(gateway: Plane, key: str) -> bool:
    async with gateway.new_client(key) as client:
        status = (await client.get("/v1/models")).status_code
    assert status in (200, 401)
    return status == 200


async def revoke(live: Live, everywhere: list[Plane], within_s: float) -> float:
    """Seconds until no gateway lets a key in that was revoked."""
    key = await issue(live, KeyCreate(TENANT_SCOPES))
    for gateway in everywhere:
        await eventually(lambda gateway=gateway: lets_in(gateway, key), within_s)
    async with live.database.transaction() as connection:
        await keys.revoke_key(connection, key.split("_")[1])
    revoked_at = time.monotonic()

    async def until_refused(gateway: Plane) -> None:
        while await lets_in(gateway, key):
            await asyncio.sleep(0.01)

    async with asyncio.timeout(within_s):
        await asyncio.gather(*(until_refused(gateway) for gateway in everywhere))
    took_s = time.monotonic() - revoked_at
    for gateway in everywhere:
        assert not await lets_in(gateway, key)
    return took_s


@pytest.mark.timeout(300)
async def test_where_notifications_arrive(live: Live, dsn: str) -> None:
    """And where the connection that listens is killed again and again."""

    async def kill() -> None:
        while True:
            await live.fetch(
                "SELECT pg_terminate_backend(pid) FROM pg_stat_activity"
                " WHERE datname = current_database() AND application_name = 'loraplex-listen'"
            )
            await asyncio.sleep(0.05)

    async with gateways(live, dsn, NEVER_S) as everywhere:
        took = [await revoke(live, everywhere, 10 * TOLD_S) for _ in range(scaled(3, 20))]
        killing = asyncio.create_task(kill())
        killed_s = await revoke(live, everywhere, UNTOLD_S)
        killing.cancel()
    print(f"{NUM_GATEWAYS} gateways refused a revoked key within {max(took):.2f} s of {took}")
    print(f"listeners killed each 0.05 s: refused within {killed_s:.2f} s")


@pytest.mark.soak
@pytest.mark.timeout(600)
async def test_where_no_notification_arrives(live: Live, dsn: str, tmp_path: Path) -> None:
    """The connections that listen are open, and what is sent on them is lost."""
    interval_s = scaled(1, int(POLL_INTERVAL_S))
    async with (
        PostgresProxy(dsn, tmp_path / "proxy") as proxy,
        gateways(live, proxy.dsn, interval_s) as everywhere,
    ):
        proxy.ways["client"] = Way(swallows=lambda said: LISTENS.search(said) is not None)
        took = [await revoke(live, everywhere, UNTOLD_S) for _ in range(scaled(2, 5))]
    print(f"polled each {interval_s} s: {NUM_GATEWAYS} refused within {max(took):.2f} s of {took}")


async def test_a_key_begins_and_ends_though_nobody_says_so(live: Live) -> None:
    begins = datetime.now(UTC) + timedelta(seconds=4)
    ends = begins + timedelta(seconds=2)
    key = await issue(live, KeyCreate(TENANT_SCOPES, not_before=begins, expires_at=ends))
    async with live.worker, live.gateway() as plane:

        async def status() -> tuple[datetime, int, datetime]:
            headers = {"authorization": f"Bearer {key}"}
            before = datetime.now(UTC)
            code = (await plane.client.get("/v1/models", headers=headers)).status_code
            return before, code, datetime.now(UTC)

        generation = plane.gateway.catalog.current.generation
        seen: set[int] = set()
        while datetime.now(UTC) < ends + timedelta(seconds=1):
            before, code, after = await status()
            if after < begins or before > ends:
                assert code == 401
            elif begins < before and after < ends:
                assert code == 200
            seen.add(code)
            await asyncio.sleep(0.05)
        assert seen == {200, 401}
        assert plane.gateway.catalog.current.generation == generation


STREAMS: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": "Hi"},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "Hi"}]},
    "/v1/messages": {"messages": [{"role": "user", "content": "Hi"}]},
    "/v1/responses": {"input": "Hi"},
}


async def revoke_key(live: Live, key: str) -> None:
    async with live.database.transaction() as connection:
        await keys.revoke_key(connection, key.split("_")[1])


async def delete_tenant(live: Live, _key: str) -> None:
    async with live.database.transaction() as connection:
        tenant = await tenants.find_tenant(connection, live.tenant_id)
        await tenants.delete_tenant(connection, tenant)


async def let_expire(_live: Live, _key: str) -> None:
    """Its time is over meanwhile."""


@pytest.mark.parametrize("end", [revoke_key, delete_tenant, let_expire])
async def test_answers_in_progress_end_with_their_key(
    live: Live, end: Callable[[Live, str], Awaitable[None]]
) -> None:
    """Streams with an error of their dialect, others with 401; each is billed the tokens that it
    had by then. Those of other keys go on."""
    ends = datetime.now(UTC) + timedelta(seconds=6) if end is let_expire else None
    key = await issue(live, KeyCreate(TENANT_SCOPES, expires_at=ends))
    async with live.database.transaction() as connection:
        other_tenant = (await tenants.create_tenant(connection, "globex")).id
        _, other = await keys.create_key(connection, PEPPER, other_tenant, TENANT_SCOPES)
    live.worker.script, live.worker.step_s = lambda _: Reply([65], never_ends=True), 0.05
    async with live.worker, live.gateway() as plane:
        await eventually(lambda: other_tenant in plane.gateway.catalog.current.tenants)

        async def ask(path: str, key: str, **fields: Any) -> httpx.Response:
            sized = "max_output_tokens" if path == "/v1/responses" else "max_tokens"
            body = {"model": "tiny", sized: 400} | fields | STREAMS[path]
            headers = {"authorization": f"Bearer {key}"}
            return await plane.client.post(path, json=body, headers=headers)

        streams = [asyncio.create_task(ask(path, key, stream=True)) for path in STREAMS]
        whole = asyncio.create_task(ask("/v1/completions", key))
        going_on = asyncio.create_task(ask("/v1/completions", other, stream=True))
        await eventually(lambda: live.worker.num_running == len(STREAMS) + 2)
        await end(live, key)
        async with asyncio.timeout(WAIT_S):
            ended = await asyncio.gather(*streams)
            assert (await whole).status_code == 401
        for path, stream in zip(STREAMS, ended, strict=True):
            assert stream.status_code == 200, path
            *_, last = [line for line in stream.text.splitlines() if line.startswith("data: ")]
            assert "no longer valid" in last, path
            assert ("invalid_api_key" in last) or ("authentication_error" in last), path
        assert live.worker.num_running == 1 and not going_on.done()
        going_on.cancel()
        await eventually(lambda: has_rows(live, len(STREAMS) + 2))
        rows = await live.fetch("SELECT * FROM usage WHERE status = 'failed'")
    assert len(rows) == len(STREAMS) + 1
    told = {row["request_id"]: row["completion_tokens"] for row in rows}
    completions = ended[0].text.count('"text":"b"')
    assert told[ended[0].headers["x-request-id"]] == completions > 0
    assert all(0 < each < 400 for each in told.values())


async def has_rows(live: Live, number: int) -> bool:
    return len(await live.fetch("SELECT FROM usage")) == number
