"""Connections that carry length-prefixed msgpack frames over asyncio streams: Unix sockets and
TCP."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import socket
import stat
from asyncio import StreamReader, StreamWriter
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, Generic, TypeVar

import msgspec

from workers.wire.frames import MAX_FRAME_BYTES, ToGateway, ToWorker
from workers.wire.protocol import ErrorCode, Failed
from workers.wire.transport.base import (
    ConnectionLost,
    FrameTooLarge,
    InsecureTransport,
    MalformedFrame,
    PeerRefused,
    Security,
    TransportError,
)
from workers.wire.transport.tls import TlsAcceptor, bind, check_peer

Sent = TypeVar("Sent")
Received = TypeVar("Received")

LENGTH_BYTES = 4
READ_LIMIT = 1 << 20
"""Limit in bytes of a stream's read buffer. While the buffer holds more than twice this number of
bytes, asyncio does not read from the socket, so that the peer must wait."""
REFUSAL_S = 5.0
"""Maximum seconds to wait for the first frame of a refused peer before the connection is closed."""
TCP_SILENCE_S = 10
"""Seconds without an acknowledgement after which a TCP peer counts as unreachable."""


class Connection(Generic[Sent, Received]):
    """Connection that carries messages in order, in both directions. Used in one event loop. Only
    one task may receive."""

    def __init__(
        self,
        reader: StreamReader,
        writer: StreamWriter,
        decoder: msgspec.msgpack.Decoder[Received],
    ) -> None:
        self.num_sent = 0
        self.num_received = 0
        self._reader = reader
        self._writer = writer
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder = decoder

    @property
    def num_unsent_bytes(self) -> int:
        """Bytes that `send` has accepted and that have not been passed to the operating system.
        Senders must check this number to limit memory use, because `send` never waits."""
        return self._writer.transport.get_write_buffer_size()

    def send(self, message: Sent) -> None:
        """Queues the message and never waits. Raises ConnectionLost, or FrameTooLarge. After
        FrameTooLarge, the connection can still be used."""
        if self._writer.is_closing():
            raise ConnectionLost("the connection is closed")
        payload = self._encoder.encode(message)
        if len(payload) > MAX_FRAME_BYTES:
            raise FrameTooLarge(f"a frame of {len(payload)} bytes, at most {MAX_FRAME_BYTES}")
        self._writer.write(len(payload).to_bytes(LENGTH_BYTES, "big") + payload)
        self.num_sent += 1

    async def receive(self) -> Received | None:
        """Returns the next message, or None if the peer closed its side between two frames.

        Raises ConnectionLost, MalformedFrame or FrameTooLarge, and closes the connection in each of
        these cases. A frame that is too large is not read.
        """
        try:
            return await self._receive()
        except (FrameTooLarge, MalformedFrame):
            self.abort()
            raise
        except OSError as error:
            self.abort()
            raise ConnectionLost(str(error)) from error

    async def _receive(self) -> Received | None:
        try:
            header = await self._reader.readexactly(LENGTH_BYTES)
        except asyncio.IncompleteReadError as error:
            if error.partial:
                raise MalformedFrame("the stream ended in the middle of a frame") from error
            return None
        length = int.from_bytes(header, "big")
        if length > MAX_FRAME_BYTES:
            raise FrameTooLarge(
                f"a frame of {length} bytes is announced, at most {MAX_FRAME_BYTES}"
            )
        try:
            message = self._decoder.decode(await self._reader.readexactly(length))
        except asyncio.IncompleteReadError as error:
            raise MalformedFrame("the stream ended in the middle of a frame") from error
        except msgspec.DecodeError as error:
            raise MalformedFrame(f"not a message of this protocol: {error}") from error
        self.num_received += 1
        return message

    async def close(self) -> None:
        """Sends all queued messages, then closes the connection. May be called twice."""
        self._writer.close()
        with contextlib.suppress(OSError):
            await self._writer.wait_closed()

    def abort(self) -> None:
        """Closes the connection at once and drops queued messages. May be called twice."""
        self._writer.transport.abort()


GatewayConnection = Connection[ToWorker, ToGateway]
WorkerConnection = Connection[ToGateway, ToWorker]
Accept = Callable[[WorkerConnection], Awaitable[None]]
"""Function that serves one connection until it returns."""


def _gateway_end(reader: StreamReader, writer: StreamWriter) -> GatewayConnection:
    return GatewayConnection(reader, writer, msgspec.msgpack.Decoder[Any](ToGateway))


def _worker_end(reader: StreamReader, writer: StreamWriter) -> WorkerConnection:
    return WorkerConnection(reader, writer, msgspec.msgpack.Decoder[Any](ToWorker))


class Listener:
    """Listener that is an asyncio server. address: address to which peers connect, with the actual
    port if port 0 was requested. `close` also deletes the file of a Unix socket."""

    def __init__(self, server: asyncio.Server, address: str, path: Path | None = None) -> None:
        self.address = address
        self._server = server
        self._path = path

    async def close(self) -> None:
        """Stops accepting connections. Accepted connections stay open."""
        self._server.close()
        if self._path is not None:
            self._path.unlink(missing_ok=True)


async def connect_unix(address: str) -> GatewayConnection:
    return _gateway_end(*await asyncio.open_unix_connection(_path_of(address), limit=READ_LIMIT))


async def listen_unix(address: str, accept: Accept) -> Listener:
    """Listens on `unix:/path`. Only the socket's owner can connect, because the socket has mode
    0600."""

    async def serve(reader: StreamReader, writer: StreamWriter) -> None:
        await accept(_worker_end(reader, writer))

    path = _path_of(address)
    server = await asyncio.start_unix_server(serve, sock=bind_private(path), limit=READ_LIMIT)
    return Listener(server, address, path)


def bind_private(path: Path) -> socket.socket:
    """Binds a Unix socket of mode 0600, replacing a stale socket. Raises OSError if the path is
    another kind of file, or a socket on which another process listens.

    No peer can connect before the mode is set, because the socket does not listen yet.
    """
    if path.exists() and stat.S_ISSOCK(path.stat().st_mode):
        if _is_served(path):
            raise OSError(errno.EADDRINUSE, os.strerror(errno.EADDRINUSE))
        path.unlink()
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        sock.bind(str(path))
        os.chmod(path, 0o600)
    except OSError:
        sock.close()
        raise
    return sock


def _is_served(path: Path) -> bool:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as sock:
        sock.setblocking(False)
        # Connecting to a listening socket whose backlog is full fails with EAGAIN.
        return sock.connect_ex(str(path)) in (0, errno.EAGAIN)


async def connect_tcp(address: str, security: Security) -> GatewayConnection:
    """Connects to `tcp://host:port`, with mutual TLS if `Security.tls` is set. Raises
    InsecureTransport if neither `Security.tls` nor `Security.insecure` is set, and PeerRefused if
    no name in the worker's certificate is permitted."""
    _require_security(address, security)
    host, port = _host_and_port(address)
    context = security.tls.client_context() if security.tls else None
    reader, writer = await asyncio.open_connection(host, port, ssl=context, limit=READ_LIMIT)
    _tune(writer)
    if context is not None and security.workers:
        try:
            check_peer(writer, security.workers, "transport_workers")
        except PeerRefused:
            writer.transport.abort()
            raise
    return _gateway_end(reader, writer)


