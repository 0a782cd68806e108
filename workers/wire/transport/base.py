"""Interfaces of the connections between gateways and workers, independent of the transport.

TransportError
    ConnectionLost      the peer closed the connection or is unreachable, or this side closed it
    FrameTooLarge       a frame to send, or announced by the peer, exceeds MAX_FRAME_BYTES
    MalformedFrame      the peer sent bytes that are not a message of the protocol
    ProtocolMismatch    the peer's first frame is not a Hello of a supported version
    PeerRefused         no name in the certificate is permitted, or the peer refuses this side
    InsecureTransport   TCP is configured without mutual TLS and without `Security.insecure`
"""

from __future__ import annotations

import ssl
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, TypeVar

from workers.wire.protocol import ToGateway, ToWorker

Sent = TypeVar("Sent", contravariant=True)
Received = TypeVar("Received", covariant=True)


class TransportError(Exception):
    """Failure of a connection, or of opening one."""


class ConnectionLost(TransportError): ...


class FrameTooLarge(TransportError): ...


class MalformedFrame(TransportError): ...


class ProtocolMismatch(TransportError): ...


class PeerRefused(TransportError): ...


class InsecureTransport(TransportError): ...


class Connection(Protocol[Sent, Received]):
    """Connection that carries ordered messages in both directions. It is used in one event loop,
    and only one task may receive."""

    num_sent: int
    num_received: int

    @property
    def num_unsent_bytes(self) -> int:
        """Bytes accepted by `send` and not yet passed to the operating system. Senders must check
        it to bound the memory, because `send` never waits."""
        ...

    def send(self, message: Sent) -> None:
        """Queues the message and never waits.

        Raises FrameTooLarge, which leaves the connection usable, or ConnectionLost.
        """
        ...

    async def receive(self) -> Received | None:
        """Returns the next message, or None if the peer closed its side between two frames.

        Raises ConnectionLost, MalformedFrame, or FrameTooLarge before it reads the frame. Each of
        these errors closes the connection.
        """
        ...

    async def close(self) -> None:
        """Sends all queued messages, then closes the connection. May be called twice."""
        ...

    def abort(self) -> None:
        """Closes the connection at once and drops queued messages. May be called twice."""
        ...


GatewayConnection = Connection[ToWorker, ToGateway]
WorkerConnection = Connection[ToGateway, ToWorker]
Accept = Callable[[WorkerConnection], Awaitable[None]]
"""Function that serves one connection until it returns."""


class Listener(Protocol):
    address: str
    """Address to connect to, with the actual port if port 0 was requested."""

    async def close(self) -> None:
        """Stops accepting connections. Accepted connections stay open."""
        ...


@dataclass(frozen=True, slots=True)
class MutualTLS:
    """PEM files of a process: its certificate and key, and the certificate authority that signs the
    peers' certificates."""

    certificate: Path
    key: Path
    authority: Path

    def server_context(self) -> ssl.SSLContext:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.verify_mode = ssl.CERT_REQUIRED
        return self._load(context)

    def client_context(self) -> ssl.SSLContext:
        return self._load(ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT))

    def _load(self, context: ssl.SSLContext) -> ssl.SSLContext:
        context.minimum_version = ssl.TLSVersion.TLSv1_3
        context.load_cert_chain(self.certificate, self.key)
        context.load_verify_locations(self.authority)
        return context


@dataclass(frozen=True, slots=True)
class Security:
    """Protection of TCP connections, which need `tls` unless `insecure` is set. Not used for Unix
    sockets."""

    tls: MutualTLS | None = None
    insecure: bool = False
    gateways: tuple[str, ...] = ()
    """Patterns of certificate names from which a worker accepts TLS connections. If empty, the
    worker refuses all gateways."""
    workers: tuple[str, ...] = ()
    """Patterns of certificate names, one of which a worker's certificate must match. If empty, a
    gateway checks only that the certificate is for the worker's address."""


class Transport(Protocol):
    """Kind of connection, such as Unix socket or TCP. The scheme of an address selects it."""

    async def connect(self, address: str, security: Security) -> GatewayConnection:
        """Opens a connection. Raises OSError if no peer answers, and ValueError for a malformed
        address."""
        ...

    async def listen(self, address: str, accept: Accept, security: Security) -> Listener: ...
