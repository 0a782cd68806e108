"""Gateways and workers of the version before beside those of this one, both ways, under load: its
schema, then the migration, then its protocol at either end."""

from __future__ import annotations

import asyncio
import io
import subprocess
import tarfile
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from pathlib import Path

import httpx
import pytest

from admin.migrate import load_migrations
from tests.k8s.installation import Installation
from tests.k8s.namespaces import Loopback
from tests.k8s.test_processes import START_S, Callers, add_tenant, available, install, launch
from tests.plane import Plane
from tests.scale import IS_FULL
from tests.waiting import eventually
from tools.source_tree import ROOT

pytestmark = pytest.mark.full

BEFORE = "d41ff2f"
"""The first commit whose only migration is the baseline of 0.1.0."""


@pytest.fixture
def before(tmp_path: Path) -> Path:
    """The tree of the version before."""
    archive = subprocess.run(["git", "archive", BEFORE], cwd=ROOT, capture_output=True)
    if archive.returncode != 0:
        pytest.skip(f"the history of this checkout lacks {BEFORE}")
    with tarfile.open(fileobj=io.BytesIO(archive.stdout)) as files:
        files.extractall(tmp_path / "before", filter="data")
    return tmp_path / "before"


class Upgrade:
    """Pods of two versions, and callers of those gateways that a balancer would choose."""

    def __init__(self, stack: AsyncExitStack, pods: Installation) -> None:
        self.callers = Callers("")
        self._stack = stack
        self._pods = pods
        self._running: dict[tuple[str, int], Plane] = {}

    async def start(self, role: str, number: int, source: Path | None) -> None:
        """source: the tree of another version, in place of this one."""
        process = await launch(self._stack, self._pods, role, number, source)
        self._running[role, number] = process
        if role == "worker":
            await available(self._pods, process)
            return
        await process.wait_ready()
        if role == "gateway":
            self.callers.gateways.append(self._pods.url(role, number))

    async def end(self, role: str, number: int) -> None:
        if role == "gateway":
            # As a Service does while preStop waits.
            self.callers.gateways.remove(self._pods.url(role, number))
            await self.callers.some_answers()
        assert await self._running[role, number].end() == 0

    async def replace(self, role: str, number: int, source: Path | None) -> None:
        await self.end(role, number)
        await self.start(role, number, source)
        await self.callers.some_answers()

    async def migrate(self, before: Path) -> None:
        """As the Job of this version, which finds the schema of the one before."""
        applied = await asyncio.to_thread(self._pods.run, "migrate")
        old = {file.name for file in load_migrations(before / "migrations")}
        new = [f.name for f in load_migrations() if not f.is_post and f.name not in old]
        assert applied.split("\n") == (new or ["nothing to do"])


@pytest.fixture
async def upgrade(tmp_path: Path, before: Path) -> AsyncIterator[Upgrade]:
    """All is of the version before: an admin plane, a gateway, a worker, which is number 1."""
    async with AsyncExitStack() as stack:
        pods, admin_key = await install(stack, tmp_path, Loopback(), before)
        upgrade = Upgrade(stack, pods)
        first = (("admin", 0), ("worker", 1), ("gateway", 0))
        await asyncio.gather(*(upgrade.start(*each, before) for each in first))
        upgrade.callers.key = await add_tenant(pods, admin_key, before)
        client = await stack.enter_async_context(httpx.AsyncClient(timeout=60))

        async def is_served() -> bool:
            return not await upgrade.callers.ask(client, pods.url("gateway"))

        await eventually(is_served, START_S)
        yield upgrade


async def test_an_upgrade_under_load(upgrade: Upgrade, before: Path) -> None:
    """A new gateway with the worker of before alone, then that one's gateway with a new worker."""
    callers = upgrade.callers
    async with callers.asking():
        await upgrade.migrate(before)
        await upgrade.start("gateway", 1, None)
        old, new = callers.gateways
        callers.gateways = [new]
        await callers.some_answers()
        await upgrade.start("worker", 0, None)
        callers.gateways = [old]
        await upgrade.end("worker", 1)
        await callers.some_answers()


@pytest.mark.chaos
@pytest.mark.skipif(not IS_FULL, reason="starts fourteen processes of two versions: make chaos")
async def test_an_upgrade_and_back_under_load(upgrade: Upgrade, before: Path) -> None:
    """Workers first, then gateways, and back in the same order: old gateways with new workers, then
    new gateways with old workers. Streams of gateways that stay go on throughout."""
    await upgrade.start("worker", 0, before)
    await upgrade.start("gateway", 1, before)
    async with upgrade.callers.asking():
        await upgrade.migrate(before)
        for source in (None, before):
            for role in ("worker", "gateway"):
                for number in range(2):
                    await upgrade.replace(role, number, source)
            await upgrade.replace("admin", 0, source)