async def listen_tcp(address: str, accept: Accept, security: Security) -> Listener:
    """Listens on `tcp://host:port`, with mutual TLS if `Security.tls` is set. Raises
    InsecureTransport if neither `Security.tls` nor `Security.insecure` is set."""

    async def serve(reader: StreamReader, writer: StreamWriter) -> None:
        _tune(writer)
        connection = _worker_end(reader, writer)
        if security.tls is not None:
            try:
                check_peer(writer, security.gateways, "transport_gateways")
            except PeerRefused as error:
                await _say_refused(connection, error)
                raise
        await accept(connection)

    _require_security(address, security)
    host, port = _host_and_port(address)
    begin = serve if security.tls is None else TlsAcceptor(security.tls, serve)
    server = await asyncio.start_server(begin, sock=bind(host, port), limit=READ_LIMIT)
    port = server.sockets[0].getsockname()[1]
    return Listener(server, f"tcp://{host}:{port}")


async def _say_refused(connection: WorkerConnection, error: PeerRefused) -> None:
    """Sends the reason of the refusal and closes the connection. First reads the peer's first
    frame, because closing a connection with unread data would reset the connection, and the peer
    would not receive the reason."""
    with contextlib.suppress(TransportError, TimeoutError):
        async with asyncio.timeout(REFUSAL_S):
            await connection.receive()
            connection.send(Failed(0, ErrorCode.INVALID, str(error)))
    await connection.close()


def _tune(writer: StreamWriter) -> None:
    """Makes the kernel send small frames without delay, and close the connection if the peer
    becomes unreachable."""
    sock: socket.socket = writer.get_extra_info("socket")
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    if hasattr(socket, "TCP_USER_TIMEOUT"):
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, TCP_SILENCE_S // 2)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 1)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 1000 * TCP_SILENCE_S)


def _path_of(address: str) -> Path:
    path = address.removeprefix("unix:")
    if not path.startswith("/"):
        raise ValueError(f"{address!r} is not unix:/absolute/path")
    return Path(path)


def _host_and_port(address: str) -> tuple[str, int]:
    host, _, port = address.removeprefix("tcp://").rpartition(":")
    if not host or not port.isdecimal():
        raise ValueError(f"{address!r} is not tcp://host:port")
    return host.strip("[]"), int(port)


def _require_security(address: str, security: Security) -> None:
    if security.tls is None and not security.insecure:
        raise InsecureTransport(f"{address} needs mutual TLS, or leave to do without it")
