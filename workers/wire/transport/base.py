"""Protocols of the connections between gateways and workers, independent of the transport.

TransportError
    ConnectionLost      the peer is gone, or this side closed
    FrameTooLarge       a frame over MAX_FRAME_BYTES, to be sent or announced by the peer
    MalformedFrame      bytes that are no message of the protocol
    ProtocolMismatch    the peer's first frame is no Hello of a supported version
    PeerRefused         the peer's certificate has no permitted name
    InsecureTransport   TCP with neither mutual TLS nor explicit permission to do without
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
    """Connection of ordered messages, both ways. Used in one event loop; one task receives."""

    num_sent: int
    num_received: int

    @property
    def num_unsent_bytes(self) -> int:
        """Bytes accepted by `send` and not yet passed to the OS. A sender that never waits must
        check it."""
        ...

    def send(self, message: Sent) -> None:
        """Queues the message and never waits.

        Raises FrameTooLarge (nothing is sent, the connection stays) or ConnectionLost.
        """
        ...

    async def receive(self) -> Received | None:
        """Returns the next message, or None if the peer ended its sending between two frames.

        Raises ConnectionLost, FrameTooLarge (before any of it is read) or MalformedFrame, and then
        closes the connection.
        """
        ...

    async def close(self) -> None:
        """Sends queued messages, then closes. May be called twice."""
        ...

    def abort(self) -> None:
        """Closes at once and drops queued messages. May be called twice."""
        ...


GatewayConnection = Connection[ToWorker, ToGateway]
WorkerConnection = Connection[ToGateway, ToWorker]
Accept = Callable[[WorkerConnection], Awaitable[None]]
"""Function that serves one connection until it returns."""


class Listener(Protocol):
    address: str
    """Address to connect to, with the actual port if port 0 was requested."""

    async def close(self) -> None:
        """Stops accepting. Accepted connections stay open."""
        ...


@dataclass(frozen=True, slots=True)
class MutualTLS:
    """PEM files: own certificate and key, and the authority that signs the peers' certificates."""

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
    """Protection of TCP connections: `tls`, or explicitly `insecure`. Not used for Unix sockets."""

    tls: MutualTLS | None = None
    insecure: bool = False
    gateways: tuple[str, ...] = ()
    """Patterns of certificate names that a worker accepts as gateways over TLS; empty: none."""
    workers: tuple[str, ...] = ()
    """Patterns of certificate names of the workers that a gateway accepts, in addition to the check
    that the certificate is for the address; empty: that check alone."""


class Transport(Protocol):
    """Way to connect, identified by the scheme of its addresses."""

    async def connect(self, address: str, security: Security) -> GatewayConnection:
        """Opens a connection. Raises OSError if no peer answers, ValueError for a bad address."""
        ...

    async def listen(self, address: str, accept: Accept, security: Security) -> Listener: ...
