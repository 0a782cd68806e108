"""The manifests' containers as processes: from an empty database to a first answer, and all of them
replaced under load."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

import httpx
import pytest

from adapters.manifest import BaseModelShape
from loraplex.probe import answers_ok
from tests.doubles import make_model, write_adapter
from tests.k8s.installation import Installation
from tests.k8s.namespaces import Loopback, Namespaces
from tests.plane import Plane
from tests.postgres import fresh_database
from tests.scale import IS_FULL, scaled
from tests.waiting import eventually

pytestmark = pytest.mark.full

PROBES = ("startupProbe", "livenessProbe", "readinessProbe")
START_S = 120.0
NUM_CALLERS = scaled(2, 6)
PAUSE_S = scaled(1, 0)
"""Pause of a caller after an answer: the suite shares its machine."""
NUM_TOKENS = 48
MODEL = "model"
"""Folder of the base model."""


@pytest.fixture
async def stack() -> AsyncIterator[AsyncExitStack]:
    async with AsyncExitStack() as stack:
        yield stack


@pytest.fixture
def namespaces() -> Iterator[Namespaces]:
    try:
        made = Namespaces()
    except PermissionError as error:
        pytest.skip(str(error))
    yield made
    made.close()


async def install(
    stack: AsyncExitStack, folder: Path, network: Loopback, source: Path | None = None
) -> tuple[Installation, str]:
    """The pods of a migrated database, and its first admin key. source: the tree of another
    version, whose schema it has."""
    pods = Installation(folder, stack.enter_context(fresh_database(migrated=False)), network)
    applied = await asyncio.to_thread(pods.run, "migrate", source=source)
    assert "0001_pre_baseline.sql" in applied
    return pods, await asyncio.to_thread(pods.run, "admin", "bootstrap", source=source)


async def launch(
    stack: AsyncExitStack,
    pods: Installation,
    role: str,
    number: int = 0,
    source: Path | None = None,
) -> Plane:
    process = pods.process(role, number, source)
    stack.push_async_callback(process.kill)
    await process.launch()
    return process


async def add_tenant(pods: Installation, admin_key: str, source: Path | None = None) -> str:
    """A base model `tiny`, and the key of a tenant, made in the admin plane's pod, which runs the
    tree of another version if `source` says so."""
    model = make_model(pods.folder / MODEL, "llama", max_position_embeddings=512)
    as_admin = {"LORAPLEX_KEY": admin_key}
    for command in (("model", "add", f"tiny={model}"), ("tenant", "create", "acme")):
        await asyncio.to_thread(pods.run, "admin", *command, source=source, **as_admin)
    created = ("key", "create", "--tenant", "acme")
    return await asyncio.to_thread(pods.run, "admin", *created, source=source, **as_admin)


async def push(pods: Installation, admin_key: str, name: str, seed: int) -> None:
    """An adapter of the tenant's; it serves once a worker has proved it."""
    config = json.loads((pods.folder / MODEL / "config.json").read_text())
    shape = BaseModelShape.from_config(config, "")
    files = write_adapter(shape, pods.folder / name, rank=8, seed=seed)
    command = ("adapter", "push", str(files), "--name", name, "--tenant", "acme", "--model", "tiny")
    await asyncio.to_thread(pods.run, "admin", *command, LORAPLEX_KEY=admin_key)


@dataclass
class Callers:
    """Clients that ask gateways in turn and read each answer whole."""

    key: str
    gateways: list[str] = field(default_factory=list[str])
    """URLs of those that a balancer would choose."""
    models: list[str] = field(default_factory=lambda: ["tiny"])
    num_answered: int = 0
    failures: list[str] = field(default_factory=list[str])

    async def ask(self, client: httpx.AsyncClient, url: str, model: str = "tiny") -> str:
        """What went wrong, or nothing."""
        body = {"model": model, "prompt": "Hello", "max_tokens": NUM_TOKENS, "stream": True}
        body |= {"ignore_eos": True}
        headers = {"authorization": f"Bearer {self.key}"}
        try:
            async with client.stream(
                "POST", f"{url}/v1/completions", json=body, headers=headers
            ) as answer:
                text = "".join([part async for part in answer.aiter_text()])
        except httpx.TransportError as error:
            return repr(error)
        is_whole = '"finish_reason":"length"' in text and text.endswith("data: [DONE]\n\n")
        return "" if answer.status_code == 200 and is_whole else f"{answer.status_code} {text}"

    @asynccontextmanager
    async def asking(self) -> AsyncIterator[None]:
        """They ask for as long as this is open. Fails if one of them had no whole answer."""
        async with asyncio.TaskGroup() as tasks:
            running = [tasks.create_task(self._run()) for _ in range(NUM_CALLERS)]
            yield
            for each in running:
                each.cancel()
        print(f"{self.num_answered} answered, {len(self.failures)} failed")
        assert not self.failures, self.failures[:3]

    async def some_answers(self) -> None:
        """Several for each of them, from now on."""
        num_before = self.num_answered
        await eventually(
            lambda: self.num_answered >= num_before + scaled(2, 4) * NUM_CALLERS, START_S
        )

    async def _run(self) -> None:
        async with httpx.AsyncClient(timeout=120) as client:
            turn = 0
            while True:
                turn += 1
                url = self.gateways[turn % len(self.gateways)]
                if failure := await self.ask(client, url, self.models[turn % len(self.models)]):
                    self.failures.append(failure)
                self.num_answered += not failure
                await asyncio.sleep(PAUSE_S)


