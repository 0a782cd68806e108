"""Sends answers as server-sent events or as one body, and ends them when the client disconnects.

The framework's own streaming neither closes generators nor stops when a client disconnects. The
answers are therefore plain ASGI applications that cancel their generation in a `finally` block.
"""

from __future__ import annotations

import asyncio
import contextlib
from abc import ABC, abstractmethod
from collections import deque
from dataclasses import dataclass, field
from functools import partial
from typing import Self

from litestar.types import Receive, Scope, Send

from gateway import telemetry
from gateway.dialects.dialect import (
    SCORES_AT_ONCE,
    Answer,
    AnswerFormat,
    BodyFormat,
    num_scores,
    split,
    write_scores,
)
from gateway.dispatch.generation import Generation
from gateway.dispatch.sequence import Delta
from gateway.dispatch.settlement import Settlement
from gateway.exceptions import UsageUnavailable, error_type, forget_frames
from gateway.http.routing import Headers
from gateway.metering.usage_loader import Status
from gateway.requests.request_scope import RequestScope
from web.held_bytes import PIECE_BYTES
from web.http_protocol import connection_lost

ANSWER_WAIT_S = 2.0
"""Maximum seconds that an error answer waits for the workers to report how much of the prompts they
computed. Workers report after their current step."""


def _now() -> float:
    return asyncio.get_running_loop().time()


@dataclass(eq=False)
class GenerationResponse(ABC):
    """Response that runs a generation until it ends or the client disconnects."""

    context: RequestScope
    generation: Generation
    headers: Headers
    settlement: Settlement
    """Settlement of the request. The usage is recorded before the end of the answer is sent, unless
    the request is refused."""

    async def __call__(self, scope: Scope, _receive: Receive, send: Send) -> None:
        """Answers the request. Raises exceptions only if nothing has been sent yet."""
        try:
            with Client(connection_lost(scope)):
                await self._answer(send)
        except Exception as error:
            self.context.failure = error
            await self._keep_failure()
            raise

    @abstractmethod
    async def _answer(self, send: Send) -> None:
        """Sends the answer. Raises exceptions only if nothing has been sent yet."""

    async def _keep_failure(self) -> None:
        """Records the usage before the error is sent, unless workers take longer than ANSWER_WAIT_S
        to report or the record cannot be written. A refused request has no usage."""
        is_final = await self.generation.stop(ANSWER_WAIT_S)
        if is_final and not self.generation.is_refused:
            with contextlib.suppress(UsageUnavailable):
                await self.settlement.keep(Status.FAILED)


@dataclass(eq=False)
class WholeResponse(GenerationResponse):
    """Response with one JSON body, sent when all choices have ended."""

    format: BodyFormat

    async def _answer(self, send: Send) -> None:
        pieces = await self._pieces()
        await self.settlement.keep(Status.COMPLETED)
        headers = [
            (b"content-type", b"application/json"),
            (b"content-length", b"%d" % sum(map(len, pieces))),
            *self.headers,
        ]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        while pieces:
            piece = _next_piece(pieces)
            await send({"type": "http.response.body", "body": piece, "more_body": bool(pieces)})

    async def _pieces(self) -> deque[bytes]:
        """Waits for the generation, and returns the body in pieces."""
        answers: dict[int, Answer] = {}
        for delta in await self.generation.finish():
            if delta.index not in answers:
                answers[delta.index] = Answer(delta.index)
            answers[delta.index].add(delta)
        in_order = [answers[index] for index in sorted(answers)]
        return deque(await self.format.body(in_order, self.generation.usage))


def _next_piece(pieces: deque[bytes]) -> bytes:
    """Removes and joins pieces until they have PIECE_BYTES. Their memory is freed once the client
    has read them."""
    joined: list[bytes] = []
    num_bytes = 0
    while pieces and num_bytes < PIECE_BYTES:
        joined.append(pieces.popleft())
        num_bytes += len(joined[-1])
    return b"".join(joined)


