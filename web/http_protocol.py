"""HTTP connection with limits on a client's bytes and time before its request has been read."""

from __future__ import annotations

import asyncio
import ipaddress
import resource
from collections import deque
from typing import Any, Protocol, cast

import httptools
import uvicorn
from litestar.types import Scope
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from web.edge import CONNECTION, Draining, Edge
from web.held_bytes import HELD_BODY, SLOW_CLIENT_S, AnswerBudget, BodyBudget, HeldBody
from web.refusals import Refusals
from web.request_head import address_prefix, canonical

MAX_DEFAULT = 16_384
"""Default maximum of connections, unless the open-file limit is lower. An idle one takes 20 KiB."""
RESERVE = 512
"""File descriptors that are reserved for the usage log, the database (about 24), workers, uploads
(up to three for each of 64), folders, and connections that are being closed."""
ADDRESS_PART = 4
"""Divisor of the maximum number of connections. The quotient is the limit of one address, so that
one client with many streams, or one office behind a shared address, cannot fill the server."""
MAX_HEADS_BYTES = 64 << 20
"""Maximum bytes of all incomplete heads together."""
KEEP_ALIVE_S = 75
"""Seconds until an idle connection is closed. This is longer than clients and load balancers keep
an idle connection, so that they close it first. A request that is sent while the server closes the
connection would be lost."""
HEAD_S = 10.0
"""Maximum seconds from the first to the last byte of a head. Also the maximum seconds for the rest
of a body whose request has already been answered."""
NEW_CONNECTION_S = 1.0
"""Maximum seconds that a shutdown waits for the first request of a new connection."""
MAX_HEAD_BYTES = 64 << 10
"""Maximum bytes of one head, and of the chunk framing and trailers of one body."""
HEAD_PIECE_BYTES = 16 << 10
"""Maximum bytes that are parsed at a time. The head's size is checked after each such piece, so a
head that begins within a piece may exceed the maximum by less than one piece."""
FRAMING_PER_BYTE = 8
"""Bytes that may be received for each byte of chunked content, enough for chunks of one byte."""
_OFFER = (b"upgrade", b"http2-settings")
"""Headers and connection options of a client that offers to use another protocol (RFC 7540, 3.2).
"""


class Connection(Protocol):
    def shed(self, reason: str) -> None:
        """Closes the connection at once, without an answer."""
        ...


class _Group:
    """Connections that share a limit."""

    __slots__ = ("heads", "idle", "max_open", "num_open")

    def __init__(self, max_open: int) -> None:
        self.max_open = max_open
        self.num_open = 0
        # Dictionaries keep the order of insertion, so the first connection has waited the longest.
        self.heads: dict[Connection, None] = {}
        self.idle: dict[Connection, None] = {}

    def first_to_go(self) -> Connection | None:
        return next(iter(self.heads or self.idle), None)

    def forget(self, connection: Connection) -> None:
        self.heads.pop(connection, None)
        self.idle.pop(connection, None)


