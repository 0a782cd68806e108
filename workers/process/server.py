"""Asyncio side of a worker process: receives gateways' frames and sends the engine's messages."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import msgspec

from workers.wire.frames import (
    PULSE_PERIOD_S,
    Abort,
    CachedPages,
    Desired,
    Drain,
    Hello,
    Models,
    Prefetch,
    Probe,
    ProbeResult,
    Pulse,
    StepFrame,
    ToGateway,
    ToWorker,
    Withdraw,
    own_hello,
)
from workers.wire.prefix_index import PrefixIndex
from workers.wire.protocol import ErrorCode, Failed, Generate, ModelInfo
from workers.wire.status import WorkerStatus, why_unsatisfiable
from workers.wire.transport.base import (
    FrameTooLarge,
    ProtocolMismatch,
    Security,
    TransportError,
)
from workers.wire.transport.registry import exchange_hello, listen
from workers.wire.transport.stream import Listener, WorkerConnection

log = logging.getLogger(__name__)

SERVER = 0
"""Connection number of the server's own commands."""
OUTBOX_BYTES = 8 << 20
FLUSH_S = 1.0
"""Seconds that a gateway has to read pending frames when the server closes."""


class Disconnected(msgspec.Struct, frozen=True):
    """Command to abort all sequences of a connection, because its gateway has disconnected."""


class Drained(msgspec.Struct, frozen=True):
    """Message of the engine thread to the server during a shutdown. It means that no sequence runs,
    and that the last output or failure of each sequence was delivered."""


Command = Generate | Abort | Prefetch | Probe | Withdraw | Desired | Drain | Disconnected
WorkerMessage = StepFrame | Failed | ProbeResult | WorkerStatus | CachedPages | Models
Delivery = Sequence[tuple[int, WorkerMessage | Drained]]
"""Messages of the engine, each with a connection number. Most messages are sent to the connection
with this number. WorkerStatus, CachedPages and Models are sent to all connections, whatever the
number. Drained is not sent, but ends the wait of `Server.drain`."""


class EngineLoop(Protocol):
    """Engine loop as the server uses it. The engine thread calls `Server.deliver`."""

    @property
    def is_ready(self) -> bool: ...

    @property
    def models(self) -> list[ModelInfo]: ...

    @property
    def step_age_s(self) -> float:
        """Seconds since the engine's current step began, or 0 while it waits. Thread-safe."""
        ...

    def post(self, connection: int, message: Command) -> None:
        """Handles a message of a connection. Thread-safe; never waits for a step."""
        ...


@dataclass(slots=True)
class _Gateway:
    connection: WorkerConnection
    instance_id: str


