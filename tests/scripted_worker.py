"""A worker whose answers a test writes: the worker's own server and real frames, no engine."""

from __future__ import annotations

import asyncio
import hashlib
import itertools
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self

import msgspec
import numpy as np

from adapters.reference import AdapterRef
from tests.gateway.scripts import say
from workers.process.server import Command, Disconnected, Server
from workers.wire.client import WorkerClient, WorkerFailed
from workers.wire.frames import (
    Abort,
    Desired,
    Drain,
    Fingerprint,
    Models,
    Prefetch,
    Probe,
    ProbeResult,
    StepFrame,
    Withdraw,
)
from workers.wire.protocol import (
    ErrorCode,
    Failed,
    FinishReason,
    Generate,
    ModelInfo,
    OutputKind,
    PromptProgress,
    SequenceOutput,
    TokenLogprobs,
)
from workers.wire.status import AdapterStatus, ModelStatus, WorkerStatus
from workers.wire.transport.base import Security

DIGEST = "d" * 64
MAX_MODEL_LEN = 128
LAYOUT = "scripted-1"
VECTOR_SIZE = 64


@dataclass(frozen=True)
class Reply:
    """The answer to one Generate, a token a step. After the tokens: `failure` if given, else the
    finish."""

    tokens: list[int]
    finish_reason: FinishReason = FinishReason.STOP
    stop_token: int | None = None
    num_cached_tokens: int = 0
    progress: tuple[int, int] | None = None
    """Prompt positions reached, and how many of them were cached: told in the first step."""
    last_progress: tuple[int, int] | None = None
    """The same, told when it is aborted."""
    prompt_logprobs: list[TokenLogprobs] | None = None
    """Sent with the first token; each token's own are -0.5 with itself on top, if asked for."""
    failure: ErrorCode | None = None
    """`expired`: when its time is over."""
    hangs_up: bool = False
    """The worker closes everything instead of finishing."""
    idle_steps: int = 0
    """The first token comes after so many more steps."""
    never_ends: bool = False
    """The tokens come again and again until the sequence is aborted."""


Told = SequenceOutput | PromptProgress
Script = Callable[[Generate], Reply | AsyncIterator[Told] | AsyncIterator[SequenceOutput]]
"""A script that is no reply says what each step holds, and may fail anywhere."""
ProbeScript = Callable[[Probe], ProbeResult | None]
"""None: no answer, ever."""
Key = tuple[int, int]


def proved(probe: Probe) -> ProbeResult:
    """The checksum is the SHA-256 of the digest's text."""
    checksum = hashlib.sha256(probe.adapter.digest.encode()).hexdigest()
    return ProbeResult(probe.id, LAYOUT, checksum, Fingerprint([1], [-0.5], effect=1.0))


HELLO = say("hello")


class _HangsUp(Exception):
    pass


