"""What a gateway says of itself, in a real Postgres: by it others know when a version is unused."""

from __future__ import annotations

import asyncio
from typing import Any

from admin.adapters import aliases, retirement
from tests.admin.lifecycle import add
from tests.gateway.live import Live
from tests.scripted_worker import Reply
from tests.waiting import eventually
from workers.wire.protocol import Generate


async def row(live: Live) -> Any:
    rows = await live.fetch("SELECT * FROM gateways")
    return rows[0] if rows else None


async def generation(live: Live) -> int:
    return (await live.fetch("SELECT generation FROM catalog_generation"))[0]["generation"]


def endless(_: Generate) -> Reply:
    return Reply([65], never_ends=True)


async def test_it_comes_follows_the_catalog_and_goes(live: Live) -> None:
    async with live.worker, live.gateway("gateway-7") as plane:
        found = await row(live)
        assert (found["id"], found["in_flight"]) == ("gateway-7", {})
        async with live.database.transaction() as connection:
            await add(connection, live.tenant_id, "a")
        newest = await generation(live)
        await eventually(lambda: _has_reached(live, newest))
        assert plane.gateway.catalog.current.generation >= newest
        seen_at = (await row(live))["seen_at"]
        await eventually(lambda: _was_seen_after(live, seen_at))
    assert await row(live) is None


async def _has_reached(live: Live, generation: int) -> bool:
    return (await row(live))["generation"] >= generation


async def _was_seen_after(live: Live, moment: Any) -> bool:
    return (await row(live))["seen_at"] > moment


async def _is_in_flight(live: Live, wanted: dict[str, int]) -> bool:
    return (await row(live))["in_flight"] == wanted


async def test_requests_in_flight_are_told_by_version(live: Live) -> None:
    live.worker.script, live.worker.step_s = endless, 0.02
    await live.make_ready("a")
    key = f"{live.tenant_id}/bot/1"
    async with live.worker, live.gateway() as plane:
        body = {"model": "bot", "prompt": "Hi", "max_tokens": 400, "stream": True}
        async with (
            plane.client.stream("POST", "/v1/completions", json=body),
            plane.client.stream("POST", "/v1/completions", json=body),
        ):
            await eventually(lambda: _is_in_flight(live, {key: 2}))
        await eventually(lambda: _is_in_flight(live, {}))


async def test_a_retired_version_ends_with_its_last_request(live: Live) -> None:
    """New requests do not find it once its retirement was seen; the one that had it goes on."""
    live.worker.script, live.worker.step_s = endless, 0.02
    await live.make_ready("a", "b")
    async with live.worker, live.gateway() as plane:
        async with live.database.transaction() as connection:
            await aliases.set_alias(connection, live.tenant_id, "bot", "prod", 2)
        body = {"model": "bot@1", "prompt": "Hi", "max_tokens": 400, "stream": True}
        async with plane.client.stream("POST", "/v1/completions", json=body) as stream:
            lines = stream.aiter_lines()
            await anext(lines)
            async with live.database.transaction() as connection:
                gone = await retirement.retire_version(connection, live.tenant_id, "bot", 1)

            async def progress() -> retirement.RetirementProgress:
                async with live.database.acquire() as connection:
                    return await retirement.retirement_progress(connection, gone)

            async def is_known() -> bool:
                return (await progress()).is_known

            await eventually(is_known)
            assert (await progress()).in_flight == 1
            assert (await plane.complete("bot@1")).status_code == 404
            for _ in range(10):
                assert await anext(lines) is not None

        async def is_over() -> bool:
            return (await progress()).in_flight == 0

        await eventually(is_over)


async def test_serving_goes_on_without_postgres(live: Live) -> None:
    await live.make_ready("a")
    async with live.worker, live.gateway() as plane:
        assert await plane.serves("bot")
        async with live.postgres_away():
            for _ in range(30):
                assert await plane.serves("bot")
                await asyncio.sleep(0.05)
        async with live.database.transaction() as connection:
            await connection.execute("UPDATE gateways SET generation = 0")
            await add(connection, live.tenant_id, "b")
        newest = await generation(live)
        await eventually(lambda: _has_reached(live, newest))
