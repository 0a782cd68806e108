"""Mutual TLS over TCP: a check of the names in peers' certificates, and a log of why a peer is
refused."""

from __future__ import annotations

import asyncio
import logging
import socket
import ssl
from asyncio import StreamReader, StreamWriter
from collections.abc import Awaitable, Callable, Sequence
from fnmatch import fnmatchcase
from typing import Any, cast

from workers.wire.transport.base import MutualTLS, PeerRefused
from workers.wire.transport.refusals import RefusalLog, why_no_handshake

log = logging.getLogger(__name__)

HANDSHAKE_S = 10.0
KINDS = {"DNS": "DNS", "URI": "URI", "IP Address": "IP"}
"""Map from Python's `ssl` names of the kinds of subject alternative names to the prefixes that
these kinds have in patterns, for example `IP` in `IP:10.0.0.7`."""

Serve = Callable[[StreamReader, StreamWriter], Awaitable[None]]


def check_peer(writer: StreamWriter, patterns: Sequence[str], setting: str) -> None:
    """Raises PeerRefused unless a subject alternative name of the peer's certificate matches one of
    the patterns. setting: name of the setting that has the patterns, for the error message."""
    names = names_of(writer.get_extra_info("peercert"))
    if not any(fnmatchcase(name, pattern) for name in names for pattern in patterns):
        shown = ", ".join(names[:8]) or "no name"
        raise PeerRefused(f"its certificate is for {shown}: not among {setting}")


def names_of(certificate: dict[str, Any] | None) -> list[str]:
    """Returns the certificate's subject alternative names, written as in patterns, such as
    `DNS:gw-1` and `IP:10.0.0.7`."""
    names = (certificate or {}).get("subjectAltName", ())
    return [f"{KINDS[kind]}:{value}" for kind, value in names if kind in KINDS]


class ServerContext:
    """TLS context of a listener. The context is rebuilt when the certificate files have changed."""

    def __init__(self, tls: MutualTLS) -> None:
        self._tls = tls
        self._versions = _versions(tls)
        self._context = tls.server_context()

    def current(self) -> ssl.SSLContext:
        """Returns the context, rebuilt if the certificate files have changed. If the files cannot
        be used, for example while they are being replaced, returns the last context."""
        try:
            versions = _versions(self._tls)
            if versions != self._versions:
                self._context = self._tls.server_context()
                # Only now, so that the files are tried again if they could not be used.
                self._versions = versions
                log.info("the certificate %s was read again", self._tls.certificate)
        except OSError as error:
            log.error(
                "reading the certificate %s again failed, using the last one: %s",
                self._tls.certificate,
                error,
            )
        return self._context


class TlsAcceptor:
    """Callback of an asyncio server that begins TLS on each connection and logs why a peer is
    refused. The server itself would not tell why a handshake failed."""

    def __init__(self, tls: MutualTLS, serve: Serve) -> None:
        """serve: function that handles a connection, and raises PeerRefused if it refuses the
        peer."""
        self._context = ServerContext(tls)
        self._serve = serve
        self._refusals = RefusalLog()
        self._tasks: set[asyncio.Task[None]] = set()

    def __call__(self, reader: StreamReader, writer: StreamWriter) -> None:
        # Before the first bytes are read, which are TLS.
        cast(asyncio.Transport, writer.transport).pause_reading()
        task = asyncio.create_task(self._handle(reader, writer))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _handle(self, reader: StreamReader, writer: StreamWriter) -> None:
        peer = writer.get_extra_info("peername")[0]
        try:
            await writer.start_tls(self._context.current(), ssl_handshake_timeout=HANDSHAKE_S)
        except OSError as error:
            writer.close()
            self._refusals.refuse(peer, f"no TLS connection: {why_no_handshake(error)}")
            return
        try:
            await self._serve(reader, writer)
        except PeerRefused as error:
            self._refusals.refuse(peer, str(error))
        else:
            self._refusals.accept(peer)


def bind(host: str, port: int) -> socket.socket:
    """Returns a socket that listens on this host and port. `::` listens on all addresses of IPv6
    and IPv4. Raises OSError."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    is_dual = host == "::" and socket.has_dualstack_ipv6()
    sock = socket.create_server((host, port), family=family, backlog=128, dualstack_ipv6=is_dual)
    sock.setblocking(False)
    return sock


def _versions(tls: MutualTLS) -> list[tuple[int, int]]:
    stats = [path.stat() for path in (tls.certificate, tls.key, tls.authority)]
    return [(each.st_mtime_ns, each.st_ino) for each in stats]