@dataclass(eq=False)
class StreamResponse(GenerationResponse):
    """Response as a stream, with one write per engine step. Sends pings while there is no output.

    The HTTP head is sent with the first event, so that an earlier failure is a plain HTTP error.
    """

    format: AnswerFormat
    ping_interval_s: float
    _has_started: bool = field(default=False, init=False)
    _start: bytes = field(default=b"", init=False)
    """Events that are sent before all others."""
    _write_lock: asyncio.Lock = field(default_factory=asyncio.Lock, init=False)
    _last_write: float = field(default_factory=_now, init=False)
    _watcher: asyncio.Task[None] | None = field(default=None, init=False)

    async def _answer(self, send: Send) -> None:
        loop = asyncio.get_running_loop()
        timer = loop.call_later(self.ping_interval_s, self._watch, send)
        try:
            await self._stream(send)
        finally:
            timer.cancel()
            if self._watcher is not None:
                self._watcher.cancel()

    async def _stream(self, send: Send) -> None:
        try:
            deltas = await self.generation.step()
            self._start = self.format.start(self.generation.usage)
            # `is_done` is read before the next await, because during an await it may become true
            # although the last deltas have not been sent.
            while not self.generation.is_done:
                if (chunks := await self._chunks(send, deltas)) or self._start:
                    await self._write(send, chunks)
                deltas = await self.generation.step()
            chunks = await self._chunks(send, deltas)
            chunks += self.format.end(self.generation.usage)
            await self.settlement.keep(Status.COMPLETED)
            await self._write(send, chunks, more=False)
        except Exception as error:
            if not self._has_started:
                raise
            self.context.failure = error
            telemetry.last_errors.note(error_type(error), self.settlement.request_id)
            await self._keep_failure()
            await self._write(send, self.format.error_event(error), more=False)
            forget_frames(error)

    async def _chunks(self, send: Send, deltas: list[Delta]) -> bytes:
        """Returns the events of these deltas. If the deltas are large, sends the events piece by
        piece, lets the event loop run in between, and returns the events of the last piece."""
        if sum([num_scores(delta.scored) for delta in deltas]) <= SCORES_AT_ONCE:
            return b"".join([self.format.chunk(delta) for delta in deltas])
        chunks = b""
        for delta in split(deltas):
            if chunks:
                await self._write(send, chunks)
            chunks = await write_scores(delta.scored, partial(self.format.chunk, delta))
        return chunks

    async def _write(self, send: Send, data: bytes, *, more: bool = True) -> None:
        async with self._write_lock:
            self._last_write = _now()
            if not self._has_started:
                self._has_started = True
                headers = [
                    (b"content-type", b"text/event-stream; charset=utf-8"),
                    (b"cache-control", b"no-cache"),
                    (b"x-accel-buffering", b"no"),
                    *self.headers,
                ]
                await send({"type": "http.response.start", "status": 200, "headers": headers})
            data, self._start = self._start + data, b""
            await send({"type": "http.response.body", "body": data, "more_body": more})

    def _watch(self, send: Send) -> None:
        """Starts the task that sends pings while there is no output."""
        self._watcher = asyncio.create_task(self._keep_alive(send))

    async def _keep_alive(self, send: Send) -> None:
        """Sends pings while there is no output."""
        while True:
            await asyncio.sleep(self._last_write + self.ping_interval_s - _now())
            if self._last_write + self.ping_interval_s <= _now():
                await self._write(send, self.format.ping)


class Client:
    """Context manager that cancels the current task when the client disconnects. The `with` block
    then ends without an exception.

    A callback on the connection reports the disconnect, because a task that waits for it would
    cost as much as reading a request.
    """

    def __init__(self, lost: asyncio.Future[None]) -> None:
        """`lost` is a future that is done when the connection is lost."""
        task = asyncio.current_task()
        assert task is not None
        self._task = task
        self._lost = lost
        self._has_left = False
        self._is_over = False

    def __enter__(self) -> Self:
        self._lost.add_done_callback(self.leave)
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> bool:
        self._lost.remove_done_callback(self.leave)
        self._is_over = True
        is_ended = kind is not None and issubclass(kind, asyncio.CancelledError)
        return is_ended and self._has_left and not self._task.uncancel()

    def leave(self, _: object = None) -> None:
        """Cancels the task. Does nothing if called again or after the block has ended."""
        if not (self._has_left or self._is_over):
            self._has_left = True
            self._task.cancel()