class ScriptedWorker:
    """`async with ScriptedWorker(f"unix:{path}", ["digest"], script)`; may be entered again
    afterwards. It has an instance id of its own for each start."""

    def __init__(
        self,
        address: str = "",
        digests: Sequence[str] = (),
        script: Script = HELLO,
        step_s: float = 0.001,
        *,
        instance_id: str = "scripted",
        security: Security = Security(),  # noqa: B008
        reports: bool = True,
    ) -> None:
        """`address`: empty for a socket of its own. `digests`: of its models, by default that of
        `tiny`. `reports`: whether it sends a status after each message that asks for one."""
        self.address = address
        self.script = script
        self.step_s = step_s
        self.instance_id = instance_id
        self.security = security
        self.reports = reports
        self.probe_script: ProbeScript = proved
        self.models = [ModelInfo(digest, digest, 4096, LAYOUT) for digest in digests]
        self.models = self.models or [ModelInfo(DIGEST, "tiny", MAX_MODEL_LEN, LAYOUT)]
        self.requests: list[Generate] = []
        self.aborted: list[Generate] = []
        """Those among the requests that were given up, or lost with their connection."""
        self.prefetched: list[AdapterRef] = []
        self.probed: list[Probe] = []
        self.withdrawn: list[int] = []
        """Ids of probes."""
        self.desired: list[Desired] = []
        self.adapters: list[AdapterStatus] = []
        """What a status says of them."""
        self.is_ready = True
        self.is_draining = False
        self.step_age_s = 0.0
        self.abort_s = 0.0
        """Seconds of the step that an abort waits for."""
        self.server: Server
        self._running: dict[Key, tuple[Generate, Reply | None, asyncio.Task[None]]] = {}
        self._due: dict[int, list[Told]] = {}
        self._num_starts = 0
        self._folder: tempfile.TemporaryDirectory[str] | None = None

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self.stop()

    async def clients(self) -> Sequence[WorkerClient]:
        """Starts, and makes a client for it."""
        await self.start()
        return [WorkerClient(self.server.address)]

    async def start(self) -> None:
        """Serves in the running loop; also again after `stop`."""
        if not self.address:
            self._folder = tempfile.TemporaryDirectory(prefix="lpx-")
            self.address = f"unix:{Path(self._folder.name) / 'worker.sock'}"
        self._num_starts += 1
        number = f"-{self._num_starts}" if self._num_starts > 1 else ""
        name = self.instance_id + number
        self.server = Server(self.address, instance_id=name, security=self.security)
        await self.server.start(self)
        self.address = self.server.address

    async def stop(self) -> None:
        """Drops every connection, as a killed worker does."""
        for _, _, task in self._running.values():
            task.cancel()
        self._running.clear()
        await self.server.close()

    async def close(self) -> None:
        await self.stop()
        if self._folder is not None:
            self._folder.cleanup()

    @property
    def num_running(self) -> int:
        return len(self._running)

    def report(
        self,
        *adapters: AdapterStatus,
        draining: bool | None = None,
        models: Sequence[ModelStatus] = (),
    ) -> None:
        """Sends a status with these to all gateways."""
        status = WorkerStatus(
            self.instance_id,
            self.is_draining if draining is None else draining,
            list(models),
            list(adapters) or self.adapters,
            *(0, "", {}, 0, 0.0),
            self.desired[-1].generation if self.desired else 0,
        )
        self.server.deliver([(0, status)])

    def offer(self, *models: ModelInfo) -> None:
        """Serves these base models from now on."""
        self.models = list(models)
        self.server.deliver([(0, Models(self.models))])

    def post(self, connection: int, message: Command) -> None:
        match message:
            case Generate():
                self.requests.append(message)
                said = self.script(message)
                reply = said if isinstance(said, Reply) else None
                outputs = self._played(message, said) if isinstance(said, Reply) else said
                task = asyncio.create_task(self._run((connection, message.id), outputs))
                self._running[connection, message.id] = message, reply, task
            case Abort(id=sequence_id):
                self._abort(connection, sequence_id)
            case Disconnected():
                for key in [key for key in self._running if key[0] == connection]:
                    self._give_up(key)
            case Prefetch(adapter=adapter):
                self.prefetched.append(adapter)
            case Probe():
                self.probed.append(message)
                if (result := self.probe_script(message)) is not None:
                    self.server.deliver([(connection, result)])
            case Withdraw(id=probe_id):
                self.withdrawn.append(probe_id)
            case Desired():
                self.desired.append(message)
                if self.reports:
                    self.report()
            case Drain(is_on=is_on):
                self.is_draining = is_on
                self.report()

    def _give_up(self, key: Key) -> Reply | None:
        request, reply, task = self._running.pop(key)
        task.cancel()
        self.aborted.append(request)
        return reply

    def _abort(self, connection: int, sequence_id: int) -> None:
        if (connection, sequence_id) not in self._running:
            return
        reply = self._give_up((connection, sequence_id))
        end = SequenceOutput(sequence_id, [], finish_reason=FinishReason.ABORT)
        told: list[Told] = [end]
        if reply is not None and reply.last_progress is not None:
            told.append(PromptProgress(sequence_id, *reply.last_progress))
        if self.abort_s:
            loop = asyncio.get_running_loop()
            loop.call_later(self.abort_s, lambda: self._emit(connection, *told))
        else:
            self._emit(connection, *told)

    async def _run(self, key: Key, outputs: AsyncIterator[Told]) -> None:
        connection, sequence_id = key
        failed: Failed | None = None
        try:
            async for output in outputs:
                self._emit(connection, msgspec.structs.replace(output, id=sequence_id))
                if isinstance(output, SequenceOutput) and output.finish_reason is not None:
                    break
        except _HangsUp:
            await self.server.close()
            return
        except WorkerFailed as failure:
            told = failure.retry_after_s, failure.pace_s
            failed = Failed(sequence_id, failure.code, failure.message, *told)
        except Exception as error:
            failed = Failed(sequence_id, ErrorCode.INTERNAL, str(error))
        self._running.pop(key, None)
        if failed is not None:
            self._flush(connection)
            self.server.deliver([(connection, failed)])

    def _emit(self, connection: int, *told: Told) -> None:
        """What arises in one turn of the loop goes in one frame, as in an engine's step."""
        if connection not in self._due:
            self._due[connection] = []
            asyncio.get_running_loop().call_soon(self._flush, connection)
        self._due[connection] += told

    def _flush(self, connection: int) -> None:
        told = self._due.pop(connection, [])
        outputs = [each for each in told if isinstance(each, SequenceOutput)]
        progress = [each for each in told if isinstance(each, PromptProgress)]
        if told:
            self.server.deliver([(connection, StepFrame(outputs, progress))])

    async def _played(self, request: Generate, reply: Reply) -> AsyncIterator[Told]:
        """Yields a reply's tokens, one a step."""
        arrived_at, params = time.monotonic(), request.params
        await asyncio.sleep(self.step_s)
        if request.kind is OutputKind.EMBED:
            size = len(request.labels) or VECTOR_SIZE
            vector = np.ones(size, "<f4").tobytes()
            yield SequenceOutput(0, [], finish_reason=FinishReason.STOP, vector=vector)
            return
        if reply.progress is not None:
            yield PromptProgress(0, *reply.progress)
        await asyncio.sleep(reply.idle_steps * self.step_s)
        if reply.failure is ErrorCode.EXPIRED:
            await asyncio.sleep((request.timeout_s or 1e9) - (time.monotonic() - arrived_at))
        breaks = reply.failure is not None or reply.hangs_up
        tokens = itertools.cycle(reply.tokens) if reply.never_ends else iter(reply.tokens)
        # A reply of no tokens that ends well is an output without one.
        first = [] if reply.tokens or breaks else [None]
        for number, token in enumerate(itertools.chain(first, tokens), 1):
            own = [] if token is None else [token]
            is_last = number >= len(reply.tokens) and not reply.never_ends and not breaks
            finish = reply.finish_reason if is_last else None
            if finish is None and number >= params.max_tokens:
                finish = FinishReason.LENGTH
            scores = [TokenLogprobs(t, -0.5, [(t, -0.5)][: params.logprobs]) for t in own]
            yield SequenceOutput(
                0,
                own,
                logprobs=None if params.logprobs is None else scores,
                prompt_logprobs=reply.prompt_logprobs if number == 1 else None,
                finish_reason=finish,
                stop_token=reply.stop_token if finish is FinishReason.STOP else None,
                num_cached_tokens=reply.num_cached_tokens if number == 1 or finish else 0,
            )
            await asyncio.sleep(self.step_s)
        if reply.hangs_up:
            raise _HangsUp
        if reply.failure is not None:
            raise WorkerFailed(reply.failure, "as the script says")
