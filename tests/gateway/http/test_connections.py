"""Connections of strangers: they take neither the descriptors nor the places of others."""

from __future__ import annotations

import asyncio
import socket
from contextlib import ExitStack, suppress
from typing import Any

import pytest

from tests.gateway.live import Live
from tests.plane import Plane, connected, lifespan
from tests.waiting import eventually
from web.http_protocol import HEAD_PIECE_BYTES, MAX_HEAD_BYTES, Connections

MAX_DESCRIPTORS = 256
HALF = b"POST /v1/completions HTTP/1.1\r\nhost: a\r\nx-half: "


class _Client:
    """A connection as `Connections` sees it."""

    def __init__(self) -> None:
        self.reasons: list[str] = []

    def shed(self, reason: str) -> None:
        self.reasons.append(reason)


def opened(connections: Connections, host: str | None = "192.0.2.1") -> _Client:
    client = _Client()
    assert connections.open(client, host) is None
    return client


def test_who_makes_room() -> None:
    """Half-sent heads first, then idle ones, each the oldest first; never one with a request."""
    connections = Connections(4, 0)
    busy, idle, silent, half = (opened(connections) for _ in range(4))
    for client in (busy, idle):
        connections.begin_request(client)
    connections.end_request(idle)
    connections.add_to_head(half, 10)
    for _ in range(3):
        connections.begin_request(opened(connections))
    assert (silent.reasons, half.reasons, idle.reasons) == (["connections"],) * 3
    assert connections.open(_Client(), "192.0.2.1") == "connections"
    assert busy.reasons == [] and len(connections) == 4
    connections.close(busy)
    opened(connections)


def test_an_address_takes_its_part() -> None:
    connections = Connections(16, 2)
    own = [opened(connections) for _ in range(2)]
    other = opened(connections, "192.0.2.2")
    opened(connections)
    assert own[0].reasons == ["connections_of_address"] and other.reasons == []
    for host in ("127.0.0.1", "::1", None):
        for _ in range(3):
            opened(connections, host)
    assert own[1].reasons == []


def test_unfinished_heads_are_bounded_together() -> None:
    connections = Connections(4096)
    clients = [opened(connections, f"10.0.{i // 250}.{i % 250}") for i in range(2048)]
    for client in clients:
        connections.add_to_head(client, MAX_HEAD_BYTES)
    assert sum(client.reasons == ["head_bytes"] for client in clients) == 1024
    assert clients[0].reasons and not clients[-1].reasons


async def test_half_sent_heads_exhaust_no_descriptors(live: Live, dsn: str) -> None:
    """Twice as many as the process may open; an ordinary client is served, and usage written."""
    await live.make_ready("1")
    async with live.worker:
        gateway = live.process(dsn, max_descriptors=MAX_DESCRIPTORS)
        await gateway.start()
        try:
            with ExitStack() as strangers:
                async with gateway.new_client(live.key) as client:
                    for number in range(2 * MAX_DESCRIPTORS):
                        half = strangers.enter_context(socket.socket())
                        half.connect(("127.0.0.1", int(gateway.url.rpartition(":")[2])))
                        with suppress(ConnectionError):
                            half.sendall(HALF)
                        if number % 64 == 63:
                            body = {"model": "bot", "prompt": "Hi", "max_tokens": 3}
                            # A client of its own, whose connection is new.
                            async with gateway.new_client(live.key) as fresh:
                                for each in (client, fresh):
                                    answer = await each.post("/v1/completions", json=body)
                                    assert answer.status_code == 200, answer.text
                await eventually(lambda: has_usage(live, 16))
        finally:
            await gateway.kill()


async def has_usage(live: Live, number: int) -> bool:
    (row,) = await live.fetch("SELECT count(*) AS n FROM usage")
    return row["n"] >= number


async def test_a_head_has_a_deadline_from_its_first_byte() -> None:
    """However steadily it comes; an idle connection keeps its own time."""
    async with (
        asyncio.timeout(20),
        Plane(_answer, head_s=1) as plane,
        connected(plane.url) as (idle, idle_writer),
        connected(plane.url) as (slow, writer),
    ):
        ended = asyncio.create_task(slow.read())
        writer.write(HALF)
        while not ended.done():
            writer.write(b"y")
            await asyncio.wait([ended], timeout=0.1)
        with suppress(ConnectionError):
            await ended
        idle_writer.write(b"GET / HTTP/1.1\r\nhost: a\r\n\r\n")
        assert (await idle.readline()).startswith(b"HTTP/1.1 200 ")


WHOLE = b"GET / HTTP/1.1\r\nhost: a\r\n\r\n"
POST = b"POST / HTTP/1.1\r\nhost: a\r\ncontent-length: 4\r\n\r\nbody"


