"""The client against a scripted worker on a real socket."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from adapters.reference import AdapterRef
from tests.handles import Handle
from tests.proxy import Proxy, Way, everything
from tests.scripted_worker import LAYOUT, Reply, Script, ScriptedWorker, proved
from tests.waiting import eventually
from workers.wire.client import Silence, WorkerClient, WorkerFailed
from workers.wire.frames import (
    MAX_FRAME_BYTES,
    OLDEST_VERSION,
    PROTOCOL_VERSION,
    Abort,
    Desired,
    Drain,
    Hello,
    Pin,
    Probe,
    Pulse,
    ToWorker,
    Withdraw,
    own_hello,
)
from workers.wire.protocol import ErrorCode, FinishReason, Generate, ModelInfo, SamplingParams
from workers.wire.transport.base import ProtocolMismatch
from workers.wire.transport.registry import listen
from workers.wire.transport.stream import WorkerConnection


def request(tokens: list[int] | None = None, max_tokens: int = 100) -> Generate:
    params = SamplingParams(max_tokens=max_tokens, seed=0)
    return Generate(0, "r", "m", tokens or [1], params, cache_domain="d")


def echo(asked: Generate) -> Reply:
    return Reply(asked.tokens)


def forever(asked: Generate) -> Reply:
    return Reply(asked.tokens, never_ends=True)


@contextlib.asynccontextmanager
async def running(address: str) -> AsyncIterator[WorkerClient]:
    client = WorkerClient(address)
    task = asyncio.create_task(client.run())
    try:
        await eventually(lambda: client.is_ready)
        yield client
    finally:
        task.cancel()
        await asyncio.wait([task])
    assert not client.is_ready and client.num_open == 0


@contextlib.asynccontextmanager
async def pair(
    tmp_path: Path, script: Script
) -> AsyncIterator[tuple[ScriptedWorker, WorkerClient]]:
    async with (
        ScriptedWorker(f"unix:{tmp_path}/w", ["m"], script) as worker,
        running(worker.address) as client,
    ):
        yield worker, client


async def collect(handle: Handle) -> list[int]:
    return [token async for output in handle for token in output.tokens]


async def test_many_requests_at_once_each_get_their_own_tokens(tmp_path: Path) -> None:
    async with pair(tmp_path, echo) as (worker, client):
        assert list(client.models) == ["m"] and client.instance_id == "scripted"
        prompts = [[number] * (number % 5 + 1) for number in range(1, 60)]
        handles = [Handle(client, request(prompt)) for prompt in prompts]
        assert client.num_open == len(prompts)
        assert await asyncio.gather(*map(collect, handles)) == prompts
        assert client.num_open == 0 and not worker.aborted
        assert len({each.id for each in worker.requests}) == len(prompts)


async def test_the_last_output_has_the_finish_reason_and_then_iteration_ends(
    tmp_path: Path,
) -> None:
    async with pair(tmp_path, forever) as (_, client):
        handle = Handle(client, request([7, 8], max_tokens=3))
        outputs = [output async for output in handle]
        assert [output.finish_reason for output in outputs] == [None, None, FinishReason.LENGTH]
        with pytest.raises(StopAsyncIteration):
            await anext(handle)
        handle.cancel()


async def test_cancel_frees_the_sequence_ends_the_iteration_and_may_be_called_twice(
    tmp_path: Path,
) -> None:
    async with pair(tmp_path, forever) as (worker, client):
        handle, other = Handle(client, request([5])), Handle(client, request([6]))
        assert (await anext(handle)).tokens == [5]
        waiting = asyncio.create_task(collect(handle))
        await asyncio.sleep(0.01)
        handle.cancel()
        handle.cancel()
        assert set(await waiting) <= {5}
        await eventually(lambda: worker.num_running == 1)
        assert [each.id for each in worker.aborted] == [handle.id] and client.num_open == 1
        assert (await anext(other)).tokens == [6]
        other.cancel()
        await eventually(lambda: worker.num_running == 0)


async def test_a_failure_is_raised_after_the_tokens_before_it(tmp_path: Path) -> None:
    async with pair(tmp_path, lambda _: Reply([1, 2], failure=ErrorCode.INTERNAL)) as (_, client):
        handle = Handle(client, request())
        assert [(await anext(handle)).tokens for _ in range(2)] == [[1], [2]]
        with pytest.raises(WorkerFailed) as failed:
            await anext(handle)
        assert failed.value.code is ErrorCode.INTERNAL and failed.value.message
        with pytest.raises(StopAsyncIteration):
            await anext(handle)


async def test_a_lost_worker_fails_all_that_is_open_and_is_found_again(tmp_path: Path) -> None:
    def script(asked: Generate) -> Reply:
        return Reply([1, 2], hangs_up=True) if asked.tokens == [9] else forever(asked)

    worker = ScriptedWorker(f"unix:{tmp_path}/w", ["m"], script)
    async with contextlib.AsyncExitStack() as stack:
        async with worker:
            client = await stack.enter_async_context(running(worker.address))
            handles = [Handle(client, request([token])) for token in (3, 9)]
            for handle in handles:
                with pytest.raises(WorkerFailed) as failed:
                    await collect(handle)
                assert failed.value.code is ErrorCode.WORKER_LOST
            assert not client.is_ready and client.num_open == 0 and client.models == {}
            with pytest.raises(WorkerFailed, match="no connection"):
                Handle(client, request())
            await eventually(lambda: len(worker.aborted) == 2)
        async with worker:
            await eventually(lambda: client.is_ready)
            assert (await anext(Handle(client, request([4])))).tokens == [4]


async def test_status_and_drain_change_readiness(tmp_path: Path) -> None:
    async with pair(tmp_path, echo) as (worker, client):
        assert client.status is None
        worker.report()
        await eventually(lambda: client.status is not None)
        assert client.is_ready
        client.prefetch("m", AdapterRef("sha256:1"))
        client.drain()
        await eventually(lambda: not client.is_ready)
        assert worker.prefetched[0].digest == "sha256:1" and client.status is not None
        async with running_late(worker.address) as late:
            await eventually(lambda: late.status is not None)
            assert not late.is_ready, "a new gateway hears of the drain at once"


async def test_probes_are_answered_each_with_its_own_result(tmp_path: Path) -> None:
    async with pair(tmp_path, echo) as (worker, client):
        assert client.models["m"].adapter_layout == LAYOUT
        refs = [AdapterRef(f"{number:064x}") for number in range(5)]
        results = await asyncio.gather(*[client.probe("m", ref) for ref in refs])
        assert [probe.adapter for probe in worker.probed] == refs
        assert results == [proved(probe) for probe in worker.probed]
        assert len({result.checksum for result in results}) == len(refs)


async def test_a_probe_ends_with_the_connection_and_needs_one(tmp_path: Path) -> None:
    async with pair(tmp_path, echo) as (worker, client):
        worker.probe_script = lambda _: None
        waiting = [asyncio.create_task(client.probe("m", AdapterRef("0" * 64))) for _ in range(2)]
        given_up = asyncio.create_task(client.probe("m", AdapterRef("1" * 64)))
        await eventually(lambda: len(worker.probed) == 3)
        given_up.cancel()
        await eventually(lambda: worker.withdrawn == [worker.probed[2].id])
        await worker.server.close()
        for probe in waiting:
            with pytest.raises(WorkerFailed) as failed:
                await probe
            assert failed.value.code is ErrorCode.WORKER_LOST
        await eventually(lambda: not client.is_ready)
        with pytest.raises(WorkerFailed, match="no connection"):
            await client.probe("m", AdapterRef("0" * 64))


async def test_what_is_wanted_is_said_again_after_a_reconnect(tmp_path: Path) -> None:
    def wanted(generation: int) -> Desired:
        return Desired(generation, [Pin("m", AdapterRef("0" * 64))])

    worker = ScriptedWorker(f"unix:{tmp_path}/w", ["m"], echo)
    async with contextlib.AsyncExitStack() as stack:
        async with worker:
            client = await stack.enter_async_context(running(worker.address))
            client.want(wanted(1))
            client.want(wanted(2))
            await eventually(lambda: len(worker.desired) == 2)
        await eventually(lambda: not client.is_ready)
        client.want(wanted(3))
        async with worker:
            await eventually(lambda: client.status is not None and client.status.generation == 3)
            assert worker.desired == [wanted(1), wanted(2), wanted(3)]


@contextlib.asynccontextmanager
async def running_late(address: str) -> AsyncIterator[WorkerClient]:
    client = WorkerClient(address)
    async with client.connect():
        yield client


async def test_a_request_over_the_frame_limit_fails_alone(tmp_path: Path) -> None:
    async with pair(tmp_path, echo) as (_, client):
        with pytest.raises(WorkerFailed, match="too large") as failed:
            Handle(client, request([70_000] * (MAX_FRAME_BYTES // 5 + 1)))
        assert failed.value.code is ErrorCode.INVALID and client.num_open == 0
        assert await collect(Handle(client, request([2]))) == [2]


@dataclass
class Moody:
    """A worker that pulses while it is in the mood, and keeps what it is told."""

    is_awake: bool = True
    step_age_s: float = 0.0
    told: list[ToWorker | None] = field(default_factory=list)
    num_connections: int = 0

    async def serve(self, connection: WorkerConnection) -> None:
        self.num_connections += 1
        connection.send(Hello(PROTOCOL_VERSION, "moody", [ModelInfo("m", "m", 64)]))
        hearing = asyncio.create_task(self._hear(connection))
        while not hearing.done():
            if self.is_awake:
                connection.send(Pulse(self.step_age_s, connection.num_received))
            await asyncio.wait([hearing], timeout=0.1)
        await connection.close()

    async def _hear(self, connection: WorkerConnection) -> None:
        while (message := await connection.receive()) is not None:
            self.told.append(message)


@contextlib.asynccontextmanager
async def moody(tmp_path: Path) -> AsyncIterator[tuple[Moody, WorkerClient]]:
    worker = Moody()
    listener = await listen(f"unix:{tmp_path}/w", worker.serve)
    async with running(listener.address) as client:
        yield worker, client
    await listener.close()


async def test_a_silent_worker_s_sequences_may_go_and_it_is_taken_back(tmp_path: Path) -> None:
    async with moody(tmp_path) as (worker, client):
        heard: list[Any] = []
        kept = client.send(request([1]), heard.append)
        moved = client.send(request([2]), lambda _: client.cancel(moved))
        worker.is_awake = False
        await eventually(lambda: client.is_silent)
        await eventually(lambda: len(heard) >= 2)
        assert set(map(type, heard)) == {Silence} and client.num_open == 1
        assert client.is_ready, "there may be no other"
        assert client.lives("moody"), "a machine may be too busy for pulses"
        await eventually(lambda: Abort(moved) in worker.told and Abort(kept) not in worker.told)
        worker.is_awake = True
        await eventually(lambda: not client.is_silent)
        assert worker.num_connections == 1


async def test_an_engine_that_hangs_in_a_step_is_as_silent(tmp_path: Path) -> None:
    async with moody(tmp_path) as (worker, client):
        heard: list[Any] = []
        client.send(request([1]), heard.append)
        worker.step_age_s = 59.0
        await asyncio.sleep(0.6)
        assert not heard and not client.is_silent
        worker.step_age_s = 61.0
        await eventually(lambda: bool(heard))
        assert not client.lives("moody")
        worker.step_age_s = 0.0
        await eventually(lambda: not client.is_silent)


async def test_a_worker_that_is_not_reached_is_as_silent_though_it_pulses(tmp_path: Path) -> None:
    async with (
        ScriptedWorker(f"unix:{tmp_path}/w", ["m"], echo) as worker,
        Proxy(f"unix:{tmp_path}/p", worker.address) as proxy,
        running(proxy.address) as client,
    ):
        assert await collect(Handle(client, request([1]))) == [1]
        proxy.ways["server"] = Way(swallows=everything)
        heard: list[Any] = []
        client.send(request([2]), heard.append)
        await eventually(lambda: client.is_silent and bool(heard))
        assert set(map(type, heard)) == {Silence}


@pytest.mark.timeout(120)
async def test_a_connection_that_stays_silent_is_given_up_and_made_anew(tmp_path: Path) -> None:
    async with moody(tmp_path) as (worker, client):
        heard: list[Any] = []
        client.send(request([1]), heard.append)
        worker.is_awake = False
        async with asyncio.timeout(100):
            while not heard or isinstance(heard[-1], Silence):
                await asyncio.sleep(0.05)
        assert isinstance(heard[-1], WorkerFailed) and heard[-1].code is ErrorCode.WORKER_LOST
        worker.is_awake = True
        await eventually(lambda: client.lives("moody") and worker.num_connections == 2)


async def test_a_drain_can_be_taken_back(tmp_path: Path) -> None:
    async with pair(tmp_path, echo) as (_, client):
        client.drain()
        await eventually(lambda: not client.is_ready)
        client.drain(is_on=False)
        await eventually(lambda: client.is_ready)


@pytest.mark.parametrize(
    ("hello", "version"),
    [
        (Hello(OLDEST_VERSION, "w"), OLDEST_VERSION),
        (own_hello("w"), PROTOCOL_VERSION),
        (Hello(PROTOCOL_VERSION, "w", newest=PROTOCOL_VERSION + 1), PROTOCOL_VERSION),
    ],
)
async def test_a_worker_of_a_neighbouring_version_is_let_in(
    tmp_path: Path, hello: Hello, version: int
) -> None:
    async def accept(connection: WorkerConnection) -> None:
        connection.send(hello)
        while (message := await connection.receive()) is not None:
            received.append(type(message))
        await connection.close()
        left.set()

    received: list[type] = []
    left = asyncio.Event()
    listener = await listen(f"unix:{tmp_path}/w", accept)
    client = WorkerClient(listener.address)
    async with client.connect():
        assert client.is_ready and client.version == version
        probing = asyncio.create_task(client.probe("m", AdapterRef("0" * 64)))
        await eventually(lambda: Probe in received)
        probing.cancel()
        await asyncio.wait([probing])
        client.drain()
        await eventually(lambda: Drain in received)
        assert (Withdraw in received) == (version >= 7), "an older one would not understand it"
    await left.wait()
    await listener.close()


@pytest.mark.parametrize("version", [OLDEST_VERSION - 1, PROTOCOL_VERSION + 1])
async def test_a_worker_of_another_version_is_refused_by_name(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, version: int
) -> None:
    async def accept(connection: WorkerConnection) -> None:
        connection.send(Hello(version, "newer"))
        await connection.receive()
        await connection.close()

    listener = await listen(f"unix:{tmp_path}/w", accept)
    client = WorkerClient(listener.address)
    with pytest.raises(ProtocolMismatch, match="newer speaks protocol"):
        async with client.connect():
            pass
    assert not client.is_ready
    with caplog.at_level(logging.WARNING):
        task = asyncio.create_task(client.run())
        await eventually(lambda: "newer speaks protocol" in caplog.text)
    task.cancel()
    await asyncio.wait([task])
    await listener.close()
