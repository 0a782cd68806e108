"""Gateways and workers of the protocol before beside those of this one, both ways, under load."""

from __future__ import annotations

import asyncio
import io
import subprocess
import tarfile
from contextlib import AsyncExitStack
from pathlib import Path

import httpx
import pytest

from loraplex.probe import answers_ok
from tests.gateway.live import eventually
from tests.house import ROOT
from tests.k8s.namespaces import Loopback
from tests.k8s.test_processes import (
    NUM_CALLERS,
    START_S,
    Callers,
    add_tenant,
    install,
    launch,
)
from tests.scale import IS_FULL

BEFORE = "68305a6"
"""The last commit before token rules, which protocol 6 has and 5 does not know."""


@pytest.fixture
def before(tmp_path: Path) -> Path:
    """The tree of the version before."""
    archive = subprocess.run(["git", "archive", BEFORE], cwd=ROOT, capture_output=True)
    if archive.returncode != 0:
        pytest.skip(f"the history of this checkout lacks {BEFORE}")
    with tarfile.open(fileobj=io.BytesIO(archive.stdout)) as files:
        files.extractall(tmp_path / "before", filter="data")
    return tmp_path / "before"


@pytest.mark.chaos
@pytest.mark.skipif(not IS_FULL, reason="starts ten processes of two versions: make chaos")
async def test_an_upgrade_and_back_under_load(tmp_path: Path, before: Path) -> None:
    """Workers first, then gateways, and back in the same order: old gateways with new workers, then
    new gateways with old workers. Streams of gateways that stay go on throughout."""
    async with AsyncExitStack() as stack:
        pods, admin_key = await install(stack, tmp_path, Loopback())
        await launch(stack, pods, "admin")
        workers = [await launch(stack, pods, "worker", n, before) for n in range(2)]
        gateways = [await launch(stack, pods, "gateway", n, before) for n in range(2)]
        await eventually(lambda: pods.passes("admin", "readinessProbe"), START_S)
        callers = Callers(await add_tenant(pods, admin_key))
        callers.gateways = [pods.url("gateway", n) for n in range(2)]
        client = await stack.enter_async_context(httpx.AsyncClient(timeout=60))

        async def are_served() -> bool:
            return not any([await callers.ask(client, url) for url in callers.gateways])

        async def some_answers() -> None:
            num_before = callers.num_answered
            await eventually(lambda: callers.num_answered >= num_before + 4 * NUM_CALLERS, START_S)

        async def replace_workers(source: Path | None) -> None:
            for number, worker in enumerate(workers):
                assert await worker.end() == 0
                workers[number] = await launch(stack, pods, "worker", number, source)
                await eventually(lambda w=workers[number]: is_ready(w.health), START_S)
                await asyncio.sleep(pods.min_ready_s)
                await some_answers()

        async def replace_gateways(source: Path | None) -> None:
            for number, url in enumerate(tuple(callers.gateways)):
                callers.gateways.remove(url)
                assert await gateways[number].end() == 0
                gateways[number] = await launch(stack, pods, "gateway", number, source)
                await eventually(lambda g=gateways[number]: is_ready(g.health), START_S)
                callers.gateways.append(url)
                await some_answers()

        await eventually(are_served, START_S)
        async with asyncio.TaskGroup() as tasks:
            asking = [tasks.create_task(callers.run()) for _ in range(NUM_CALLERS)]
            await some_answers()
            await replace_workers(None)
            await replace_gateways(None)
            await replace_workers(before)
            await replace_gateways(before)
            for task in asking:
                task.cancel()
        print(f"{callers.num_answered} answered, {len(callers.failures)} failed")
        assert not callers.failures, callers.failures[:3]


async def is_ready(health: str) -> bool:
    return await asyncio.to_thread(answers_ok, health, "/readyz")