async def available(pods: Installation, worker: Plane) -> None:
    """As a StatefulSet waits: ready without a break for as long as it says."""
    await worker.wait_ready()
    since = time.monotonic()
    while time.monotonic() < since + pods.min_ready_s:
        if not await asyncio.to_thread(answers_ok, worker.health, "/readyz"):
            since = time.monotonic()
        await asyncio.sleep(0.1)


async def test_from_nothing_to_a_first_answer(stack: AsyncExitStack, tmp_path: Path) -> None:
    pods, admin_key = await install(stack, tmp_path, Loopback())
    running = {role: await launch(stack, pods, role) for role in ("worker", "gateway", "admin")}
    for role in running:
        for probe in PROBES:
            await eventually(lambda r=role, p=probe: pods.passes(r, p), START_S)
    callers = Callers(await add_tenant(pods, admin_key))

    async def is_answered() -> bool:
        """Until the worker has the model, it is 503."""
        failure = await callers.ask(client, pods.url("gateway"))
        assert not failure or failure.startswith("503"), failure
        return not failure

    async with httpx.AsyncClient(timeout=60) as client:
        await eventually(is_answered, START_S)
    # A worker and the gateway are replaced by others of the same StatefulSets.
    callers.gateways = [pods.url("gateway")]
    async with callers.asking():
        await available(pods, await launch(stack, pods, "worker", 1))
        assert await running["worker"].end() == 0
        await (await launch(stack, pods, "gateway", 1)).wait_ready()
        # As a Service does while preStop waits.
        callers.gateways = [pods.url("gateway", 1)]
        await callers.some_answers()
        assert await running["gateway"].end() == 0
    # Nothing runs, so no drain takes its time.
    assert await running["admin"].end() == 0


def num_moves(pods: Installation) -> int:
    """Streams that gateways went on with at another worker, by their logs."""
    logs = [path.read_text() for path in pods.folder.glob("gateway-*.log")]
    return sum(log.count(" moved to worker ") for log in logs)


@pytest.mark.chaos
@pytest.mark.skipif(not IS_FULL, reason="starts eighteen processes: make chaos")
async def test_a_roll_out_loses_no_request(
    stack: AsyncExitStack, tmp_path: Path, namespaces: Namespaces
) -> None:
    """Each pod in a network namespace. Two gateways and three workers are replaced one by one under
    load. Then a worker is cut off in the middle of streams, another is killed, and two of three
    leave and come back while adapters are pushed."""
    pods, admin_key = await install(stack, tmp_path, namespaces)
    await launch(stack, pods, "admin")
    workers = [await launch(stack, pods, "worker", number) for number in range(3)]
    gateways = [await launch(stack, pods, "gateway", number) for number in range(2)]
    for probe in PROBES:
        await eventually(lambda p=probe: pods.passes("admin", p), START_S)
    callers = Callers(await add_tenant(pods, admin_key))
    callers.gateways = [pods.url("gateway", number) for number in range(2)]

    async def serves(model: str) -> None:
        async def is_served() -> bool:
            return not any([await callers.ask(client, url, model) for url in callers.gateways])

        await eventually(is_served, START_S)

    async def add_adapter() -> None:
        name = f"bot-{len(callers.models)}"
        await push(pods, admin_key, name, seed=len(callers.models))
        await serves(name)
        callers.models.append(name)

    client = await stack.enter_async_context(httpx.AsyncClient(timeout=60))
    await serves("tiny")
    await add_adapter()
    async with callers.asking():
        for worker in workers:
            assert await worker.end() == 0
            await worker.start()
            await available(pods, worker)
        for gateway, url in zip(gateways, tuple(callers.gateways), strict=True):
            # As a Service does while preStop waits.
            callers.gateways.remove(url)
            await callers.some_answers()
            assert await gateway.end() == 0
            await gateway.start()
            callers.gateways.append(url)
            await callers.some_answers()
        num_before = num_moves(pods)
        namespaces.cut(pods.host("worker", 1))
        await callers.some_answers()
        await eventually(lambda: num_moves(pods) > num_before, START_S)
        namespaces.mend(pods.host("worker", 1))
        await available(pods, workers[1])
        await workers[0].kill()
        await callers.some_answers()
        await workers[0].start()
        await available(pods, workers[0])
        for worker in workers[1:]:
            assert await worker.end() == 0
        await add_adapter()
        await callers.some_answers()
        for worker in workers[1:]:
            await worker.start()
        await add_adapter()
        await callers.some_answers()
        for worker in workers[1:]:
            assert await worker.end() == 0
        await callers.some_answers()
