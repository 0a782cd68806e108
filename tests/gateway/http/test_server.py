"""How the data plane is served: when it ends, how long it keeps a connection, what it writes."""

from __future__ import annotations

import asyncio
import re
import socket
import struct
from collections.abc import AsyncGenerator
from contextlib import ExitStack, asynccontextmanager, suppress
from typing import Any, cast

import asyncpg  # pyright: ignore[reportMissingTypeStubs]
import pytest
import uvloop
from litestar import Litestar
from litestar.types import ASGIApp

from store.database import translated_errors
from store.errors import DatabaseUnavailable
from tests.plane import Plane, connected, lifespan
from web.http_protocol import connection_lost
from web.server import bind, make_server


async def test_a_server_ends_with_what_its_app_does_beside_serving() -> None:
    @asynccontextmanager
    async def failing(_app: Litestar) -> AsyncGenerator[None]:
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(_fail())
            yield

    server = make_server(Litestar([], lifespan=[failing]), drain_s=1)
    with bind("127.0.0.1", 0) as listener:
        async with asyncio.timeout(20):
            await server.serve(sockets=[listener])
    assert server.started


def test_who_connects_in_a_crowd_does_not_wait_for_each_before_him() -> None:
    """In turns of the loop, which under load are long."""

    async def connect(num_clients: int, num_turns: int) -> int:
        server = make_server(cast(ASGIApp, _answer), drain_s=1)
        with bind("127.0.0.1", 0) as listener, ExitStack() as clients:
            serving = asyncio.create_task(server.serve(sockets=[listener]))
            while not server.started:
                await asyncio.sleep(0.01)
            for _ in range(num_clients):
                clients.enter_context(socket.create_connection(listener.getsockname()))
            for _ in range(num_turns):
                await asyncio.sleep(0)
            num_connected = len(server.server_state.connections)
            server.should_exit = True
            await serving
        return num_connected

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        assert runner.run(connect(64, num_turns=20)) == 64


async def test_an_idle_connection_is_not_ended_before_its_client_would() -> None:
    """Who ends it must be who begins requests, or one crosses the end of the connection. The
    official client keeps it for five seconds."""
    async with Plane(Litestar([])) as plane, connected(plane.url) as (reader, writer):
        for pause_s in (6.0, 0.0):
            writer.write(b"GET / HTTP/1.1\r\nhost: a\r\n\r\n")
            head = await reader.readuntil(b"\r\n\r\n")
            (length,) = re.findall(rb"content-length: (\d+)", head)
            await reader.readexactly(int(length))
            await asyncio.sleep(pause_s)


@pytest.mark.parametrize(
    ("asked", "more"),
    [
        (b"", b""),
        (b"GET / HTTP/1.1\r\nx: ", b"y"),
        (b"POST / HTTP/1.1\r\nhost: a\r\ncontent-length: 1000\r\n\r\n", b""),
        (b"POST /unread HTTP/1.1\r\nhost: a\r\ncontent-length: 1000\r\n\r\n", b"y"),
        (
            b"GET / HTTP/1.1\r\nhost: a\r\n\r\n"
            b"POST / HTTP/1.1\r\nhost: a\r\ncontent-length: 1000\r\n\r\n",
            b"",
        ),
        (b"GET / HTTP/1.1\r\nhost: a\r\n\r\n", b""),
    ],
    ids=["nothing", "half a head", "half a body", "an unread body", "half of two", "one request"],
)
async def test_who_never_asks_to_the_end_is_let_go(asked: bytes, more: bytes) -> None:
    """As who has asked and is silent since. `more` goes on coming, and completes nothing."""
    async with Plane(_read, keep_alive_s=1, head_s=1) as plane, asyncio.timeout(20):
        # What crosses the end is answered with a reset.
        with suppress(ConnectionResetError):
            async with connected(plane.url) as (reader, writer):
                writer.write(asked)
                ended = asyncio.create_task(reader.read())
                while not ended.done():
                    writer.write(more)
                    await asyncio.wait([ended], timeout=0.2)
                await ended


@pytest.mark.parametrize(
    "asked",
    [
        b"",
        b"GET / HTTP/1.1\r\nhost: a\r\n\r\n",
        b"POST /unread HTTP/1.1\r\nhost: a\r\ncontent-length: 40000\r\n\r\n" + b"y" * 40_000,
    ],
    ids=["first", "after an answer", "after an unread body"],
)
async def test_a_head_without_an_end_is_refused(asked: bytes) -> None:
    async with Plane(_read) as plane, asyncio.timeout(20):
        with suppress(ConnectionResetError):
            async with connected(plane.url) as (reader, writer):
                if asked:
                    writer.write(asked[:200])
                    await reader.readuntil(b"body")
                    writer.write(asked[200:])
                writer.write(b"GET / HTTP/1.1\r\nx: ")
                ended = asyncio.create_task(reader.read())
                while not ended.done():
                    writer.write(b"y" * 10_000)
                    await asyncio.wait([ended], timeout=0.05)
                assert (await ended).startswith(b"HTTP/1.1 400 ")


