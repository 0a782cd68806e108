"""A server that is told to end refuses new requests, and finishes those in progress."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from typing import Any

import httpx
import pytest

from tests.plane import Plane, lifespan
from web.server import Draining, Server

BODY = b"x" * 200_000


class Slow:
    """An application whose answers to /slow end when the test says so."""

    def __init__(self) -> None:
        self.may_end = asyncio.Event()
        self.num_begun = 0
        self.paths: list[str] = []

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "lifespan":
            await lifespan(receive, send)
            return
        self.paths.append(scope["path"])
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"begun ", "more_body": True})
        if scope["path"] == "/slow":
            self.num_begun += 1
            await self.may_end.wait()
        await send({"type": "http.response.body", "body": b"ended"})


@asynccontextmanager
async def served(
    app: Slow, drain_s: float = 20, draining: Draining | None = None
) -> AsyncIterator[tuple[Server, httpx.AsyncClient]]:
    plane = Plane(app, drain_s=drain_s, draining=draining)
    async with plane, plane.new_client() as client:
        yield plane.server, client
        app.may_end.set()


async def in_progress(app: Slow, client: httpx.AsyncClient) -> asyncio.Task[httpx.Response]:
    asked = asyncio.create_task(client.get("/slow"))
    before = app.num_begun
    while app.num_begun == before:
        await asyncio.sleep(0.01)
    return asked


async def is_draining(server: Server) -> None:
    while not server.config.draining.is_on:
        await asyncio.sleep(0.01)


async def test_new_requests_are_refused_and_those_in_progress_end() -> None:
    app = Slow()
    async with asyncio.timeout(30), served(app) as (server, client):
        assert (await client.get("/readyz")).status_code == 200
        asked = await in_progress(app, client)
        server.should_exit = True
        await is_draining(server)
        app.paths.clear()
        for path in ("/readyz", "/health"):
            probe = await client.get(path)
            assert probe.status_code == 503
            assert probe.json() == {"status": "unavailable", "reason": "draining"}
        for answer in (
            await client.get("/v1/models"),
            await client.post("/v1/chat/completions", content=BODY),
            await client.post("/admin/v1/adapters", content=BODY),
        ):
            assert answer.status_code == 503
            assert answer.json()["error"]["code"] == "draining"
            assert answer.headers["retry-after"] and answer.headers["x-request-id"]
        assert app.paths == []
        # What tells of the process is there to its end.
        assert (await client.get("/livez")).status_code == 200
        assert (await client.get("/metrics")).status_code == 200
        assert not asked.done()
        app.may_end.set()
        assert (await asked).text == "begun ended"
        while True:
            with suppress(httpx.TransportError):
                assert (await client.get("/readyz")).status_code == 503
                continue
            break


async def test_a_connection_is_closed_behind_its_refusal() -> None:
    """Whoever balances opens the next one elsewhere."""
    app = Slow()
    async with asyncio.timeout(30), served(app) as (server, client):
        await in_progress(app, client)
        server.should_exit = True
        await is_draining(server)
        port = int(client.base_url.port or 0)
        for request in (
            b"GET / HTTP/1.1\r\nhost: a\r\n\r\n",
            b"POST / HTTP/1.1\r\nhost: a\r\ncontent-length: %d\r\n\r\n" % len(BODY) + BODY,
        ):
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(request)
            answer = await reader.read()
            assert answer.startswith(b"HTTP/1.1 503 ") and b"draining" in answer
            writer.close()


async def test_a_connection_that_was_opened_just_before_gets_an_answer() -> None:
    """A closed connection would answer a request that is under way with a reset."""
    app = Slow()
    async with asyncio.timeout(30), served(app) as (server, client):
        opened = [
            await asyncio.open_connection("127.0.0.1", int(client.base_url.port or 0))
            for _ in range(2)
        ]
        opened[1][1].write(b"GET / HTTP/1.1\r\n")
        # Its answer shows that the server has read what was sent before.
        await in_progress(app, client)
        server.should_exit = True
        await is_draining(server)
        opened[0][1].write(b"GET / HTTP/1.1\r\n")
        for reader, writer in opened:
            writer.write(b"host: a\r\n\r\n")
            answer = await reader.read()
            assert answer.startswith(b"HTTP/1.1 503 ") and b"draining" in answer
            writer.close()


async def test_an_idle_connection_is_closed_at_once() -> None:
    app = Slow()
    async with asyncio.timeout(30), served(app) as (server, client):
        reader, writer = await asyncio.open_connection("127.0.0.1", int(client.base_url.port or 0))
        writer.write(b"GET / HTTP/1.1\r\nhost: a\r\n\r\n")
        assert await reader.readuntil(b"0\r\n\r\n")
        await in_progress(app, client)
        server.should_exit = True
        assert await reader.read() == b""
        writer.close()
        assert not app.may_end.is_set()


async def test_what_does_not_end_is_cut_after_its_time() -> None:
    """Refused requests prolong nothing."""
    app = Slow()
    async with asyncio.timeout(30), served(app, drain_s=1) as (server, client):
        asked = await in_progress(app, client)
        server.should_exit = True
        with pytest.raises((httpx.RemoteProtocolError, httpx.ReadError)):
            while not asked.done():
                with suppress(httpx.TransportError):
                    await client.get("/")
                await asyncio.sleep(0.02)
            await asked


async def test_without_requests_it_ends_in_a_moment() -> None:
    app = Slow()
    async with asyncio.timeout(60), served(app, drain_s=3600) as (server, client):
        await client.get("/")
        # One that has sent nothing, or half a head, is no request.
        with socket.create_connection(("127.0.0.1", int(client.base_url.port or 0))) as idle:
            idle.sendall(b"GET / HT")
            await asyncio.sleep(0.1)
            server.should_exit = True
            while server.server_state.connections:
                await asyncio.sleep(0.01)


async def test_servers_of_one_process_drain_together() -> None:
    """The one for management goes on answering until the public one has ended."""
    draining, public, management = Draining(), Slow(), Slow()
    async with (
        asyncio.timeout(30),
        served(management, draining=draining) as (_, operator),
        served(public, draining=draining) as (server, client),
    ):
        await in_progress(public, client)
        assert (await operator.get("/readyz")).status_code == 200
        server.should_exit = True
        await is_draining(server)
        assert (await operator.get("/readyz")).status_code == 503
        assert (await operator.get("/metrics")).status_code == 200
        assert (await operator.get("/admin/v1/tenants")).status_code == 503
