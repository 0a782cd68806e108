"""Client through which a gateway sends requests to one worker and receives the results. Does not
import torch."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import random
import time
from collections.abc import AsyncGenerator, Callable
from typing import assert_never

import msgspec

from adapters.reference import AdapterRef
from workers.wire.frames import (
    OLDEST_VERSION,
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
    Withdraw,
    common_version,
    own_hello,
)
from workers.wire.prefix_index import PrefixIndex
from workers.wire.protocol import (
    ErrorCode,
    Failed,
    Generate,
    ModelInfo,
    PromptProgress,
    SequenceOutput,
    SequenceTimes,
)
from workers.wire.status import WorkerStatus
from workers.wire.transport.base import (
    FrameTooLarge,
    ProtocolMismatch,
    Security,
    TransportError,
)
from workers.wire.transport.registry import connect, exchange_hello
from workers.wire.transport.stream import GatewayConnection

log = logging.getLogger(__name__)

FIRST_RETRY_S = 0.05
LAST_RETRY_S = 0.5
LOOK_S = 0.25
"""Seconds between liveness checks. A check succeeds if the worker has sent a frame since the
previous check, and has acknowledged every frame that the gateway had sent before the last
successful check."""
SILENT_LOOKS = 10
"""Number of consecutive failed liveness checks, 2.5 s in all, after which a worker counts as
silent, so that work is routed to other workers."""
LOST_LOOKS = 40
"""Number of consecutive failed checks, 10 s in all, after which the connection is closed."""
WITHDRAW_VERSION = 7
"""Oldest protocol version whose workers understand `Withdraw`."""
HUNG_STEP_S = 60.0
"""Seconds in a single engine step after which a worker counts as hung, even if it still sends
pulses. The limit is long because a step may have to wait until weights are copied."""


class WorkerFailed(Exception):
    """Error raised if a worker cannot finish a sequence or a probe. `code` identifies the cause."""

    def __init__(
        self,
        code: ErrorCode,
        message: str,
        retry_after_s: float = 0.0,
        pace_s: float = 0.0,
        times: SequenceTimes | None = None,
    ) -> None:
        """retry_after_s: seconds until an overloaded worker may have room. pace_s: seconds until
        the tenant's next place in the queue is free, or 0. times: stage times of the sequence."""
        super().__init__(f"{code}: {message}")
        self.code = code
        self.message = message
        self.retry_after_s = retry_after_s
        self.pace_s = pace_s
        self.times = times


class Silence(msgspec.Struct, frozen=True):
    """Event that a sequence's sink receives at each liveness check while the worker is silent or
    hangs in a step. The caller may wait, or abort the sequence and send it to another worker."""


SILENCE = Silence()
SequenceEvent = SequenceOutput | PromptProgress | WorkerFailed | Silence
Sink = Callable[[SequenceEvent], None]
"""Function that receives each event of a sequence as soon as it is read. The last event is a
SequenceOutput with a finish reason, or WorkerFailed. The function must not raise."""