class Server:
    """Server that connects gateways to one engine loop. All methods except `deliver` must be called
    in one event loop."""

    def __init__(
        self,
        address: str,
        *,
        instance_id: str,
        security: Security = Security(),  # noqa: B008
        outbox_bytes: int = OUTBOX_BYTES,
    ) -> None:
        self.address = address
        self.instance_id = instance_id
        self.status: WorkerStatus | None = None
        self._prefixes = PrefixIndex()
        """Cached prefixes that were reported to gateways. A new gateway receives all of them."""
        self._security = security
        self._outbox_bytes = outbox_bytes
        self._events = asyncio.get_running_loop()
        self._gateways: dict[int, _Gateway] = {}
        self._serving: dict[asyncio.Future[None], WorkerConnection] = {}
        self._numbers = itertools.count(1)
        self._drained = asyncio.Event()
        self._engine: EngineLoop | None = None
        self._listener: Listener | None = None
        self._is_leaving = False
        """Whether the process shuts down. The engine learns of it only after its current step."""
        self._pulse: asyncio.Task[None] | None = None

    def why_not_ready(self) -> str | None:
        """Returns why this worker accepts no new work, or None if it accepts work."""
        if self._engine is None or self._listener is None:
            return "it does not listen"
        if self._is_leaving or (self.status is not None and self.status.draining):
            return "draining"
        if not self._engine.is_ready:
            return "the base models of the catalog are being fetched"
        reason = why_unsatisfiable(self.status.models) if self.status is not None else None
        return reason and f"no base model can be served: {reason}"

    async def start(self, engine: EngineLoop) -> None:
        """Starts to listen. After that, `address` has the actual port. Raises the errors of
        `transport.registry.listen`."""
        self._engine = engine
        self._listener = await listen(self.address, self._accept, self._security)
        self.address = self._listener.address
        self._pulse = asyncio.create_task(self._beat(engine))

    async def drain(self) -> None:
        """Makes the engine refuse new work, and waits until the engine has delivered the last
        output or failure of each sequence."""
        assert self._engine is not None
        self._is_leaving = True
        self._engine.post(SERVER, Drain())
        await self._drained.wait()

    async def close(self) -> None:
        """Stops listening and drops all gateways, which aborts their open sequences."""
        if self._listener is not None:
            await self._listener.close()
            self._listener = None
        connections = list(self._serving.values())
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(FLUSH_S):
                await asyncio.gather(*(connection.close() for connection in connections))
        for connection in connections:
            connection.abort()
        if self._serving:
            await asyncio.wait(self._serving)
        if self._pulse is not None:
            self._pulse.cancel()
            await asyncio.wait([self._pulse])

    def deliver(self, delivery: Delivery) -> None:
        """Sends the messages without blocking. Called on the engine thread."""
        self._events.call_soon_threadsafe(self._send_all, delivery)

    async def _beat(self, engine: EngineLoop) -> None:
        while True:
            for number, gateway in list(self._gateways.items()):
                self._send(number, Pulse(engine.step_age_s, gateway.connection.num_received))
            await asyncio.sleep(PULSE_PERIOD_S)

    async def _accept(self, connection: WorkerConnection) -> None:
        done = self._events.create_future()
        self._serving[done] = connection
        try:
            await self._serve(connection)
        finally:
            del self._serving[done]
            done.set_result(None)

    async def _serve(self, connection: WorkerConnection) -> None:
        assert self._engine is not None
        own = own_hello(self.instance_id, self._engine.models)
        number = next(self._numbers)
        try:
            hello = await exchange_hello(connection, own)
            log.info("gateway %s connected (%d)", hello.instance_id, number)
            self._gateways[number] = _Gateway(connection, hello.instance_id)
            if (models := self._engine.models) != own.models:
                connection.send(Models(models))
            if self.status is not None:
                connection.send(self.status)
            for pages in self._prefixes.whole():
                connection.send(pages)
            while (message := await connection.receive()) is not None:
                if number not in self._gateways:
                    break  # the gateway was dropped while the message was in flight
                self._receive(number, message)
        except TransportError as error:
            log.warning("gateway connection %d is closed: %s", number, error)
        finally:
            self._drop(number)
            await connection.close()

    def _receive(self, number: int, message: ToWorker) -> None:
        assert self._engine is not None
        match message:
            case Hello():
                raise ProtocolMismatch("a second Hello")
            case _:
                self._engine.post(number, message)

    def _send_all(self, delivery: Delivery) -> None:
        self._cut_slow()
        for number, message in delivery:
            match message:
                case WorkerStatus():
                    self.status = message
                    self._send_to_all(message)
                case CachedPages():
                    self._prefixes.apply(message)
                    self._send_to_all(message)
                case Models():
                    self._send_to_all(message)
                case Drained():
                    self._drained.set()
                case _:
                    self._send(number, message)

    def _send_to_all(self, message: WorkerMessage) -> None:
        for number in list(self._gateways):
            self._send(number, message)

    def _cut_slow(self) -> None:
        """Drops gateways whose unsent bytes exceed the limit. Called before a delivery is queued,
        so that one large delivery alone cannot exceed the limit."""
        for number, gateway in list(self._gateways.items()):
            unsent = gateway.connection.num_unsent_bytes
            if unsent > self._outbox_bytes:
                log.warning(
                    "gateway %s was disconnected with %d bytes unread", gateway.instance_id, unsent
                )
                self._drop(number)

    def _send(self, number: int, message: WorkerMessage | Pulse) -> None:
        gateway = self._gateways.get(number)
        if gateway is None:
            return
        try:
            gateway.connection.send(message)
        except FrameTooLarge as error:
            self._send_apart(number, message, error)
        except TransportError:
            self._drop(number)

    def _send_apart(self, number: int, message: ToGateway, error: FrameTooLarge) -> None:
        """Sends a `StepFrame` that is too large for one frame as one frame per sequence. A sequence
        whose own output is too large fails. Of a `WorkerStatus`, leaves out adapters and tenants.
        Leaves out any other message, and logs its type."""
        match message:
            case StepFrame(sequences=[output], progress=[]):
                if self._engine is not None:
                    self._engine.post(number, Abort(output.id))
                self._send(number, Failed(output.id, ErrorCode.INVALID, f"the answer is {error}"))
            case StepFrame(sequences=outputs, progress=progress):
                if progress:
                    self._send(number, StepFrame([], progress))
                for output in outputs:
                    self._send(number, StepFrame([output]))
            case WorkerStatus(adapters=adapters, tenants=tenants) if adapters or tenants:
                num_unlisted = message.num_unlisted_adapters + len(adapters)
                log.error("the status lists no adapters or tenants: %s", error)
                short = msgspec.structs.replace(
                    message, adapters=[], tenants=[], num_unlisted_adapters=num_unlisted
                )
                self._send(number, short)
            case ProbeResult():
                error_code, text = "adapter.probe.failed", f"the result is {error}"
                failed = ProbeResult(message.id, error=error_code, message=text, is_final=False)
                self._send(number, failed)
            case _:
                log.error("gateway %d gets no %s: %s", number, type(message).__name__, error)

    def _drop(self, number: int) -> None:
        """Drops the gateway's connection and aborts its sequences. May be called twice."""
        gateway = self._gateways.pop(number, None)
        if gateway is None:
            return
        gateway.connection.abort()
        if self._engine is not None:
            self._engine.post(number, Disconnected())