class Connections:
    """Connections that a server keeps open, limited in total and from one address.

    When a limit is reached, an open connection is closed to make room for a new one: the oldest one
    with an incomplete head, otherwise the one that has been idle longest. A connection with a
    request in progress is never closed. If all have requests in progress, the new connection is
    refused.
    """

    def __init__(self, max_open: int | None = None, max_per_address: int | None = None) -> None:
        """`max_open` is the maximum number of connections. None uses `default_connections()`.
        `max_per_address` is the maximum number from one address. None uses the total maximum
        divided by `ADDRESS_PART`, and 0 sets no limit."""
        self._all = _Group(max_open or default_connections())
        per_address = self._all.max_open // ADDRESS_PART
        self._max_per_address = per_address if max_per_address is None else max_per_address
        self._addresses: dict[str, _Group] = {}
        self._groups: dict[Connection, tuple[str, tuple[_Group, ...]]] = {}
        self._head_bytes: dict[Connection, int] = {}
        self._num_head_bytes = 0

    def __len__(self) -> int:
        return self._all.num_open

    def open(self, connection: Connection, host: str | None) -> str | None:
        """Adds a connection, and closes others if necessary. Returns None, or the reason if the
        connection is refused.

        `host` is the peer's address, or None for a Unix socket. A Unix socket and loopback
        addresses have no limit per address.
        """
        groups = (self._all,)
        prefix = self._bounded_prefix(host)
        if prefix:
            groups = (self._addresses.get(prefix) or _Group(self._max_per_address), self._all)
        for group in groups:
            if group.num_open < group.max_open:
                continue
            reason = "connections" if group is self._all else "connections_of_address"
            first = group.first_to_go()
            if first is None:
                return reason
            first.shed(reason)
            self.close(first)
        if prefix:
            self._addresses[prefix] = groups[0]
        for group in groups:
            group.num_open += 1
            group.heads[connection] = None
        self._groups[connection] = (prefix, groups)
        return None

    def close(self, connection: Connection) -> None:
        """Removes the connection. Does nothing if it is unknown."""
        self._forget_head(connection)
        prefix, groups = self._groups.pop(connection, ("", ()))
        for group in groups:
            group.num_open -= 1
            group.forget(connection)
        if prefix and groups[0].num_open == 0:
            del self._addresses[prefix]

    def add_to_head(self, connection: Connection, num_bytes: int) -> None:
        """Counts received bytes of an incomplete head. May close connections with older ones."""
        if connection not in self._groups:
            return
        if connection not in self._all.heads:
            for group in self._groups[connection][1]:
                group.forget(connection)
                group.heads[connection] = None
        self._head_bytes[connection] = self._head_bytes.get(connection, 0) + num_bytes
        self._num_head_bytes += num_bytes
        while self._num_head_bytes > MAX_HEADS_BYTES:
            first = next(iter(self._head_bytes))
            first.shed("head_bytes")
            self.close(first)

    def begin_request(self, connection: Connection) -> None:
        self._forget_head(connection)
        for group in self._groups.get(connection, ("", ()))[1]:
            group.forget(connection)

    def end_request(self, connection: Connection) -> None:
        """Marks the connection as idle."""
        for group in self._groups.get(connection, ("", ()))[1]:
            group.idle[connection] = None

    def _forget_head(self, connection: Connection) -> None:
        self._num_head_bytes -= self._head_bytes.pop(connection, 0)

    def _bounded_prefix(self, host: str | None) -> str:
        """Returns the prefix that the limit per address applies to, or an empty string if none."""
        address = canonical(host) if host and self._max_per_address else None
        if address is None or ipaddress.ip_address(address).is_loopback:
            return ""
        return address_prefix(address)


