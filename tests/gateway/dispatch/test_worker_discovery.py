"""Workers that register come, are told what is wanted of them, and go, while requests are served:
real Postgres, real gateways, stub workers."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager
from typing import Any

from admin.workers.workers import leave, register_worker
from store.database import Database
from store.queries import sql
from tests.adapters.files import BASE
from tests.gateway.conftest import REPORT_INTERVAL_S
from tests.gateway.live import GatewayPlane, Live, answer
from tests.scripted_worker import Reply, ScriptedWorker
from tests.waiting import eventually
from workers.wire.frames import DesiredModel
from workers.wire.protocol import Generate, ServiceClass
from workers.wire.transport.base import Security

LEASE_S = 60.0
INSECURE = Security(insecure=True)


def endless(_: Generate) -> Reply:
    return Reply([65], never_ends=True)


def stub(live: Live, name: str) -> ScriptedWorker:
    address = f"unix:{live.folder / name}.sock"
    return ScriptedWorker(address, [BASE.digest], answer, instance_id=name)


async def register(live: Live, worker: ScriptedWorker) -> None:
    await register_worker(live.database, worker.instance_id, worker.address, LEASE_S)


def connected(plane: GatewayPlane) -> set[str]:
    fleet = plane.gateway.fleet
    return {client.instance_id for client in fleet.clients if client.models}


async def status(live: Live, worker_id: str) -> dict[str, Any] | None:
    rows = await live.fetch("SELECT status FROM workers WHERE id = $1", worker_id)
    return rows[0]["status"] if rows else None


@asynccontextmanager
async def streaming(plane: GatewayPlane, max_tokens: int = 400):
    """An answer under way; its lines."""
    body = {"model": "tiny", "prompt": "Hi", "max_tokens": max_tokens, "stream": True}
    async with plane.client.stream("POST", "/v1/completions", json=body) as stream:
        lines = stream.aiter_lines()
        assert (await anext(lines)).startswith("data:")
        yield lines


async def test_a_worker_that_registers_is_found_and_goes_when_it_has_ended(live: Live) -> None:
    first, second = stub(live, "first"), stub(live, "second")
    async with live.gateway(workers=[]) as plane:
        assert (await plane.complete("tiny")).status_code == 503
        async with first:
            await register(live, first)
            await eventually(lambda: connected(plane) == {"first"})
            assert await plane.serves("tiny")
            async with second:
                await register(live, second)
                await eventually(lambda: connected(plane) == {"first", "second"})
                await leave(live.database, "second")
                newest = await generation(live.database)
                await eventually(lambda: plane.gateway.catalog.current.generation >= newest)
            await eventually(lambda: len(plane.gateway.fleet.clients) == 1)
            assert await plane.serves("tiny")
        await leave(live.database, "first")
        await eventually(lambda: not plane.gateway.fleet.clients)
        assert (await plane.complete("tiny")).status_code == 503


async def generation(database: Database) -> int:
    async with database.acquire() as connection:
        return await connection.fetchval(sql["catalog_generation"])


async def test_what_runs_on_a_worker_that_leaves_ends_there(live: Live) -> None:
    worker = stub(live, "leaving")
    worker.script, worker.step_s = endless, 0.02
    async with worker, live.gateway(workers=[]) as plane:
        await register(live, worker)
        await eventually(lambda: connected(plane) == {"leaving"})
        async with streaming(plane, max_tokens=100) as lines:
            await leave(live.database, "leaving")
            newest = await generation(live.database)
            await eventually(lambda: plane.gateway.catalog.current.generation >= newest)
            rest = [line async for line in lines]
        assert "data: [DONE]" in rest
        assert not worker.aborted


async def test_a_lease_that_runs_out_costs_no_connection(live: Live) -> None:
    """As after a database that was away: its command renews it, and meanwhile it serves."""
    worker = stub(live, "cut-off")
    async with worker, live.gateway(workers=[]) as plane:
        await register(live, worker)
        await eventually(lambda: connected(plane) == {"cut-off"})
        async with live.database.transaction() as connection:
            await connection.execute("DELETE FROM workers")
        newest = await generation(live.database)
        await eventually(lambda: plane.gateway.catalog.current.generation >= newest)
        before = plane.gateway.fleet.clients[0]
        assert await plane.serves("tiny")
        await register(live, worker)
        newest = await generation(live.database)
        await eventually(lambda: plane.gateway.catalog.current.generation >= newest)
        assert plane.gateway.fleet.clients == [before] and await plane.serves("tiny")


async def test_a_registered_worker_of_the_settings_is_one_worker(live: Live) -> None:
    async with live.worker, live.gateway() as plane:
        await register(live, live.worker)
        newest = await generation(live.database)
        await eventually(lambda: plane.gateway.catalog.current.generation >= newest)
        await asyncio.sleep(0.6)
        assert len(plane.gateway.fleet.clients) == 1
        await leave(live.database, live.worker.instance_id)
        await asyncio.sleep(0.6)
        assert await plane.serves("tiny")
    assert len(plane.gateway.fleet.clients) == 1


async def test_tcp_without_tls_is_not_connected_to_unless_it_is_asked_for(live: Live) -> None:
    worker = stub(live, "remote")
    worker.address, worker.security = "tcp://127.0.0.1:0", INSECURE
    async with (
        worker,
        live.gateway("gw-1", workers=[], security=INSECURE) as insecure,
        live.gateway("gw-2", workers=[]) as secure,
    ):
        await register(live, worker)
        await eventually(lambda: connected(insecure) == {"remote"})
        await eventually(lambda: len(secure.gateway.fleet.clients) == 1)
        await asyncio.sleep(0.6)
        assert await insecure.serves("tiny") and not connected(secure)


async def test_one_drain_reaches_a_worker_of_several_gateways(live: Live) -> None:
    one, other = stub(live, "one"), stub(live, "other")
    addresses = [one.address, other.address]
    async with (
        one,
        other,
        live.gateway("gw-1", workers=addresses) as first,
        live.gateway("gw-2", workers=addresses) as second,
    ):
        gateways = (first, second)
        for plane in gateways:
            await eventually(lambda plane=plane: connected(plane) == {"one", "other"})
        await eventually(lambda: status(live, "one"))
        await want(live, "one", True)
        for plane in gateways:
            await eventually(lambda plane=plane: ready(plane) == {"other"})
        assert (one.is_draining, other.is_draining) == (True, False)
        await eventually(lambda: said(live, "one", True))
        for plane in gateways:
            for _ in range(4):
                taken = await plane.complete("tiny")
                assert taken.headers["loraplex-worker"] == "other"
        await want(live, "one", False)
        for plane in gateways:
            await eventually(lambda plane=plane: ready(plane) == {"one", "other"})
        assert not one.is_draining
        await eventually(lambda: said(live, "one", False))


async def test_a_worker_that_drains_by_itself_is_left_to_it(live: Live) -> None:
    """Nobody has said that it should not."""
    async with live.worker, live.gateway() as plane:
        await eventually(lambda: connected(plane) == {"scripted"})
        live.worker.is_draining = True
        live.worker.report()
        await eventually(lambda: not ready(plane))
        await asyncio.sleep(0.6)
        assert live.worker.is_draining


async def want(live: Live, worker_id: str, draining: bool) -> None:
    async with live.database.transaction() as connection:
        await connection.execute(sql["worker_set_draining"], worker_id, draining)


def ready(plane: GatewayPlane) -> set[str]:
    return {client.instance_id for client in plane.gateway.fleet.clients if client.is_ready}


async def said(live: Live, worker_id: str, draining: bool) -> bool:
    found = await status(live, worker_id)
    return found is not None and found["draining"] is draining


async def test_statuses_are_reported_as_they_come(live: Live) -> None:
    async with live.worker, live.gateway("gw-1"), live.gateway("gw-2"):
        await eventually(lambda: status(live, "scripted"))
        (row,) = await live.fetch("SELECT * FROM workers")
        assert (row["address"], row["leased_until"]) == (live.worker.address, None)
        assert row["reported_by"] in ("gw-1", "gw-2")
        # Without news nothing is written.
        await eventually(lambda: has_settled(live))
        (row,) = await live.fetch("SELECT * FROM workers")
        live.worker.report()
        await eventually(lambda: is_after(live, row["reported_at"]))


async def has_settled(live: Live) -> bool:
    """Returns whether nothing was written while each gateway had ten turns."""
    (row,) = await live.fetch("SELECT reported_at FROM workers")
    await asyncio.sleep(10 * REPORT_INTERVAL_S)
    return not await is_after(live, row["reported_at"])


async def is_after(live: Live, moment: Any) -> bool:
    (row,) = await live.fetch("SELECT reported_at FROM workers")
    return row["reported_at"] > moment


async def test_workers_hear_which_models_are_wanted(live: Live) -> None:
    worker = live.worker
    async with worker, live.gateway() as plane:
        await eventually(lambda: worker.desired)
        assert worker.desired[-1].models == [DesiredModel(BASE.digest, "tiny")]
        for residency, flags in (("pinned", (True, False)), ("unloaded", (False, True))):
            async with live.database.transaction() as connection:
                await connection.fetchrow(sql["model_set_residency"], "tiny", residency)
            wanted = [DesiredModel(BASE.digest, "tiny", *flags)]
            await eventually(lambda wanted=wanted: worker.desired[-1].models == wanted)
        # Under another name it is to be had none the less.
        async with live.database.transaction() as connection:
            values = (BASE.digest, BASE, 512, "")
            await connection.fetchrow(sql["model_insert"], "again", *values)
        wanted = [DesiredModel(BASE.digest, "again")]
        await eventually(lambda: worker.desired[-1].models == wanted)
        assert plane.gateway.fleet.why_not_serving() is None


async def test_a_tenants_weight_and_class_go_with_its_requests(live: Live) -> None:
    async with live.worker, live.gateway() as plane:
        assert await plane.serves("tiny")
        request = live.worker.requests[-1]
        assert (request.weight, request.service_class) == (1, ServiceClass.STANDARD)
        row = {"weight": 7, "class": "interactive"}
        await live.limit(**row)  # pyright: ignore[reportArgumentType]
        newest = await generation(live.database)
        await eventually(lambda: plane.gateway.catalog.current.generation >= newest)
        assert await plane.serves("tiny")
        request = live.worker.requests[-1]
        assert (request.weight, request.service_class) == (7, ServiceClass.INTERACTIVE)
