"""HTTP connection whose client is bounded in bytes and time before anything is read."""

from __future__ import annotations

import asyncio
from collections import deque
from typing import Any, cast

import uvicorn
from litestar.types import Scope
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from admin.body_budget import HELD_BODY, BodyBudget, HeldBody
from admin.client_address import canonical
from gateway.http.connections import Connections
from gateway.http.edge import Draining, Edge
from gateway.http.refusals import Refusals

KEEP_ALIVE_S = 75
"""Longer than clients and balancers keep an idle connection, so that they end it: a
request that crosses the end of its connection is lost."""
HEAD_S = 10.0
"""From a head's first byte to its last; also how long the rest of a body that is not read, because
its request is answered, may take."""

MAX_HEAD_BYTES = 64 << 10
"""Bound of one head, and of what a body's chunks and trailers add to it."""
HEAD_PIECE_BYTES = 16 << 10
"""Bytes that are parsed before those of a head are counted again. A head that begins behind another
request of the same piece may pass its bound by less than a piece."""
FRAMING_PER_BYTE = 8
"""Bytes that the framing of a chunk of one byte takes, at most."""

_CONNECTION_LOST = "connection_lost"


class Config(uvicorn.Config):
    """With the bounds that all connections of a server share."""

    def __init__(
        self,
        app: Any,
        *,
        connections: Connections,
        bodies: BodyBudget,
        refusals: Refusals,
        draining: Draining,
        head_s: float = HEAD_S,
        **options: Any,
    ) -> None:
        self.edge = Edge(app, refusals, draining)
        super().__init__(self.edge, **options)
        self.draining = draining
        self.connections = connections
        self.bodies = bodies
        self.refusals = refusals
        self.head_s = head_s


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


class HttpProtocol(HttpToolsProtocol):
    """The clock of a connection runs whenever it is the client that is to send something."""

    config: Config

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        held = _HeadWithBody(cast(asyncio.Transport, transport))
        super().connection_made(cast(asyncio.Transport, held))
        self._lost: asyncio.Future[None] = self.loop.create_future()
        self.app_state = {**self.app_state, _CONNECTION_LOST: self._lost}
        self._bodies: deque[HeldBody] = deque()
        """Bodies of the requests that are not answered, in their order."""
        self._answered: HeldBody
        """Body of the request that was answered last."""
        self._is_in_head = False
        self._head_bytes = 0
        self._framing_bytes = 0
        """Received since the head less what the body may take of them."""
        reason = self.config.connections.open(self, self._host)
        if reason is not None:
            self.shed(reason)
            return
        self._start_clock(self.timeout_keep_alive)

    def shed(self, reason: str) -> None:
        """Closes at once, without an answer."""
        self.config.refusals.note_connection(reason, canonical(self._host or ""))
        self.transport.abort()

    def data_received(self, data: bytes) -> None:
        start = 0
        while start < len(data) and not self.transport.is_closing():
            end = start + min(HEAD_PIECE_BYTES, MAX_HEAD_BYTES - self._head_bytes)
            self._receive(data[start:end])
            start = end

    def _receive(self, data: bytes) -> None:
        clock, self.timeout_keep_alive_task = self.timeout_keep_alive_task, None
        before, was_in_head = self.cycle, self._is_in_head
        was_in_body = bool(before) and before.more_body
        if was_in_body:
            self._framing_bytes += len(data)
        super().data_received(data)
        if self.cycle is before:
            if was_in_body and self._framing_bytes > MAX_HEAD_BYTES:
                self.shed("body_framing")
            elif not was_in_body:
                self._count_head(len(data))
        elif self.cycle.more_body:
            # No more is read until the application asks, which needs a key.
            self.flow.pause_reading()
        is_busy = bool(self.cycle) and not self.cycle.response_complete
        if not is_busy and self._is_in_head and not was_in_head:
            if clock is not None:
                clock.cancel()
            self._start_clock(self.config.head_s)
        elif not is_busy:
            # It goes on: some of a head, or the rest of a body that is not read.
            self.timeout_keep_alive_task = clock
        else:
            if clock is not None:
                clock.cancel()
            if self.cycle.more_body:
                self._start_clock(self.timeout_keep_alive)

    def timeout_keep_alive_handler(self) -> None:
        # What the client sends waits for us.
        if self.flow.read_paused:
            self._start_clock(self.timeout_keep_alive)
            return
        if self._is_in_head:
            self.config.refusals.note_connection("head_timeout", canonical(self._host or ""))
        super().timeout_keep_alive_handler()

    def send_400_response(self, msg: str) -> None:
        self.config.refusals.note_connection("bad_request", canonical(self._host or ""))
        super().send_400_response(msg)

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._is_in_head = True

    def on_header(self, name: bytes, value: bytes) -> None:
        # Trailers are no headers: a proxy before us may have checked those alone.
        if self._is_in_head:
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        self._is_in_head = False
        self._head_bytes = self._framing_bytes = 0
        body = HeldBody(self.config.bodies)
        self.scope.setdefault("state", {})[HELD_BODY] = body
        self._bodies.append(body)
        self.config.connections.begin_request(self)
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        super().on_body(body)
        self._framing_bytes -= FRAMING_PER_BYTE * len(body)
        if self.cycle.response_complete:
            if not self._answered.throw_away(len(body)):
                self.transport.close()
            return
        self._bodies[-1].add(len(body))
        if self.config.bodies.is_full_of_unowned and not self._bodies[-1].has_owner:
            self.cycle.body = bytearray()
            self.shed("unread_bodies")

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._answered = self._bodies.popleft()
        self._answered.release()
        if self.transport.is_closing():
            return
        clock = self.timeout_keep_alive_task
        if clock is None:
            # The next request has begun; its body may be there in part.
            if self.cycle.more_body:
                self._start_clock(self.timeout_keep_alive)
            return
        if self.config.draining.is_on and not (self.cycle.more_body or self.pipeline):
            self.transport.close()
            return
        self.config.connections.end_request(self)
        if self._is_in_head:
            self.config.connections.add_to_head(self, self._head_bytes)
        if self._is_in_head or self.cycle.more_body:
            clock.cancel()
            self._start_clock(self.config.head_s)

    def on_message_complete(self) -> None:
        super().on_message_complete()
        # Also of a body that is not read.
        self.cycle.more_body = False
        if self.config.draining.is_on and self.cycle.response_complete:
            self.transport.close()
        # Reading stops at a large body. No other code may ask for more, and the end of the
        # connection must be seen.
        if not self.pipeline:
            self.flow.resume_reading()

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        # Of one that is reset the server would keep everything for as long as one may be idle.
        self._unset_keepalive_if_required()
        self.config.connections.close(self)
        while self._bodies:
            self._bodies.popleft().release()
        self._lost.set_result(None)

    @property
    def _host(self) -> str | None:
        """The peer's; None for a Unix socket."""
        return self.client[0] if self.client else None

    def _count_head(self, num_bytes: int) -> None:
        """Counts received bytes of the next head, which is not whole."""
        self._head_bytes += num_bytes
        if not self.cycle or self.cycle.response_complete:
            self.config.connections.add_to_head(self, num_bytes)
        # Exactly as many would be a whole head.
        if self._head_bytes >= MAX_HEAD_BYTES:
            self.send_400_response("The head of the request is too long.")

    def _start_clock(self, seconds: float) -> None:
        self.timeout_keep_alive_task = self.loop.call_later(
            seconds, self.timeout_keep_alive_handler
        )
