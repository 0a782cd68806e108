"""Load generator that runs on one core, next to the server's core. It uses keep-alive connections
and prepared requests. It does not parse answers, but detects their ends and counts their tokens."""

from __future__ import annotations

import asyncio
import itertools
import random
import time
from collections import deque
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any, Protocol

import msgspec

OK = b"HTTP/1.1 200 "
HEAD_END = b"\r\n\r\n"
LENGTH = b"content-length: "
TOKEN = b'"delta":{"content":'
DONE = b"data: [DONE]\n\n"
LAST_CHUNK = b"0\r\n\r\n"
PATIENCE_S = 30.0


class Exchange(msgspec.Struct):
    """Request and its answer. Times are seconds of time.perf_counter()."""

    started_at: float
    arrivals: list[float] = []
    """Arrival time of each token of a stream, or the end of an answer that is not streamed."""
    ended_at: float = 0.0
    error: str | None = None

    @property
    def seconds(self) -> float:
        return self.ended_at - self.started_at


OnEnd = Callable[[Exchange], None]
numbers = itertools.count(10_000_000)


class Sender(Protocol):
    """Sender of one request. It may send the request again after each answer."""

    def send(self, on_end: OnEnd) -> None: ...


class Request(msgspec.Struct, frozen=True):
    data: bytes
    """Bytes of the request with one `%d`, which is replaced by a new number of eight digits each
    time the request is sent."""
    num_tokens: int
    """Expected number of tokens of the answer. Another number is an error."""


class Connection(asyncio.Protocol):
    """Keep-alive connection to a chat server."""

    def __init__(self, request: Request) -> None:
        self.request = request
        self.exchange = Exchange(0.0)
        self._on_end: OnEnd | None = None

    def connection_made(self, transport: Any) -> None:
        self._transport = transport

    def connection_lost(self, exc: Exception | None) -> None:
        self.end("the connection was closed")

    def send(self, on_end: OnEnd) -> None:
        self._on_end = on_end
        self.exchange = Exchange(time.perf_counter())
        self._transport.write(self.request.data % next(numbers))

    def end(self, error: str | None = None) -> None:
        on_end, self._on_end = self._on_end, None
        if on_end is not None:
            self.exchange.ended_at = time.perf_counter()
            self.exchange.error = error
            on_end(self.exchange)


class WholeConnection(Connection):
    """Connection whose answers are bodies with a Content-Length."""

    def __init__(self, request: Request) -> None:
        super().__init__(request)
        self._seen = b""
        self._usage = b'"completion_tokens":%d' % request.num_tokens

    def data_received(self, data: bytes) -> None:
        self._seen = seen = self._seen + data
        head = seen.find(HEAD_END)
        if head < 0:
            return
        at = seen.index(LENGTH) + len(LENGTH)
        length = int(seen[at : seen.index(b"\r", at)])
        if len(seen) < head + len(HEAD_END) + length:
            return
        self._seen = b""
        is_right = seen.startswith(OK) and self._usage in seen
        self.exchange.arrivals.append(time.perf_counter())
        self.end(None if is_right else repr(seen[:600]))


class StreamConnection(Connection):
    """Connection whose answers are server-sent events."""

    def __init__(self, request: Request) -> None:
        super().__init__(request)
        self._tail = b""

    def data_received(self, data: bytes) -> None:
        now = time.perf_counter()
        tail = self._tail
        seen = tail + data
        arrivals = self.exchange.arrivals
        if not tail and not seen.startswith(OK):
            self.end(repr(seen[:600]))
            return
        num_tokens = seen.count(TOKEN, max(0, len(tail) - len(TOKEN) + 1))
        arrivals += [now] * num_tokens
        if not seen.endswith(LAST_CHUNK):
            self._tail = seen[-64:]
            return
        self._tail = b""
        is_right = DONE in seen and len(arrivals) == self.request.num_tokens
        self.end(None if is_right else f"{len(arrivals)} tokens, then {seen[-600:]!r}")


@asynccontextmanager
async def connected(
    make: Callable[[], Connection], port: int, count: int
) -> AsyncGenerator[list[Connection]]:
    loop = asyncio.get_running_loop()
    made = [await loop.create_connection(make, "127.0.0.1", port) for _ in range(count)]
    try:
        yield [connection for _, connection in made]
    finally:
        for transport, _ in made:
            transport.abort()


async def closed_loop(senders: Sequence[Sender], seconds: float) -> list[Exchange]:
    """Lets each sender repeat its request after each answer, for `seconds`, then waits for the last
    answers. Raises RuntimeError for a wrong answer."""
    ended: list[Exchange] = []
    stop_at = time.perf_counter() + seconds
    num_open = len(senders)
    over = asyncio.get_running_loop().create_future()

    def send(sender: Sender) -> None:
        def on_end(exchange: Exchange) -> None:
            nonlocal num_open
            ended.append(exchange)
            if exchange.error is None and exchange.ended_at < stop_at:
                sender.send(on_end)
                return
            num_open -= 1
            if not over.done() and (not num_open or exchange.error):
                over.set_result(exchange.error)

        sender.send(on_end)

    for sender in senders:
        send(sender)
    await _wait(over, seconds)
    return ended


async def paced(
    senders: Sequence[Sender], rate: float, seconds: float, seed: int
) -> list[Exchange]:
    """Sends requests at random times (Poisson), `rate` per second on average, without waiting for
    answers. If all senders are busy, the request waits for one, and its time counts from then.
    Raises RuntimeError for a wrong answer."""
    loop = asyncio.get_running_loop()
    draw = random.Random(seed)
    idle = deque(senders)
    ended: list[Exchange] = []
    failed: list[str] = []
    freed = asyncio.Event()

    def send(sender: Sender) -> None:
        def on_end(exchange: Exchange) -> None:
            ended.append(exchange)
            idle.append(sender)
            freed.set()
            if exchange.error:
                failed.append(exchange.error)

        sender.send(on_end)

    due = begin = loop.time()
    while due < begin + seconds and not failed:
        due += draw.expovariate(rate)
        await asyncio.sleep(max(0.0, due - loop.time()))
        while not idle:
            freed.clear()
            async with asyncio.timeout(PATIENCE_S):
                await freed.wait()
        send(idle.popleft())
    while len(idle) < len(senders) and not failed:
        freed.clear()
        async with asyncio.timeout(PATIENCE_S):
            await freed.wait()
    if failed:
        raise RuntimeError(failed[0])
    return ended


async def _wait(over: asyncio.Future[str | None], seconds: float) -> None:
    async with asyncio.timeout(seconds + PATIENCE_S):
        error = await over
    if error:
        raise RuntimeError(error)