def default_connections() -> int:
    """Returns the default maximum number of connections: the process's limit of open files minus
    a reserve, at most `MAX_DEFAULT`."""
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if limit == resource.RLIM_INFINITY:
        return MAX_DEFAULT
    return max(1, min(limit - min(RESERVE, limit // 2), MAX_DEFAULT))


class Config(uvicorn.Config):
    """Server configuration with the limits that all its connections share."""

    def __init__(
        self,
        app: Any,
        *,
        connections: Connections,
        bodies: BodyBudget,
        answers: AnswerBudget,
        refusals: Refusals,
        draining: Draining,
        head_s: float = HEAD_S,
        slow_client_s: float = SLOW_CLIENT_S,
        **options: Any,
    ) -> None:
        self.edge = Edge(app, refusals, draining, answers)
        super().__init__(self.edge, **options)
        self.draining = draining
        self.connections = connections
        self.bodies = bodies
        self.refusals = refusals
        self.head_s = head_s
        self.slow_client_s = slow_client_s


def connection_lost(scope: Scope) -> asyncio.Future[None]:
    """Returns a future that is done when the connection of a request is lost. Unlike a wait for the
    protocol's disconnect message, awaiting this future needs no task."""
    state: dict[str, Any] = scope["state"]
    return state[CONNECTION].lost


class _HeadWithBody:
    """Transport that sends an answer's head together with the data after it, if both are written in
    the same turn of the event loop, because each write is a system call and a packet."""

    def __init__(self, transport: asyncio.Transport) -> None:
        self._transport = transport
        self._loop = asyncio.get_running_loop()
        self._head = b""

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)

    def write(self, data: bytes | memoryview) -> None:
        if self._head:
            head, self._head = self._head, b""
            self._transport.writelines((head, data))
        elif bytes(data[:9]) == b"HTTP/1.1 ":
            self._head = data
            self._loop.call_soon(self._send_head)
        else:
            self._transport.write(data)

    def close(self) -> None:
        self._send_head()
        self._transport.close()

    def _send_head(self) -> None:
        head, self._head = self._head, b""
        # The client may have disconnected in the meantime.
        if head and not self._transport.is_closing():
            self._transport.write(head)


def _head_without_offer(request_line: bytes, headers: list[tuple[bytes, bytes]]) -> bytes:
    """Returns the head of a request without its offer to use another protocol. `headers` have names
    in lower case."""
    lines = [request_line]
    for name, value in headers:
        if name == b"connection":
            options = [each.strip() for each in value.split(b",")]
            value = b", ".join([each for each in options if each.lower() not in _OFFER])
        if name not in _OFFER:
            lines.append(b"%s: %s" % (name, value))
    return b"\r\n".join(lines) + b"\r\n\r\n"


class HttpProtocol(HttpToolsProtocol):
    """HTTP connection with a timeout for each wait of the server for the client."""

    config: Config

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        held = _HeadWithBody(cast(asyncio.Transport, transport))
        super().connection_made(cast(asyncio.Transport, held))
        if self.scheme == "http":
            # The writer is paused from the first byte that the socket does not take until the last.
            # With TLS, up to 64 KiB wait unnoticed, because the handshake's bytes would count too.
            held.set_write_buffer_limits(high=1, low=0)
        if self.client is not None and (address := canonical(self.client[0])) is not None:
            # A socket of both families reports IPv4 as `::ffff:192.0.2.1`.
            self.client = address, self.client[1]
        self.lost: asyncio.Future[None] = self.loop.create_future()
        """Future that is done when the connection is lost."""
        self.app_state = {**self.app_state, CONNECTION: self}
        self._bodies: deque[HeldBody] = deque()
        """Bodies of the unanswered requests, in the order of the requests."""
        self._answered: HeldBody
        """Body of the request that was answered last."""
        self._is_in_head = False
        self._offers_upgrade = False
        """Whether the head that has just been parsed offers another protocol."""
        self._head_bytes = 0
        self._framing_bytes = 0
        """Bytes received after the head, minus `FRAMING_PER_BYTE` for each byte of content."""
        reason = self.config.connections.open(self, self._host)
        if reason is not None:
            self.shed(reason)
            return
        self._start_clock(self.timeout_keep_alive)

    def shed(self, reason: str) -> None:
        """Closes the connection at once, without an answer."""
        self.config.refusals.note_connection(reason, canonical(self._host or ""))
        self.transport.abort()

    @property
    def is_behind(self) -> bool:
        """Whether written bytes wait for the client."""
        return self.flow.write_paused

    async def catch_up(self) -> None:
        """Waits until the socket has taken all written bytes. Closes the connection if that takes
        more than `slow_client_s` seconds."""
        try:
            async with asyncio.timeout(self.config.slow_client_s):
                await self.flow.drain()
        except TimeoutError:
            self.shed("slow_reader")

    def shutdown(self) -> None:
        """Closes the connection once no request is in progress. Waits up to `NEW_CONNECTION_S`
        seconds for a first request, or for the rest of a head, so that the request is answered."""
        is_busy = bool(self.cycle) and not self.cycle.response_complete
        if is_busy or (self.cycle and not self._is_in_head):
            super().shutdown()
            return
        self._unset_keepalive_if_required()
        self._start_clock(NEW_CONNECTION_S)

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
        self._parse(data)
        if self.cycle is before:
            if was_in_body and self._framing_bytes > MAX_HEAD_BYTES:
                self.shed("body_framing")
            elif not was_in_body:
                self._count_head(len(data))
        elif self.cycle.more_body:
            # Nothing more is read until the application reads the body, and the application reads
            # only bodies of requests with a key.
            self.flow.pause_reading()
        is_busy = bool(self.cycle) and not self.cycle.response_complete
        if not is_busy and self._is_in_head and not was_in_head:
            if clock is not None:
                clock.cancel()
            self._start_clock(self.config.head_s)
        elif not is_busy:
            # The timeout is not restarted, because these bytes belong to a head, or to a body that
            # the application does not read.
            self.timeout_keep_alive_task = clock
        else:
            if clock is not None:
                clock.cancel()
            if self.cycle.more_body:
                self._start_clock(self.timeout_keep_alive)

    def _parse(self, data: bytes) -> None:
        try:
            self.parser.feed_data(data)
        except httptools.HttpParserError:
            self.send_400_response("Invalid HTTP request received.")
        except httptools.HttpParserUpgrade as offer:
            if self._offers_upgrade:
                # The parser takes everything after such a head for another protocol. A new parser
                # gets the head without the offer, and the rest.
                version = self.parser.get_http_version().encode()
                line = b"%s %s HTTP/%s" % (self.parser.get_method(), self.url, version)
                head = _head_without_offer(line, self.headers)
                self.parser = httptools.HttpRequestParser(self)
                self.parser.set_dangerous_leniencies(lenient_data_after_close=True)
                self._offers_upgrade = False
                self._parse(head + data[offer.args[0] :])

    def timeout_keep_alive_handler(self) -> None:
        # The server has paused reading, so the client is not late.
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
        # Trailers are ignored, because a proxy may have checked only the headers.
        if self._is_in_head:
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        if self.parser.should_upgrade() and self.parser.get_method() != b"CONNECT":
            # Clients offer HTTP/2 or a WebSocket with an ordinary request, and get an answer to it.
            self._offers_upgrade = True
            return
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
        if self.config.bodies.is_full_of_unowned and self._bodies[-1].owner is None:
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
            # The next request has begun, and a part of its body may have been received.
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
        if self._offers_upgrade:
            return
        super().on_message_complete()
        # The body has been received, even if the application does not read it.
        self.cycle.more_body = False
        if self.config.draining.is_on and self.cycle.response_complete:
            self.transport.close()
        # Reading may be paused because of the body's size. It resumes here, because no other code
        # resumes it and the server must read to notice that the client disconnects.
        if not self.pipeline:
            self.flow.resume_reading()

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        # Without this call, the server would keep the state of a reset connection until its idle
        # timeout.
        self._unset_keepalive_if_required()
        self.config.connections.close(self)
        while self._bodies:
            self._bodies.popleft().release()
        self.lost.set_result(None)

    @property
    def _host(self) -> str | None:
        """Address of the peer. None for a Unix socket."""
        return self.client[0] if self.client else None

    def _count_head(self, num_bytes: int) -> None:
        """Counts received bytes of the next, incomplete head."""
        self._head_bytes += num_bytes
        if not self.cycle or self.cycle.response_complete:
            self.config.connections.add_to_head(self, num_bytes)
        # The head is incomplete, so it is too long: a head that fits would be complete by now.
        if self._head_bytes >= MAX_HEAD_BYTES:
            self.send_400_response("The head of the request is too long.")

    def _start_clock(self, seconds: float) -> None:
        self.timeout_keep_alive_task = self.loop.call_later(
            seconds, self.timeout_keep_alive_handler
        )