async def test_a_long_head_and_a_long_body_are_taken() -> None:
    async with (
        Plane(_read) as plane,
        connected(plane.url) as (reader, writer),
        asyncio.timeout(20),
    ):
        for _ in range(2):
            writer.write(b"POST / HTTP/1.1\r\nhost: a\r\ncontent-length: 300000\r\nx: ")
            for part in (b"y" * 30_000, b"y" * 30_000 + b"\r\n\r\n", *[b"z" * 30_000] * 10):
                writer.write(part)
                await asyncio.sleep(0.02)
            await reader.readuntil(b"body")


async def test_who_goes_on_asking_and_who_waits_is_not_let_go() -> None:
    async with (
        Plane(_read, keep_alive_s=2) as plane,
        connected(plane.url) as (reader, writer),
        asyncio.timeout(60),
    ):
        writer.write(b"POST /slow HTTP/1.1\r\nhost: a\r\ncontent-length: 15\r\n\r\n")
        for _ in range(15):
            writer.write(b"y")
            await asyncio.sleep(0.2)
        await reader.readuntil(b"body")


async def test_an_answers_head_and_body_are_one_packet() -> None:
    async with Plane(_answer) as plane, connected(plane.url) as (reader, writer):
        for number in range(1, 4):
            writer.write(b"GET / HTTP/1.1\r\nhost: a\r\n\r\n")
            assert (await reader.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 200 OK\r\n")
            assert await reader.readexactly(4) == b"body"
            assert _data_packets(writer) == number


@pytest.mark.parametrize("method", [b"GET", b"HEAD"])
async def test_a_head_does_not_wait_for_a_body_that_is_not_there_yet(method: bytes) -> None:
    is_awaited = asyncio.Event()

    async def slow(scope: Any, receive: Any, send: Any) -> None:
        await _answer(scope, receive, send, is_awaited)

    async with Plane(slow) as plane, connected(plane.url) as (reader, writer):
        writer.write(method + b" / HTTP/1.1\r\nhost: a\r\nconnection: close\r\n\r\n")
        async with asyncio.timeout(20):
            await reader.readuntil(b"\r\n\r\n")
        is_awaited.set()
        assert await reader.read() == (b"body" if method == b"GET" else b"")


async def test_a_connection_lost_after_a_large_body_is_told() -> None:
    """The server stops reading at one that comes faster than it is asked for."""
    has_begun, has_read, is_told = asyncio.Event(), asyncio.Event(), asyncio.Event()

    async def reading(scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            await _answer(scope, receive, send)
            return
        connection_lost(scope).add_done_callback(lambda _: is_told.set())
        while (await receive())["more_body"]:
            has_begun.set()
        has_read.set()
        await is_told.wait()

    async with Plane(reading) as plane, connected(plane.url) as (_, writer), asyncio.timeout(20):
        writer.write(b"POST / HTTP/1.1\r\nhost: a\r\ncontent-length: 100001\r\n\r\n1")
        await has_begun.wait()
        # Written while the server, in the same loop, reads nothing: it finds all of it at once.
        writer.write(b"0" * 100_000)
        await has_read.wait()
        writer.close()
        await is_told.wait()


async def test_the_last_answer_of_a_connection_is_whole() -> None:
    async with Plane(_answer) as plane, connected(plane.url) as (reader, writer):
        writer.write(b"HEAD / HTTP/1.1\r\nhost: a\r\nconnection: close\r\n\r\n")
        answer = await reader.read()
    assert answer.startswith(b"HTTP/1.1 200 OK\r\n") and answer.endswith(b"\r\n\r\n")


async def _answer(
    scope: Any, receive: Any, send: Any, is_awaited: asyncio.Event | None = None
) -> None:
    if scope["type"] == "http":
        headers = [(b"content-length", b"4")]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        if is_awaited is not None:
            await is_awaited.wait()
        await send({"type": "http.response.body", "body": b"body", "more_body": False})
    else:
        await lifespan(receive, send)


async def _read(scope: Any, receive: Any, send: Any) -> None:
    """Answers a body that is whole, one of `/slow` late and one of `/unread` as it begins."""
    if scope["type"] == "http" and scope["path"] != "/unread":
        while (message := await receive()).get("more_body"):
            pass
        if message["type"] == "http.disconnect":
            return
        if scope["path"] == "/slow":
            await asyncio.sleep(3)
    await _answer(scope, receive, send)


def _data_packets(writer: asyncio.StreamWriter) -> int:
    """That have come, by `tcpi_data_segs_in` of Linux' tcp_info."""
    info = writer.get_extra_info("socket").getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 160)
    return struct.unpack_from("=I", info, 152)[0]


async def _fail() -> None:
    await asyncio.sleep(0.3)
    raise RuntimeError("a defect")


def test_a_connection_lost_in_the_midst_of_a_call_is_a_database_that_is_away() -> None:
    with pytest.raises(DatabaseUnavailable), translated_errors():
        raise asyncpg.InternalClientError("cannot switch to state 12; another operation (2) is in")
