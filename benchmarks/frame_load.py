"""Load generator that sends requests directly to a worker's socket, as the baseline for requests
through a gateway."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from typing import Any

import msgspec

from benchmarks.frame_worker import Frames, frame
from benchmarks.http_load import Exchange, OnEnd
from workers.wire.frames import PROTOCOL_VERSION, Hello, StepFrame, ToGateway
from workers.wire.protocol import Generate, SequenceOutput

_decoder = msgspec.msgpack.Decoder[Any](ToGateway)


class FrameLink(asyncio.Protocol):
    """Connection to a worker, which all streams share."""

    def __init__(self) -> None:
        self._frames = Frames()
        self._ids = itertools.count(1)
        self._streams: dict[int, FrameStream] = {}

    def connection_made(self, transport: Any) -> None:
        self._transport = transport
        transport.write(frame(Hello(PROTOCOL_VERSION, "direct")))

    def data_received(self, data: bytes) -> None:
        now = time.perf_counter()
        for payload in self._frames.cut(data):
            message = _decoder.decode(payload)
            if isinstance(message, StepFrame):
                for output in message.sequences:
                    self._streams[output.id].take(output, now)
                    if output.finish_reason is not None:
                        del self._streams[output.id]

    def submit(self, request: Generate, stream: FrameStream) -> None:
        number = next(self._ids)
        self._streams[number] = stream
        self._transport.write(frame(msgspec.structs.replace(request, id=number)))

    def close(self) -> None:
        self._transport.abort()


class FrameStream:
    """`Sender` that sends its request over a `FrameLink`."""

    def __init__(self, link: FrameLink, request: Generate) -> None:
        self._link = link
        self._request = request
        self._exchange = Exchange(0.0)
        self._on_end: OnEnd | None = None

    def send(self, on_end: OnEnd) -> None:
        self._on_end = on_end
        self._exchange = Exchange(time.perf_counter())
        self._link.submit(self._request, self)

    def take(self, output: SequenceOutput, now: float) -> None:
        exchange = self._exchange
        exchange.arrivals += [now] * len(output.tokens)
        if output.finish_reason is not None and self._on_end is not None:
            exchange.ended_at = now
            self._on_end(exchange)


@asynccontextmanager
async def frame_streams(
    path: str, request: Generate, count: int
) -> AsyncGenerator[list[FrameStream]]:
    loop = asyncio.get_running_loop()
    _, link = await loop.create_unix_connection(FrameLink, path)
    try:
        yield [FrameStream(link, request) for _ in range(count)]
    finally:
        link.close()
