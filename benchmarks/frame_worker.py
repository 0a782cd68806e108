"""Stub worker that needs almost no CPU time. It sends real frames over a Unix socket, with fixed
tokens at a fixed rate.

The first token of a sequence is sent in its own frame as soon as the `Generate` is read. Later
tokens are sent in one frame per step, together with the tokens of all other sequences.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import AsyncGenerator, Iterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec

from workers.wire.frames import (
    PROTOCOL_VERSION,
    Desired,
    Fingerprint,
    Hello,
    Probe,
    ProbeResult,
    Pulse,
    StepFrame,
    ToGateway,
    ToWorker,
)
from workers.wire.protocol import FinishReason, Generate, ModelInfo, SequenceOutput
from workers.wire.status import AdapterStatus, WorkerStatus
from workers.wire.transport.stream import bind_private

INSTANCE_ID = "frames"
LAYOUT = "frames/1"
STATUS_INTERVAL_S = 1.0

_encode = msgspec.msgpack.encode
_decoder = msgspec.msgpack.Decoder[Any](ToWorker)


def frame(message: ToGateway | ToWorker) -> bytes:
    payload = _encode(message)
    return len(payload).to_bytes(4, "big") + payload


class Frames:
    """Cuts a stream of bytes into the payloads of its frames."""

    def __init__(self) -> None:
        self._rest = b""

    def cut(self, data: bytes) -> Iterator[bytes]:
        data, at = self._rest + data, 0
        while at + 4 <= len(data):
            end = at + 4 + int.from_bytes(data[at : at + 4], "big")
            if end > len(data):
                break
            yield data[at + 4 : end]
            at = end
        self._rest = data[at:]


class FrameWorker:
    """Worker whose sequences all advance by one token every `step_s` seconds. `step_s` may be
    changed at any time."""

    def __init__(self, model: ModelInfo, words: Sequence[int]) -> None:
        """`words`: tokens of every answer, repeated as often as necessary."""
        self.model = model
        self.step_s = 0.01
        self.num_open = 0
        self._words = words

    @asynccontextmanager
    async def listening(self, path: Path) -> AsyncGenerator[str]:
        """Listens on a Unix socket. Yields the address for gateways."""
        loop = asyncio.get_running_loop()
        server = await loop.create_unix_server(lambda: _Gateway(self), sock=bind_private(path))
        try:
            yield f"unix:{path}"
        finally:
            server.close()

    def output(self, request: Generate, num_sent: int, num_tokens: int) -> SequenceOutput | None:
        """Returns the next message of a sequence with `num_tokens` tokens, of which `num_sent` are
        already sent. Returns None if the request's stream interval is not reached yet."""
        is_last = num_tokens >= request.params.max_tokens
        if num_sent and not is_last and num_tokens - num_sent < request.stream_interval:
            return None
        return SequenceOutput(
            request.id,
            [self._words[at % len(self._words)] for at in range(num_sent, num_tokens)],
            finish_reason=FinishReason.LENGTH if is_last else None,
        )


class _Gateway(asyncio.Protocol):
    """Connection to a gateway."""

    def __init__(self, worker: FrameWorker) -> None:
        self._worker = worker
        self._loop = asyncio.get_running_loop()
        self._frames = Frames()
        self._running: dict[int, tuple[Generate, int, int]] = {}
        """Running requests by id, each with its numbers of sent and of generated tokens."""
        self._adapters: dict[str, AdapterStatus] = {}
        self._generation = 0
        self._num_received = 0
        self._step: asyncio.TimerHandle | None = None
        self._report: asyncio.TimerHandle | None = None

    def connection_made(self, transport: Any) -> None:
        self._transport = transport
        self._send(Hello(PROTOCOL_VERSION, INSTANCE_ID, [self._worker.model]))
        self._tell()

    def connection_lost(self, exc: Exception | None) -> None:
        for timer in (self._step, self._report):
            if timer is not None:
                timer.cancel()
        self._worker.num_open -= len(self._running)

    def data_received(self, data: bytes) -> None:
        for payload in self._frames.cut(data):
            self._num_received += 1
            self._receive(_decoder.decode(payload))

    def _receive(self, message: ToWorker) -> None:
        match message:
            case Generate():
                self._begin(message)
            case Probe(id=probe_id, adapter=adapter):
                checksum = hashlib.sha256(adapter.digest.encode()).hexdigest()
                proof = Fingerprint([1], [-0.5], effect=1.0)
                self._send(ProbeResult(probe_id, LAYOUT, checksum, proof))
            case Desired(generation=generation):
                self._generation = generation
            case _:
                pass

    def _begin(self, request: Generate) -> None:
        if request.adapter is not None and request.adapter.digest not in self._adapters:
            digest = request.adapter.digest
            self._adapters[digest] = AdapterStatus(digest, "device", 1 << 20, 0, False)
        first = self._worker.output(request, 0, 1)
        assert first is not None
        self._send(StepFrame([first]))
        if first.finish_reason is None:
            self._running[request.id] = request, 1, 1
            self._worker.num_open += 1
            if self._step is None:
                self._step = self._loop.call_later(self._worker.step_s, self._advance)

    def _advance(self) -> None:
        # The next step is scheduled first, so that the time to send outputs does not delay it.
        self._step = self._loop.call_later(self._worker.step_s, self._advance)
        outputs: list[SequenceOutput] = []
        for request, num_sent, num_tokens in list(self._running.values()):
            output = self._worker.output(request, num_sent, num_tokens + 1)
            if output is not None:
                outputs.append(output)
                num_sent = num_tokens + 1
            if output is None or output.finish_reason is None:
                self._running[request.id] = request, num_sent, num_tokens + 1
            else:
                del self._running[request.id]
                self._worker.num_open -= 1
        if outputs:
            self._send(StepFrame(outputs))
        elif not self._running:
            self._step.cancel()
            self._step = None

    def _tell(self) -> None:
        status = WorkerStatus(
            *(INSTANCE_ID, False, [], list(self._adapters.values())),
            *(0, "", {}, 0, 0.0, self._generation),
        )
        self._send(status)
        self._send(Pulse(num_received=self._num_received))
        self._report = self._loop.call_later(STATUS_INTERVAL_S, self._tell)

    def _send(self, message: ToGateway) -> None:
        self._transport.write(frame(message))