def padded(num_bytes: int, how: str) -> bytes:
    """A whole head of so many bytes."""
    begin, end = {
        "value": (b"GET / HTTP/1.1\r\nhost: a\r\nx-pad: ", b"\r\n\r\n"),
        "name": (b"GET / HTTP/1.1\r\nhost: a\r\n", b": y\r\n\r\n"),
        "path": (b"GET /", b" HTTP/1.1\r\nhost: a\r\n\r\n"),
        "query": (b"GET /?q=", b" HTTP/1.1\r\nhost: a\r\n\r\n"),
        "spaces": (b"GET / HTTP/1.1\r\nhost: a\r\nx-pad: ", b"y\r\n\r\n"),
        "lines": (b"GET / HTTP/1.1\r\nhost: a\r\n", b"\r\n"),
    }[how]
    fill = {"spaces": b" ", "lines": b"a:b\r\n"}.get(how, b"y")
    room = num_bytes - len(begin) - len(end)
    return begin + fill * (room // len(fill)) + end


@pytest.mark.parametrize("how", ["value", "name", "path", "query", "spaces", "lines"])
@pytest.mark.parametrize("before", [b"", WHOLE, POST])
async def test_the_bytes_of_a_head_are_bounded_however_they_come(how: str, before: bytes) -> None:
    """In one read, and behind other requests of the same read. Behind others the bound may be
    passed by a part of it."""
    most = MAX_HEAD_BYTES if not before else MAX_HEAD_BYTES + HEAD_PIECE_BYTES
    async with Plane(_answer) as plane, asyncio.timeout(20):
        *_, last = await sent_at_once(plane.url, before, padded(most + 8, how))
        assert last == 400
        statuses = await sent_at_once(plane.url, before, padded(MAX_HEAD_BYTES, how))
        assert statuses == [200] * bool(before) + [200]


async def test_a_head_is_bounded_whose_last_piece_makes_it_whole() -> None:
    head = padded(MAX_HEAD_BYTES + 100, "value")
    async with (
        Plane(_answer) as plane,
        asyncio.timeout(20),
        connected(plane.url) as (reader, writer),
    ):
        writer.write(head[:-200])
        await asyncio.sleep(0.2)
        writer.write(head[-200:])
        assert (await reader.readline()).startswith(b"HTTP/1.1 400 ")


async def sent_at_once(url: str, *requests: bytes) -> list[int]:
    """Statuses of the answers. All is in the kernel before the server reads any of it."""
    host, _, port = url.removeprefix("http://").partition(":")
    with socket.create_connection((host, int(port))) as client:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 20)
        client.sendall(b"".join(requests))
        client.setblocking(False)
        loop, data = asyncio.get_running_loop(), b""
        while data.count(b"HTTP/1.1 ") < len([each for each in requests if each]):
            with suppress(ConnectionError):
                if piece := await loop.sock_recv(client, 1 << 16):
                    data += piece
                    continue
            break
    return [int(each[:3]) for each in data.split(b"HTTP/1.1 ")[1:]]


async def test_the_framing_of_a_body_is_bounded() -> None:
    """A trailer without an end, which no application sees."""

    async def reading(scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "http":
            while (await receive()).get("more_body"):
                pass
        await _answer(scope, receive, send)

    async with (
        Plane(reading) as plane,
        asyncio.timeout(20),
        connected(plane.url) as (reader, writer),
    ):
        writer.write(b"POST / HTTP/1.1\r\nhost: a\r\ntransfer-encoding: chunked\r\n\r\n0\r\nx: ")
        ended = asyncio.create_task(reader.read())
        num_sent = 0
        while not ended.done():
            writer.write(b"y" * 10_000)
            num_sent += 10_000
            await asyncio.wait([ended], timeout=0.02)
            assert num_sent < 10 << 20
        with suppress(ConnectionError):
            await ended


async def test_a_trailer_is_no_header() -> None:
    """One could say where the client is after a proxy has looked at the headers."""
    seen: list[Any] = []

    async def noting(scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "http":
            seen.extend([scope["client"][0], [name for name, _ in scope["headers"]]])
        await _answer(scope, receive, send)

    async with (
        Plane(noting, trusted_proxies=("127.0.0.0/8",)) as plane,
        connected(plane.url) as (reader, writer),
    ):
        writer.write(
            b"POST / HTTP/1.1\r\nhost: a\r\nx-forwarded-for: 192.0.2.9\r\n"
            b"transfer-encoding: chunked\r\n\r\n"
            b"0\r\nx-forwarded-for: 10.0.0.1\r\n\r\n"
        )
        await reader.readline()
    assert seen == ["192.0.2.9", [b"host", b"x-forwarded-for", b"transfer-encoding"]]


async def _answer(scope: Any, receive: Any, send: Any) -> None:
    if scope["type"] == "lifespan":
        await lifespan(receive, send)
        return
    await send({"type": "http.response.start", "status": 200, "headers": []})
    await send({"type": "http.response.body", "body": b"body"})
