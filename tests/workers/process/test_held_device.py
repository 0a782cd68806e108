"""While a device's driver, a proof or a grammar stands still, a worker's event loop answers every
gateway: pulses go out, and requests are refused. No time is measured: what is held is released only
after the answers."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Event
from typing import Any

import pytest

from tests.workers.base_models.test_swapping import FORMS, StoredModels
from tests.workers.formed_worker import FormedWorker
from tests.workers.host_virtual_memory import HostVirtualMemory
from workers.constraints.sequence_grammar import SequenceGrammar
from workers.device.device_memory import MappedMemory
from workers.process import server
from workers.process.server import Server
from workers.verification.effect_proof import EffectProof
from workers.wire import grammars
from workers.wire.frames import (
    PROTOCOL_VERSION,
    Desired,
    DesiredModel,
    Hello,
    Probe,
    ProbeResult,
    Pulse,
    StepFrame,
    ToGateway,
)
from workers.wire.protocol import ErrorCode, Failed, Generate
from workers.wire.status import WorkerStatus
from workers.wire.transport.registry import connect, exchange_hello
from workers.wire.transport.stream import GatewayConnection

pytestmark = pytest.mark.full

NUM_PULSES = 5


class Held:
    """Stands still in a method, from `hold` to `release`."""

    def __init__(self, patch: pytest.MonkeyPatch, owner: type, name: str) -> None:
        self.is_reached, self._is_free = Event(), Event()
        method = getattr(owner, name)

        def held(*arguments: Any, **options: Any) -> Any:
            self.is_reached.set()
            assert self._is_free.wait(60)
            return method(*arguments, **options)

        patch.setattr(owner, name, held)

    def release(self) -> None:
        self._is_free.set()


class Gate:
    """A gateway's connection."""

    def __init__(self, connection: GatewayConnection) -> None:
        self.connection = connection

    async def find(self, *kinds: type[ToGateway]) -> Any:
        """Returns the next message of these kinds."""
        async with asyncio.timeout(60):
            while not isinstance(message := await self.connection.receive(), kinds):
                assert message is not None
        return message


@pytest.fixture(scope="module")
def stored(tmp_path_factory: pytest.TempPathFactory) -> StoredModels:
    return StoredModels(tmp_path_factory.mktemp("models"))


@pytest.fixture
async def gates(
    stored: StoredModels, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[tuple[Gate, Gate]]:
    """Two gateways of a worker on a device as a GPU, whose models take turns."""
    monkeypatch.setattr(server, "PULSE_PERIOD_S", 0.01)
    config = stored.config("one", "two", **FORMS["as-on-a-gpu"])
    with ThreadPoolExecutor(1) as thread:
        events = asyncio.get_running_loop()
        build = lambda: FormedWorker(config, instance_id="w", progress=lambda *_: None)  # noqa: E731
        worker = await events.run_in_executor(thread, build)
        serving = Server(f"unix:{tmp_path}/w", instance_id="w")
        loop = worker.make_loop(serving.deliver)
        running = events.run_in_executor(thread, loop.run)
        await serving.start(loop)
        found: list[Gate] = []
        for name in ("a", "b"):
            connection = await connect(serving.address)
            await exchange_hello(connection, Hello(PROTOCOL_VERSION, name))
            found.append(Gate(connection))
        yield found[0], found[1]
        for gate in found:
            await gate.connection.close()
        await serving.close()
        loop.stop()
        await running
        await asyncio.to_thread(worker.close)


async def assert_answers(stored: StoredModels, other: Gate, held: Held) -> None:
    """The other gateway has its pulses, and an answer to a request that can never run."""
    assert await asyncio.to_thread(held.is_reached.wait, 60)
    for _ in range(NUM_PULSES):
        await other.find(Pulse)
    other.connection.send(stored.generate(99, "one", [10**6], 4))
    refused = await other.find(Failed)
    assert (refused.id, refused.code) == (99, ErrorCode.INVALID)
    other.connection.send(stored.generate(98, "three", [1, 2], 4))
    assert (await other.find(Failed)).code is ErrorCode.MODEL_UNKNOWN
    held.release()


async def finish(gate: Gate, number: int) -> None:
    while True:
        frame: StepFrame = await gate.find(StepFrame)
        if any(each.id == number and each.finish_reason for each in frame.sequences):
            return


async def test_while_a_model_is_registered(
    stored: StoredModels, gates: tuple[Gate, Gate], monkeypatch: pytest.MonkeyPatch
) -> None:
    """And streams of other models run to their end meanwhile."""
    one, other = gates
    held = Held(monkeypatch, MappedMemory, "reserve")
    models = [DesiredModel(digest, name) for name, digest in stored.digests.items()]
    one.connection.send(Desired(1, [], models))
    assert await asyncio.to_thread(held.is_reached.wait, 60)
    one.connection.send(stored.generate(0, "one", [1, 2, 3], 20))
    await finish(one, 0)
    await assert_answers(stored, other, held)
    while True:
        status: WorkerStatus = await one.find(WorkerStatus)
        if any(model.name == "three" and model.tier == "host" for model in status.models):
            break


async def test_while_models_are_swapped(
    stored: StoredModels, gates: tuple[Gate, Gate], monkeypatch: pytest.MonkeyPatch
) -> None:
    one, other = gates
    held = Held(monkeypatch, HostVirtualMemory, "unmap")
    one.connection.send(stored.generate(0, "two", [1, 2, 3], 4))
    await assert_answers(stored, other, held)
    await finish(one, 0)


async def test_while_an_adapter_is_proved(
    stored: StoredModels, gates: tuple[Gate, Gate], monkeypatch: pytest.MonkeyPatch
) -> None:
    """And streams run to their end meanwhile."""
    one, other = gates
    held = Held(monkeypatch, EffectProof, "expect")
    one.connection.send(Probe(1, stored.digests["one"], stored.refs["one"][0]))
    assert await asyncio.to_thread(held.is_reached.wait, 60)
    one.connection.send(stored.generate(0, "one", [1, 2, 3], 20))
    await finish(one, 0)
    await assert_answers(stored, other, held)
    result: ProbeResult = await one.find(ProbeResult)
    assert result.error == ""


async def test_while_a_grammar_is_followed(
    stored: StoredModels, gates: tuple[Gate, Gate], monkeypatch: pytest.MonkeyPatch
) -> None:
    one, other = gates
    held = Held(monkeypatch, SequenceGrammar, "go_on")
    request = stored.generate(0, "one", [1, 2, 3], 8)
    grammar = grammars.of_regex("(ab|[0-9]{2}){1,4}-[x-z]{3}")
    fields = {name: getattr(request, name) for name in request.__struct_fields__}
    one.connection.send(Generate(**(fields | {"grammar": grammar})))
    await assert_answers(stored, other, held)
    await finish(one, 0)