class WorkerClient:
    """Connection to one worker, which `run` opens and keeps open. Used in one event loop."""

    def __init__(
        self,
        address: str,
        *,
        instance_id: str = "gateway",
        security: Security = Security(),  # noqa: B008
    ) -> None:
        self.address = address
        self.instance_id = ""
        """Id of the worker process at the other end of the current or last connection; empty before
        the first connection."""
        self.models: dict[str, ModelInfo] = {}
        """The worker's models by digest; empty while disconnected."""
        self.version = OLDEST_VERSION
        """Protocol version of the current or last connection."""
        self.has_answered = False
        """Whether a worker at this address has ever answered with its Hello."""
        self.status: WorkerStatus | None = None
        """Last status that the worker sent; None while disconnected."""
        self.status_at = 0.0
        """Time at which `status` was received, by time.monotonic()."""
        self.num_open_then = 0
        """Value of `num_open` when `status` was received."""
        self.num_finished = 0
        """Total number of sequences of this gateway that finished on the worker."""
        self.prefixes = PrefixIndex()
        """Prefixes that the worker has cached; empty while disconnected."""
        self.failure = ""
        """Reason why there is no connection, or why the last connection ended; empty while
        connected. If the same reason occurs again, it is not logged again."""
        self._own_hello = own_hello(instance_id)
        self._security = security
        self._connection: GatewayConnection | None = None
        self._num_looks = 0
        """Number of consecutive failed liveness checks."""
        self._has_spoken = False
        """Whether the worker has sent a frame since the last liveness check."""
        self._num_heard = 0
        """Number of this gateway's frames that the worker has acknowledged."""
        self._step_age_s = 0.0
        self._sinks: dict[int, Sink] = {}
        self._ids = itertools.count(1)
        self._probes: dict[int, asyncio.Future[ProbeResult]] = {}
        self._probe_ids = itertools.count(1)
        self._desired: Desired | None = None

    @property
    def is_ready(self) -> bool:
        """Whether the worker is connected and has not reported that it is draining."""
        return self._connection is not None and not (self.status and self.status.draining)

    @property
    def is_silent(self) -> bool:
        """Whether the worker is silent or hangs in a step, so that work should go to other
        workers."""
        return self._num_looks >= SILENT_LOOKS or self._step_age_s > HUNG_STEP_S

    def lives(self, instance_id: str) -> bool:
        """Returns whether the worker process with this id is connected and does not hang in a step.
        A silent worker also counts as connected."""
        is_hung = self._step_age_s > HUNG_STEP_S
        return self._connection is not None and self.instance_id == instance_id and not is_hung

    @property
    def num_open(self) -> int:
        """Number of sequences that were sent to the worker and have not ended."""
        return len(self._sinks)

    def send(self, request: Generate, sink: Sink) -> int:
        """Sends the request and returns the new sequence's id. The sink is called with each event
        of the sequence. Raises WorkerFailed if the request cannot be sent."""
        sequence_id = next(self._ids)
        if self._connection is None:
            raise WorkerFailed(ErrorCode.WORKER_LOST, "there is no connection to the worker")
        try:
            self._connection.send(msgspec.structs.replace(request, id=sequence_id))
        except FrameTooLarge as error:
            raise WorkerFailed(ErrorCode.INVALID, f"the request is too large: {error}") from error
        except TransportError as error:
            raise WorkerFailed(ErrorCode.WORKER_LOST, str(error)) from error
        self._sinks[sequence_id] = sink
        return sequence_id

    def cancel(self, sequence_id: int) -> None:
        """Aborts a sequence and stops calling its sink. The worker frees the sequence's memory
        within a step."""
        if self._sinks.pop(sequence_id, None) is not None:
            self._tell(Abort(sequence_id))

    def abort(self, sequence_id: int) -> bool:
        """Aborts a sequence. Its sink is still called until the sequence ends. Returns False if the
        sequence has already ended."""
        if sequence_id not in self._sinks:
            return False
        self._tell(Abort(sequence_id))
        return True

    def prefetch(self, model: str, adapter: AdapterRef) -> None:
        """Asks the worker to load an adapter to its host tier. Does nothing if the worker is
        disconnected."""
        self._tell(Prefetch(model, adapter))

    async def probe(self, model: str, adapter: AdapterRef) -> ProbeResult:
        """Makes the worker verify the adapter with a `Probe`, and returns the result. If the caller
        is cancelled, the worker drops the probe. Raises WorkerFailed if the connection is lost."""
        if self._connection is None:
            raise WorkerFailed(ErrorCode.WORKER_LOST, "there is no connection to the worker")
        probe_id = next(self._probe_ids)
        answer = self._probes[probe_id] = asyncio.get_running_loop().create_future()
        try:
            self._connection.send(Probe(probe_id, model, adapter))
            return await answer
        except TransportError as error:
            raise WorkerFailed(ErrorCode.WORKER_LOST, str(error)) from error
        except asyncio.CancelledError:
            if self.version >= WITHDRAW_VERSION:
                self._tell(Withdraw(probe_id))
            raise
        finally:
            self._probes.pop(probe_id, None)

    def want(self, desired: Desired) -> None:
        """Sends the desired state to the worker now, and again after every reconnect."""
        self._desired = desired
        self._tell(desired)

    def drain(self, is_on: bool = True) -> None:
        """Asks the worker to refuse new work, or to accept work again if `is_on` is false.
        `status.draining` shows the worker's current state."""
        self._tell(Drain(is_on))

    async def run(self) -> None:
        """Connects to the worker and dispatches its frames until the task is cancelled. After a
        failure, reconnects with pauses of growing length."""
        retry_s = FIRST_RETRY_S
        while True:
            try:
                async with self.connect() as reading:
                    log.info("connected to worker %s at %s", self.instance_id, self.address)
                    retry_s, self.failure = FIRST_RETRY_S, ""
                    await reading
            except (TransportError, OSError) as error:
                if str(error) != self.failure:
                    if isinstance(error, FileNotFoundError):
                        # A worker that starts together with its gateway has no socket at first.
                        log.info("waiting for the worker at %s", self.address)
                    else:
                        log.warning("worker at %s: %s", self.address, error)
                self.failure = str(error)
            await asyncio.sleep(retry_s * random.uniform(0.5, 1.0))
            retry_s = min(2 * retry_s, LAST_RETRY_S)

    @contextlib.asynccontextmanager
    async def connect(self) -> AsyncGenerator[asyncio.Task[None]]:
        """Opens one connection, exchanges Hellos and starts the liveness checks. Yields the task
        that reads from the connection. Closes the connection on exit.

        Raises OSError or TransportError if no connection can be opened (ProtocolMismatch if the two
        sides have no version in common). The yielded task ends when the connection ends, and raises
        TransportError if the connection broke.
        """
        connection = await connect(self.address, self._security)
        tasks: list[asyncio.Task[None]] = []
        try:
            hello = await exchange_hello(connection, self._own_hello)
            self.instance_id = hello.instance_id
            self.version = common_version(self._own_hello, hello) or OLDEST_VERSION
            self.models = {model.digest: model for model in hello.models}
            self._connection = connection
            self.has_answered = True
            self._num_looks, self._num_heard, self._step_age_s = 0, 0, 0.0
            if self._desired is not None:
                connection.send(self._desired)
            reading = asyncio.create_task(self._read(connection))
            tasks = [reading, asyncio.create_task(self._watch(connection))]
            yield reading
        finally:
            connection.abort()
            self._disconnected()
            for task in tasks:
                task.cancel()
            if tasks:
                await asyncio.wait(tasks)

    async def _read(self, connection: GatewayConnection) -> None:
        try:
            while (message := await connection.receive()) is not None:
                self._has_spoken = True
                self._dispatch(message)
        finally:
            self._disconnected()

    async def _watch(self, connection: GatewayConnection) -> None:
        """Checks the liveness of the worker every `LOOK_S` seconds. Counts failed checks rather
        than seconds, so that a stall of this gateway's event loop does not look like a silent
        worker."""
        num_due = connection.num_sent
        while True:
            await asyncio.sleep(LOOK_S)
            if self._has_spoken and self._num_heard >= num_due:
                self._num_looks, num_due = 0, connection.num_sent
            else:
                self._num_looks += 1
            self._has_spoken = False
            if self._num_looks == SILENT_LOOKS:
                log.warning("worker %s at %s is silent", self.instance_id, self.address)
            if self._num_looks == LOST_LOOKS:
                log.warning("worker %s at %s stays silent", self.instance_id, self.address)
                connection.abort()
                return
            if self.is_silent:
                for sequence_id in list(self._sinks):
                    self._put(sequence_id, SILENCE, is_last=False)

    def _dispatch(self, message: ToGateway) -> None:
        """Passes a message to the sequence or probe that it belongs to, or stores it in this
        client's attributes. Drops outputs of sequences that were cancelled."""
        match message:
            case StepFrame(sequences=outputs, progress=progress):
                for each in progress:
                    self._put(each.id, each, is_last=False)
                for output in outputs:
                    is_last = output.finish_reason is not None
                    self.num_finished += is_last
                    self._put(output.id, output, is_last)
            case Failed(id=sequence_id, code=code, message=text, retry_after_s=after_s):
                failure = WorkerFailed(code, text, after_s, message.pace_s, message.times)
                self._put(sequence_id, failure, is_last=True)
            case Models(models=models):
                self.models = {model.digest: model for model in models}
            case Pulse(step_age_s=age_s, num_received=num_heard):
                self._step_age_s, self._num_heard = age_s, num_heard
            case ProbeResult(id=probe_id):
                answer = self._probes.get(probe_id)
                if answer is not None and not answer.done():
                    answer.set_result(message)
            case WorkerStatus():
                self.status, self.status_at = message, time.monotonic()
                self.num_open_then = self.num_open
            case CachedPages():
                self.prefixes.apply(message)
            case Hello():
                raise ProtocolMismatch("a second Hello")
            case _:
                assert_never(message)

    def _put(self, sequence_id: int, output: SequenceEvent, is_last: bool) -> None:
        sink = self._sinks.get(sequence_id)
        if sink is None:
            return
        if is_last:
            del self._sinks[sequence_id]
        sink(output)

    def _disconnected(self) -> None:
        self._connection, self.status, self.models = None, None, {}
        self.prefixes = PrefixIndex()
        sinks, self._sinks = self._sinks, {}
        for sink in sinks.values():
            sink(_lost())
        for answer in self._probes.values():
            if not answer.done():
                answer.set_exception(_lost())

    def _tell(self, message: Abort | Prefetch | Withdraw | Desired | Drain) -> None:
        """Sends a message that the worker does not answer. Does nothing while disconnected."""
        if self._connection is not None:
            with contextlib.suppress(TransportError):
                self._connection.send(message)


def _lost() -> WorkerFailed:
    return WorkerFailed(ErrorCode.WORKER_LOST, "the connection to the worker was lost")
