"""A worker that speaks real frames and answers from a script, one token a step."""

from __future__ import annotations

import asyncio
import hashlib
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from types import TracebackType

import numpy as np

from workers.process.server import Command, Disconnected, Server
from workers.wire.protocol import (
    Abort,
    AdapterStatus,
    Desired,
    Drain,
    ErrorCode,
    Failed,
    Fingerprint,
    FinishReason,
    Generate,
    ModelInfo,
    OutputKind,
    Prefetch,
    Probe,
    ProbeResult,
    PromptProgress,
    SequenceOutput,
    StepFrame,
    TokenLogprobs,
    Withdraw,
    WorkerStatus,
)
from workers.wire.transport.base import Security


@dataclass(frozen=True)
class Reply:
    """The answer to one Generate. After the tokens: `failure` if given, else the finish."""

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


Script = Callable[[Generate], Reply]
ProbeScript = Callable[[Probe], ProbeResult | None]
"""None: no answer, ever."""

LAYOUT = "stub-1"
VECTOR_SIZE = 64


def proved(probe: Probe) -> ProbeResult:
    """The checksum is the SHA-256 of the digest's text."""
    checksum = hashlib.sha256(probe.adapter.digest.encode()).hexdigest()
    return ProbeResult(probe.id, LAYOUT, checksum, Fingerprint([1], [-0.5], effect=1.0))


@dataclass
class _Running:
    connection: int
    request: Generate
    reply: Reply
    num_sent: int = 0
    num_idle: int = 0
    has_told: bool = False
    arrived_at: float = field(default_factory=time.monotonic)

    @property
    def is_expired(self) -> bool:
        timeout_s = self.request.timeout_s
        return timeout_s is not None and time.monotonic() - self.arrived_at > timeout_s


