"""The server over real sockets, with an engine loop that delivers from a thread as a test says."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import json
import threading
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import httpx
import msgspec
import pytest

from adapters.reference import AdapterRef
from tests.waiting import eventually
from workers.process.health import HealthServer
from workers.process.server import Command, Delivery, Disconnected, Drained, Server
from workers.wire.frames import (
    MAX_FRAME_BYTES,
    OLDEST_VERSION,
    PROTOCOL_VERSION,
    Abort,
    Desired,
    Drain,
    Hello,
    Models,
    Probe,
    ProbeResult,
    Pulse,
    StepFrame,
    ToGateway,
    common_version,
    own_hello,
)
from workers.wire.protocol import (
    ErrorCode,
    Failed,
    FinishReason,
    Generate,
    ModelInfo,
    PromptProgress,
    SamplingParams,
    SequenceOutput,
    TokenLogprobs,
)
from workers.wire.status import UNSATISFIABLE, AdapterStatus, ModelStatus, WorkerStatus
from workers.wire.transport.base import TransportError
from workers.wire.transport.registry import connect, exchange_hello
from workers.wire.transport.stream import GatewayConnection

STATUS = WorkerStatus("w", False, [], [], 0, "..", {}, 0, 0.0)


@dataclass
class Engine:
    """Keeps what was posted; `step` delivers from another thread, as the engine loop does."""

    server: Server
    is_ready: bool = True
    step_age_s: float = 0.0
    models: list[ModelInfo] = field(default_factory=lambda: [ModelInfo("m", "m", 64)])
    posted: list[tuple[int, Command]] = field(default_factory=list)

    def post(self, connection: int, message: Command) -> None:
        self.posted.append((connection, message))

    def step(self, delivery: Delivery) -> None:
        thread = threading.Thread(target=self.server.deliver, args=[delivery])
        thread.start()
        thread.join()


@dataclass
class Gateway:
    connection: GatewayConnection
    hello: Hello

    async def receive(self) -> ToGateway | None:
        """The next frame that is no pulse."""
        while isinstance(message := await self.connection.receive(), Pulse):
            pass
        return message


@pytest.fixture
async def engine(tmp_path: Path) -> AsyncIterator[Engine]:
    server = Server(f"unix:{tmp_path}/w", instance_id="w", outbox_bytes=1 << 20)
    engine = Engine(server)
    await server.start(engine)
    yield engine
    await server.close()


@contextlib.asynccontextmanager
async def gateway(engine: Engine) -> AsyncIterator[Gateway]:
    connection = await connect(engine.server.address)
    hello = await exchange_hello(connection, Hello(PROTOCOL_VERSION, "g"))
    yield Gateway(connection, hello)
    await connection.close()


def request(sequence_id: int) -> Generate:
    params = SamplingParams(max_tokens=4, seed=0)
    return Generate(sequence_id, "r", "m", [1], params, cache_domain="d")


def output(sequence_id: int, finish: FinishReason | None = None) -> SequenceOutput:
    return SequenceOutput(sequence_id, [5], finish_reason=finish)


async def submit(engine: Engine, gate: Gateway, *ids: int) -> int:
    """Sends requests and returns the number the engine knows the connection by."""
    for sequence_id in ids:
        gate.connection.send(request(sequence_id))
    last = request(ids[-1])
    await eventually(lambda: any(message == last for _, message in engine.posted))
    return next(number for number, message in reversed(engine.posted) if message == last)


async def test_a_gateway_hears_the_models_and_each_step_in_one_frame(engine: Engine) -> None:
    async with gateway(engine) as one, gateway(engine) as two:
        assert one.hello == own_hello("w", engine.models)
        first, second = await submit(engine, one, 1, 2), await submit(engine, two, 3)
        assert first != second
        frame = StepFrame([output(1), output(2, FinishReason.STOP)])
        failed = Failed(3, ErrorCode.INTERNAL, "no")
        engine.step([(first, frame), (second, failed)])
        assert await one.receive() == frame
        assert await two.receive() == failed
        one.connection.send(Abort(1))
        await eventually(lambda: engine.posted[-1] == (first, Abort(1)))
        last = StepFrame([output(1, FinishReason.ABORT)], [PromptProgress(1, 1, 0)])
        engine.step([(first, last)])
        assert await one.receive() == last


async def test_probes_and_desired_state_pass_through(engine: Engine) -> None:
    async with gateway(engine) as one, gateway(engine) as two:
        number = await submit(engine, one, 7)
        await submit(engine, two, 7)
        probe, desired = Probe(7, "m", AdapterRef("0" * 64)), Desired(3, [])
        one.connection.send(probe)
        one.connection.send(desired)
        await eventually(lambda: engine.posted[-2:] == [(number, probe), (number, desired)])
        result = ProbeResult(7, "layout", "sum")
        engine.step([(number, result), (0, STATUS)])
        assert await one.receive() == result
        assert await one.receive() == await two.receive() == STATUS


async def test_a_gateway_that_leaves_has_its_work_aborted(engine: Engine) -> None:
    async with gateway(engine) as gate:
        number = await submit(engine, gate, 1)
    await eventually(lambda: engine.posted[-1] == (number, Disconnected()))
    engine.step([(number, StepFrame([output(1)]))])
    assert engine.posted.count((number, Disconnected())) == 1


async def test_a_gateway_that_does_not_read_is_cut_and_others_go_on(engine: Engine) -> None:
    async with gateway(engine) as slow, gateway(engine) as quick:
        lazy, eager = await submit(engine, slow, 1), await submit(engine, quick, 2)
        large = StepFrame([SequenceOutput(1, [70_000] * 100_000)])
        for _ in range(40):
            engine.step([(lazy, large), (eager, StepFrame([output(2)]))])
            assert await quick.receive() == StepFrame([output(2)])
        assert (lazy, Disconnected()) in engine.posted
        assert (eager, Disconnected()) not in engine.posted


async def test_what_arrives_as_a_gateway_is_cut_is_dropped(engine: Engine) -> None:
    """A request that was read already, and not looked at."""
    loop, unhandled = asyncio.get_running_loop(), list[dict[str, Any]]()
    loop.set_exception_handler(lambda _, context: unhandled.append(context))
    async with gateway(engine) as gate:
        number = await submit(engine, gate, 1)
        gate.connection.send(request(2))
        # Timers that are due are run behind what was read from sockets, before who waits for it.
        loop.call_at(loop.time(), engine.server._drop, number)
        with contextlib.suppress(TransportError):
            assert await gate.connection.receive() is None
    await eventually(lambda: engine.posted[-1] == (number, Disconnected()))
    gc.collect()
    assert not unhandled


async def test_status_goes_to_all_and_first_to_a_newcomer(engine: Engine) -> None:
    async with gateway(engine) as one, gateway(engine) as two:
        await submit(engine, one, 1)
        await submit(engine, two, 2)
        engine.step([(0, STATUS)])
        assert await one.receive() == await two.receive() == STATUS
        async with gateway(engine) as late:
            assert await late.receive() == STATUS


async def test_drain_waits_for_what_runs(engine: Engine) -> None:
    async with gateway(engine) as gate:
        number = await submit(engine, gate, 1, 2)
        draining = asyncio.create_task(engine.server.drain())
        await asyncio.sleep(0)
        # The engine learns of it after its step, which may be long; probes at once.
        assert engine.server.why_not_ready() == "draining"
        await eventually(lambda: isinstance(engine.posted[-1][1], Drain))
        engine.step([(0, msgspec.structs.replace(STATUS, draining=True))])
        ends = [StepFrame([output(1, FinishReason.STOP)]), Failed(2, ErrorCode.INTERNAL, "no")]
        engine.step([(number, end) for end in ends])
        while await gate.receive() != ends[-1]:
            pass
        assert not draining.done() and engine.server.why_not_ready() == "draining"
        engine.step([(0, Drained())])
        await asyncio.wait_for(draining, 60)


async def test_the_end_sends_what_was_taken(engine: Engine) -> None:
    """However much that is; who does not read it holds the end up for a second at most."""
    large = StepFrame([SequenceOutput(1, [70_000] * 500_000, finish_reason=FinishReason.STOP)])
    async with gateway(engine) as gate, gateway(engine) as deaf:
        number, other = await submit(engine, gate, 1), await submit(engine, deaf, 2)
        engine.step([(number, large), (other, large)])
        closing = asyncio.create_task(engine.server.close())
        assert await gate.receive() == large and await gate.receive() is None
        await asyncio.wait_for(closing, 30)


async def test_gateways_hear_a_pulse_and_the_age_of_the_step(engine: Engine) -> None:
    engine.step_age_s = 2.5
    async with gateway(engine) as one, gateway(engine) as two:
        for gate in (one, two):
            pulses = [await gate.connection.receive() for _ in range(3)]
            assert pulses[1:] == [Pulse(2.5, num_received=1)] * 2


async def test_a_step_too_large_for_a_frame_goes_in_parts_or_fails_alone(engine: Engine) -> None:
    top = [(70_000, -0.5)] * 20
    many = [TokenLogprobs(1, -0.5, top)] * (MAX_FRAME_BYTES // 450)
    half = SequenceOutput(1, [5], prompt_logprobs=many)
    whole = SequenceOutput(2, [5], prompt_logprobs=many * 2)
    async with gateway(engine) as gate:
        number = await submit(engine, gate, 1, 2)
        engine.step([(number, StepFrame([half, whole]))])
        assert await gate.receive() == StepFrame([half])
        failed = await gate.receive()
        assert isinstance(failed, Failed) and (failed.id, failed.code) == (2, ErrorCode.INVALID)
        assert engine.posted[-1] == (number, Abort(2))


async def test_a_status_too_large_for_a_frame_is_cut_and_no_gateway_is_dropped(
    engine: Engine,
) -> None:
    adapter = AdapterStatus("a" * 64, "host", 100, 0, False, message="x" * 1000)
    adapters = [adapter] * (MAX_FRAME_BYTES // 1000)
    long = msgspec.structs.replace(STATUS, adapters=adapters, num_unlisted_adapters=5)
    info = ModelInfo("m" * 64, "x" * (MAX_FRAME_BYTES + 1), 512)
    async with gateway(engine) as gate:
        number = await submit(engine, gate, 1)
        engine.step([(number, long)])
        expected = msgspec.structs.replace(
            STATUS, adapters=[], num_unlisted_adapters=5 + len(adapters)
        )
        assert await gate.receive() == expected
        engine.step([(number, Models([info])), (number, StepFrame([SequenceOutput(1, [5])]))])
        assert await gate.receive() == StepFrame([SequenceOutput(1, [5])]), "it is still connected"


async def test_a_gateway_of_the_version_before_is_served(engine: Engine) -> None:
    """As it says it, with one number; and its own check of ours finds that number."""
    connection = await connect(engine.server.address)
    before = Hello(OLDEST_VERSION, "before")
    connection.send(before)
    gate = Gateway(connection, cast(Hello, await connection.receive()))
    assert gate.hello.version == before.version == common_version(before, gate.hello)
    number = await submit(engine, gate, 1)
    engine.step([(number, StepFrame([output(1, FinishReason.STOP)]))])
    while not isinstance(frame := await connection.receive(), StepFrame):
        assert frame is not None
    assert frame.sequences == [output(1, FinishReason.STOP)]
    await connection.close()


@pytest.mark.parametrize("version", [OLDEST_VERSION - 1, PROTOCOL_VERSION + 1, None])
async def test_a_gateway_of_another_version_or_without_hello_is_refused(
    engine: Engine, version: int | None, caplog: pytest.LogCaptureFixture
) -> None:
    connection = await connect(engine.server.address)
    connection.send(Abort(1) if version is None else Hello(version, "newer"))
    assert isinstance(await connection.receive(), Hello)
    assert await connection.receive() is None
    assert ("Abort" if version is None else "newer speaks protocol") in caplog.text
    assert engine.posted == []
    await connection.close()


async def test_garbage_and_a_second_hello_end_the_connection_and_its_work(engine: Engine) -> None:
    for number in (1, 2):
        async with gateway(engine) as gate:
            connection = await submit(engine, gate, number)
            gate.connection.send(Hello(PROTOCOL_VERSION, "g"))
            await eventually(lambda: engine.posted[-1][1] == Disconnected())
            assert engine.posted[-1][0] == connection
    reader, writer = await asyncio.open_unix_connection(engine.server.address[5:])
    writer.write(b"GET / HTTP/1.1\r\n\r\n")
    await reader.read()
    writer.close()
    await writer.wait_closed()
    async with gateway(engine) as gate:
        await submit(engine, gate, 9)


def model(tier: str, error: str = "", name: str = "m") -> ModelStatus:
    return ModelStatus(name, name, *[0] * 8, tier=tier, error=error)


async def test_a_worker_that_can_serve_no_model_is_not_ready_and_says_why(engine: Engine) -> None:
    server = engine.server

    def report(*models: ModelStatus) -> None:
        status = msgspec.structs.replace(STATUS, models=list(models))
        server.deliver([(0, status)])

    report()
    await eventually(lambda: server.status is not None)
    assert server.why_not_ready() is None, "one may be registered"
    report(model(UNSATISFIABLE, "needs 2.00 GiB"), model(UNSATISFIABLE, "its head_dim is 7", "n"))
    await eventually(lambda: server.why_not_ready() is not None)
    reason = server.why_not_ready()
    assert reason == "no base model can be served: m: unsatisfiable: needs 2.00 GiB"
    report(model(UNSATISFIABLE, "needs 2.00 GiB"), model("cold", name="n"))
    await eventually(lambda: server.why_not_ready() is None)


@pytest.mark.parametrize("scheme", ["tcp", "unix"])
async def test_health_answers_over_plain_http(engine: Engine, tmp_path: Path, scheme: str) -> None:
    address = "127.0.0.1:0" if scheme == "tcp" else f"unix:{tmp_path}/health"
    health = HealthServer(
        address,
        why_not_ready=engine.server.why_not_ready,
        documents={"/metrics": lambda: b"up 1\n"},
    )
    await health.start()
    uds = str(tmp_path / "health") if scheme == "unix" else None
    base = f"http://{health.address}" if scheme == "tcp" else "http://worker"
    transport = httpx.AsyncHTTPTransport(uds=uds)
    async with httpx.AsyncClient(transport=transport, base_url=base) as client:
        assert (await client.get("/livez")).text == "ok\n"
        assert (await client.get("/readyz?verbose")).status_code == 200
        engine.is_ready = False
        refused = await client.get("/readyz")
        assert (refused.status_code, refused.text) == (
            503,
            "the base models of the catalog are being fetched\n",
        )
        assert (await client.get("/livez")).status_code == 200
        assert (await client.get("/metrics")).text == "up 1\n"
        assert (await client.get("/other")).status_code == 404
        assert (await client.post("/livez", content=json.dumps({}))).status_code == 405
        assert (await client.get("/livez", headers={"x": "y" * 9000})).status_code == 400
    await health.close()
