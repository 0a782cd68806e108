"""Errors and security settings of the connections between gateways and workers.

Subclasses of TransportError:

- ConnectionLost: the peer closed the connection or is unreachable, or this side closed it.
- FrameTooLarge: a frame to be sent, or a frame that the peer announces, exceeds MAX_FRAME_BYTES.
- MalformedFrame: the peer sent bytes that are not a message of the protocol.
- ProtocolMismatch: the peer's first frame is not a Hello of a supported version.
- PeerRefused: no name in the peer's certificate is permitted, or the peer refuses this side.
- InsecureTransport: TCP is configured with neither mutual TLS nor `Security.insecure`.
"""

from __future__ import annotations

import ssl
from dataclasses import dataclass
from pathlib import Path


class TransportError(Exception):
    """Error raised if a connection cannot be opened, or fails."""


class ConnectionLost(TransportError): ...


class FrameTooLarge(TransportError): ...


class MalformedFrame(TransportError): ...


class ProtocolMismatch(TransportError): ...


class PeerRefused(TransportError): ...


class InsecureTransport(TransportError): ...


@dataclass(frozen=True, slots=True)
class MutualTLS:
    """Paths of a process's PEM files: its certificate, its key, and the certificate of the
    authority that signs the peers' certificates."""

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
    """Security settings of TCP connections, which require `tls` unless `insecure` is set. The
    settings do not apply to Unix sockets."""

    tls: MutualTLS | None = None
    insecure: bool = False
    gateways: tuple[str, ...] = ()
    """Patterns of certificate names. A worker accepts TLS connections only from gateways whose
    certificate has a matching name, and from none if there are no patterns."""
    workers: tuple[str, ...] = ()
    """Patterns of certificate names. A gateway connects only to workers whose certificate has a
    matching name. If there are no patterns, it checks only that the certificate is for the worker's
    address."""
