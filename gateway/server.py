"""How the data plane is served: one uvicorn with uvloop and httptools on a socket of ours."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Sequence
from functools import partial
from typing import Any, cast

import uvicorn
from litestar.types import ASGIApp, Scope
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

BACKLOG = 2048
ACCEPTED_AT_ONCE = 8
"""libuv accepts one connection of a listener in a turn of its loop, and under load turns are long:
who connects would wait for each who did before. So the same socket is listened to so many times."""
STUCK_CLIENT_MS = 30_000
"""The kernel drops a connection whose peer has taken nothing for this long: closing one politely
would wait for the peer for ever."""

KEEP_ALIVE_S = 75
"""Longer than clients and balancers keep an idle connection, so that it is they who end it: a
request that crosses the end of its connection is lost. So long a head may take, from the connection
or the answer before it, and the rest of a body stay away."""

MAX_HEAD_BYTES = 64 << 10
"""Of a request, as long as its head is not whole; the parser would keep any number."""

_CONNECTION_LOST = "connection_lost"


def bind(host: str, port: int, *, shared: bool = False) -> socket.socket:
    """A listening socket; port 0 finds a free one, `shared` lets several processes listen."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.create_server((host, port), family=family, backlog=BACKLOG, reuse_port=shared)
    if hasattr(socket, "TCP_USER_TIMEOUT"):
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, STUCK_CLIENT_MS)
    return listener


def make_config(
    app: ASGIApp, *, drain_s: float = 30.0, trusted_proxies: Sequence[str] = ()
) -> uvicorn.Config:
    """Streams have `drain_s` to end at shutdown.

    trusted_proxies: addresses or networks whose `X-Forwarded-For` says who the client is. By
    default nobody's does, and the client is who connects.
    """
    return uvicorn.Config(
        app,  # pyright: ignore[reportArgumentType]
        http=_Protocol,
        loop="uvloop",
        ws="none",
        lifespan="on",
        log_config=None,
        access_log=False,
        server_header=False,
        proxy_headers=bool(trusted_proxies),
        forwarded_allow_ips=list(trusted_proxies),
        timeout_keep_alive=KEEP_ALIVE_S,
        timeout_graceful_shutdown=round(drain_s),
    )


def connection_lost(scope: Scope) -> asyncio.Future[None]:
    """Done when the connection of a request is lost. It is there for all that are served here, and
    spares each the task that it would take to await the protocol's message of it."""
    state: dict[str, Any] = scope["state"]
    return state[_CONNECTION_LOST]


class _HeadWithBody:
    """A transport that holds an answer's head until the server writes what follows it, nearly
    always in the next moment: each write is a system call and a packet."""

    def __init__(self, transport: asyncio.Transport) -> None:
        self._transport = transport
        self._loop = asyncio.get_running_loop()
        self._head = b""

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)

    def write(self, data: bytes) -> None:
        if self._head:
            head, self._head = self._head, b""
            self._transport.writelines((head, data))
        elif data.startswith(b"HTTP/1.1 "):
            self._head = data
            self._loop.call_soon(self._send_head)
        else:
            self._transport.write(data)

    def close(self) -> None:
        self._send_head()
        self._transport.close()

    def _send_head(self) -> None:
        head, self._head = self._head, b""
        # Meanwhile the client may have gone.
        if head and not self._transport.is_closing():
            self._transport.write(head)


class _Protocol(HttpToolsProtocol):
    """The clock of a connection runs whenever it is the client who is to speak; the server's own
    runs from an answer to the next byte. A request that comes in one piece has no other."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        held = _HeadWithBody(cast(asyncio.Transport, transport))
        super().connection_made(cast(asyncio.Transport, held))
        self._lost: asyncio.Future[None] = self.loop.create_future()
        self.app_state = {**self.app_state, _CONNECTION_LOST: self._lost}
        self._head_bytes = 0
        self._start_clock()

    def data_received(self, data: bytes) -> None:
        clock, self.timeout_keep_alive_task = self.timeout_keep_alive_task, None
        before = self.cycle
        is_of_head = not before or not before.more_body
        super().data_received(data)
        if is_of_head and self.cycle is before:
            self._head_bytes += len(data)
            if self._head_bytes > MAX_HEAD_BYTES:
                self.send_400_response("The head of the request is too long.")
        else:
            self._head_bytes = 0
        if not self.cycle or self.cycle.response_complete:
            # Some of a head, or what is left of a body that nobody reads.
            self.timeout_keep_alive_task = clock
            return
        if clock is not None:
            clock.cancel()
        if self.cycle.more_body:
            self._start_clock()

    def timeout_keep_alive_handler(self) -> None:
        # What the client sends waits for us.
        if self.flow.read_paused:
            self._start_clock()
        else:
            super().timeout_keep_alive_handler()

    def _start_clock(self) -> None:
        self.timeout_keep_alive_task = self.loop.call_later(
            self.timeout_keep_alive, self.timeout_keep_alive_handler
        )

    def on_response_complete(self) -> None:
        super().on_response_complete()
        # One that was sent behind it may be there in part.
        if self.cycle.more_body and self.timeout_keep_alive_task is None:
            self._start_clock()

    def on_message_complete(self) -> None:
        super().on_message_complete()
        # Also of a body that nobody reads.
        self.cycle.more_body = False
        # Reading stops at a large body. Nobody may ask for more, and a client that leaves is read.
        if not self.pipeline:
            self.flow.resume_reading()

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        # Of one that is reset the server would keep everything for as long as one may be idle.
        self._unset_keepalive_if_required()
        self._lost.set_result(None)


class Server(uvicorn.Server):
    """Ends when what the app does beside serving has failed: it would answer from what it knew
    then, for ever. Whoever supervises the process starts it again."""

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        loop = asyncio.get_running_loop()
        protocol = partial(_Protocol, self.config, self.server_state, self.lifespan.state)
        for listener in (sockets or []) * (ACCEPTED_AT_ONCE - 1):
            self.servers.append(await loop.create_server(protocol, sock=listener.dup()))

    async def on_tick(self, counter: int) -> bool:
        return await super().on_tick(counter) or getattr(self.lifespan, "error_occurred", False)


def make_server(app: ASGIApp, *, drain_s: float = 30.0) -> Server:
    """Await its `serve(sockets=[bind(...)])`."""
    return Server(make_config(app, drain_s=drain_s))
