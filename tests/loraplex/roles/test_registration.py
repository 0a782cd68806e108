"""A worker whose command registers it: processes of their own, a real Postgres, a real gateway."""

from __future__ import annotations

import os
import signal
from datetime import datetime
from pathlib import Path

import pytest

from admin.workers import workers
from loraplex.settings import check_address
from tests.gateway.dispatch.test_worker_discovery import connected
from tests.gateway.live import Live
from tests.plane import Plane, python, variables
from tests.preloaded import ROOT
from tests.waiting import eventually


async def start(dsn: str, address: str, lease_s: float) -> Plane:
    process = Plane(
        python("tests.loraplex.registered_worker", dsn, "worker-1", address, str(lease_s)),
        kind="process",
        # Its child starts in a folder where this package is not.
        environment=os.environ | variables(database_url=dsn) | {"PYTHONPATH": str(ROOT)},
    )
    await process.launch()
    return process


async def test_it_is_found_while_it_runs_and_leaves_when_it_ends(dsn: str, live: Live) -> None:
    async with live.gateway(workers=[]) as plane:
        process = await start(dsn, live.worker.address, lease_s=60)
        await eventually(lambda: connected(plane) == {"worker-1"}, 60)
        answer = await plane.complete("tiny")
        assert answer.headers["loraplex-worker"] == "worker-1"
        assert await process.end() == 7, "as the worker itself ended"
        assert await leases(live) == []
        await eventually(lambda: not plane.gateway.fleet.clients)


@pytest.mark.full
async def test_a_worker_that_is_killed_comes_back_and_ends_as_it_is_told(
    dsn: str, live: Live
) -> None:
    async with live.gateway(workers=[]) as plane:
        process = await start(dsn, live.worker.address, lease_s=60)
        await eventually(lambda: connected(plane) == {"worker-1"}, 60)
        (killed,) = children_of(process.pid)
        os.kill(killed, signal.SIGKILL)
        await eventually(lambda: children_of(process.pid) - {killed}, 60)
        await eventually(lambda: connected(plane) == {"worker-1"}, 60)
        assert (await plane.complete("tiny")).status_code == 200
        assert await process.end() == 7
    assert await leases(live) == []


def children_of(pid: int) -> set[int]:
    return set(map(int, Path(f"/proc/{pid}/task/{pid}/children").read_text().split()))


async def test_a_lease_is_renewed_and_runs_out_when_its_command_is_killed(
    dsn: str, live: Live
) -> None:
    async with live.gateway(workers=[]) as plane:
        process = await start(dsn, live.worker.address, lease_s=3)
        await eventually(lambda: connected(plane) == {"worker-1"}, 60)
        (first,) = await leases(live)

        async def is_renewed() -> bool:
            return await leases(live) > [first] and await valid(live)

        await eventually(is_renewed)
        await process.kill()
        # The worker is not left behind by its command.
        await eventually(lambda: not connected(plane))
        assert (await plane.complete("tiny")).status_code == 503
        await eventually(lambda: is_over(live))
        assert await leases(live), "it is shown as lost for some time"
        async with live.database.transaction() as connection:
            await connection.execute(
                "UPDATE workers SET leased_until = leased_until - interval '1 minute',"
                " reported_at = reported_at - interval '1 minute',"
                " registered_at = registered_at - interval '1 minute'"
            )
        await workers.forget_lost(live.database)
        await eventually(lambda: not plane.gateway.fleet.clients)


async def leases(live: Live) -> list[datetime]:
    return [row["leased_until"] for row in await live.fetch("SELECT leased_until FROM workers")]


async def valid(live: Live) -> bool:
    rows = await live.fetch("SELECT leased_until > now() AS valid FROM workers")
    return [row["valid"] for row in rows] == [True]


async def is_over(live: Live) -> bool:
    return not await valid(live)


@pytest.mark.parametrize(
    "address",
    [
        "",
        "unix:",
        "unix:w.sock",
        "tcp://:1",
        "tcp://host",
        "tcp://host:0",
        "tcp://host:65536",
        "x:/",
    ],
)
def test_what_is_no_address_is_refused(address: str) -> None:
    with pytest.raises(ValueError, match="unix:/PATH or tcp"):
        check_address(address)


@pytest.mark.parametrize("address", ["unix:/run/w.sock", "tcp://host:1", "tcp://[::1]:65535"])
async def test_what_is_an_address_is_one_to_the_database(live: Live, address: str) -> None:
    assert check_address(address) == address
    await workers.register_worker(live.database, "worker-1", address, 60)
    assert await valid(live)