@dataclass
class StubWorker:
    """`async with StubWorker(f"unix:{path}", ["digest"], script)`; may be entered again
    afterwards."""

    address: str
    model_digests: list[str]
    script: Script
    step_s: float = 0.001
    probe_script: ProbeScript = proved
    max_model_len: int = 4096
    received: list[Generate] = field(default_factory=list)
    aborted: list[int] = field(default_factory=list)
    """Ids of sequences aborted while they ran, or lost with their connection."""
    prefetched: list[str] = field(default_factory=list)
    probed: list[Probe] = field(default_factory=list)
    withdrawn: list[int] = field(default_factory=list)
    """Ids of probes."""
    desired: list[Desired] = field(default_factory=list)
    adapters: list[AdapterStatus] = field(default_factory=list)
    """What a status says of them."""
    instance_id: str = "stub"
    security: Security = Security()  # noqa: RUF009
    is_ready: bool = True
    is_draining: bool = False
    step_age_s: float = 0.0
    abort_s: float = 0.0
    """Seconds of the step that an abort waits for."""

    async def __aenter__(self) -> StubWorker:
        self._running: dict[tuple[int, int], _Running] = {}
        self._wake = asyncio.Event()
        self.server = Server(self.address, instance_id=self.instance_id, security=self.security)
        await self.server.start(self)
        self.address = self.server.address
        self._steps = asyncio.create_task(self._run())
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._steps.cancel()
        await asyncio.wait([self._steps])
        await self.server.close()

    @property
    def models(self) -> list[ModelInfo]:
        return [
            ModelInfo(digest, digest, self.max_model_len, LAYOUT) for digest in self.model_digests
        ]

    @property
    def num_running(self) -> int:
        return len(self._running)

    def report(self) -> None:
        """Sends a status to all gateways."""
        generation = self.desired[-1].generation if self.desired else 0
        status = WorkerStatus(
            self.instance_id, self.is_draining, [], self.adapters, 0, "", {}, 0, 0.0, generation
        )
        self.server.deliver([(0, status)])

    def post(self, connection: int, message: Command) -> None:
        match message:
            case Generate():
                self.received.append(message)
                reply = self.script(message)
                self._running[connection, message.id] = _Running(connection, message, reply)
                self._wake.set()
            case Abort(id=sequence_id):
                if running := self._running.pop((connection, sequence_id), None):
                    self.aborted.append(sequence_id)
                    last = running.reply.last_progress
                    progress = [] if last is None else [PromptProgress(sequence_id, *last)]
                    end = SequenceOutput(sequence_id, [], finish_reason=FinishReason.ABORT)
                    delivery = [(connection, StepFrame([end], progress))]
                    asyncio.get_running_loop().call_later(
                        self.abort_s, self.server.deliver, delivery
                    )
            case Disconnected():
                lost = [key for key in self._running if key[0] == connection]
                self.aborted += [self._running.pop(key).request.id for key in lost]
            case Prefetch(adapter=adapter):
                self.prefetched.append(adapter.digest)
            case Probe():
                self.probed.append(message)
                if (result := self.probe_script(message)) is not None:
                    self.server.deliver([(connection, result)])
            case Withdraw(id=probe_id):
                self.withdrawn.append(probe_id)
            case Desired():
                self.desired.append(message)
                self.report()
            case Drain(is_on=is_on):
                self.is_draining = is_on
                self.report()

    async def _run(self) -> None:
        while True:
            await self._wake.wait()
            while self._running:
                await asyncio.sleep(self.step_s)
                await self._step()
            self._wake.clear()

    async def _step(self) -> None:
        outputs: dict[int, list[SequenceOutput]] = {}
        failures: list[tuple[int, Failed]] = []
        for key, running in list(self._running.items()):
            reply = running.reply
            if reply.progress is not None and not running.has_told:
                running.has_told = True
                progress = PromptProgress(running.request.id, *reply.progress)
                self.server.deliver([(running.connection, StepFrame([], [progress]))])
            if running.num_idle < reply.idle_steps:
                running.num_idle += 1
                continue
            if reply.failure is ErrorCode.EXPIRED and not running.is_expired:
                continue
            is_done = running.num_sent >= len(reply.tokens) and not reply.never_ends
            if is_done and reply.hangs_up:
                await self.server.close()
                return
            if is_done and reply.failure is not None:
                del self._running[key]
                failed = Failed(running.request.id, reply.failure, "as the script says")
                failures.append((running.connection, failed))
                continue
            output = self._output(running)
            outputs.setdefault(running.connection, []).append(output)
            if output.finish_reason is not None:
                del self._running[key]
        steps = [(connection, StepFrame(each)) for connection, each in outputs.items()]
        self.server.deliver([*failures, *steps])

    def _output(self, running: _Running) -> SequenceOutput:
        reply, params = running.reply, running.request.params
        if running.request.kind is OutputKind.EMBED:
            return SequenceOutput(
                running.request.id,
                [],
                finish_reason=FinishReason.STOP,
                vector=np.ones(len(running.request.labels) or VECTOR_SIZE, "<f4").tobytes(),
            )
        is_first = running.num_sent == 0
        index = running.num_sent % max(len(reply.tokens), 1)
        tokens = reply.tokens[index : index + 1]
        running.num_sent += 1
        is_scripted_end = running.num_sent >= len(reply.tokens) and not reply.never_ends
        finish = None
        if is_scripted_end and reply.failure is None and not reply.hangs_up:
            finish = reply.finish_reason
        if finish is None and running.num_sent >= params.max_tokens:
            finish = FinishReason.LENGTH
        logprobs = None
        if params.logprobs is not None:
            logprobs = [TokenLogprobs(t, -0.5, [(t, -0.5)][: params.logprobs]) for t in tokens]
        return SequenceOutput(
            running.request.id,
            tokens,
            logprobs=logprobs,
            prompt_logprobs=reply.prompt_logprobs if is_first else None,
            finish_reason=finish,
            stop_token=reply.stop_token if finish is FinishReason.STOP else None,
            num_cached_tokens=reply.num_cached_tokens if is_first or finish else 0,
        )
