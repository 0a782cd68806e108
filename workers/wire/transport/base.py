"""What a connection between a gateway and a worker is, whatever carries it.

TransportError
    ConnectionLost      the other side is gone, or this side closed
    FrameTooLarge       a frame over MAX_FRAME_BYTES, to be sent or announced by the other side
    MalformedFrame      bytes that are no message of the other side's language
    ProtocolMismatch    the other side's first frame is no Hello of a version that we speak
    PeerRefused         the other side's certificate bears no name that is let in
    InsecureTransport   TCP asked for with neither mutual TLS nor leave to do without
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
    """The connection cannot be used (any more)."""


class ConnectionLost(TransportError): ...


class FrameTooLarge(TransportError): ...


class MalformedFrame(TransportError): ...


class ProtocolMismatch(TransportError): ...


class PeerRefused(TransportError): ...


class InsecureTransport(TransportError): ...


class Connection(Protocol[Sent, Received]):
    """Messages in order, both ways. Used in one event loop; one task receives."""

    num_sent: int
    num_received: int

    @property
    def num_unsent_bytes(self) -> int:
        """What `send` took and the other side has not: a sender that does not wait must look at
        it."""
        ...

    def send(self, message: Sent) -> None:
        """Takes the message for sending and never waits.

        Raises FrameTooLarge (nothing is sent, the connection stays) or ConnectionLost.
        """
        ...

    async def receive(self) -> Received | None:
        """The next message, or None when the other side ended its sending between two frames.

        Raises ConnectionLost, FrameTooLarge (before any of it is read) or MalformedFrame; the
        connection is closed then.
        """
        ...

    async def close(self) -> None:
        """Sends what was taken, then closes. Harmless when closed."""
        ...

    def abort(self) -> None:
        """Closes at once, whatever is unsent. Harmless when closed."""
        ...


GatewayConnection = Connection[ToWorker, ToGateway]
"""A gateway's end."""
WorkerConnection = Connection[ToGateway, ToWorker]
"""A worker's end."""
Accept = Callable[[WorkerConnection], Awaitable[None]]
"""Serves one connection until it returns."""


class Listener(Protocol):
    address: str
    """Where to connect to; with the true port if port 0 was asked for."""

    async def close(self) -> None:
        """Accepts no more. Connections already accepted live on."""
        ...


@dataclass(frozen=True, slots=True)
class MutualTLS:
    """PEM files: our certificate and its key, and the authority that signs the other side's."""

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
    """How TCP is protected: `tls`, or `insecure` to do without on purpose. Local schemes ignore
    it."""

    tls: MutualTLS | None = None
    insecure: bool = False
    gateways: tuple[str, ...] = ()
    """Patterns of the names in certificates that a worker lets in over TLS as gateways; none: no
    certificate is let in."""
    workers: tuple[str, ...] = ()
    """The same of the workers that a gateway connects to, beside the check that the certificate is
    for the address; none: that check alone."""


class Transport(Protocol):
    """A way to connect, named by the scheme of its addresses."""

    async def connect(self, address: str, security: Security) -> GatewayConnection:
        """Raises OSError when no peer answers, ValueError for a malformed address."""
        ...

    async def listen(self, address: str, accept: Accept, security: Security) -> Listener: ...
