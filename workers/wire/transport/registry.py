"""Selects the transport by the address, and exchanges Hellos."""

from __future__ import annotations

import asyncio

from workers.wire.frames import Hello, common_version
from workers.wire.protocol import Failed
from workers.wire.transport.base import ConnectionLost, PeerRefused, ProtocolMismatch, Security
from workers.wire.transport.stream import (
    Accept,
    GatewayConnection,
    Listener,
    WorkerConnection,
    connect_tcp,
    connect_unix,
    listen_tcp,
    listen_unix,
)

CONNECT_TIMEOUT_S = 10.0
HELLO_TIMEOUT_S = 10.0


async def connect(address: str, security: Security = Security()) -> GatewayConnection:  # noqa: B008
    """Opens a connection. Raises OSError if no peer answers, ConnectionLost if there is no
    connection after `CONNECT_TIMEOUT_S` seconds, InsecureTransport or PeerRefused if the security
    settings forbid the connection, and ValueError for a malformed address."""
    try:
        async with asyncio.timeout(CONNECT_TIMEOUT_S):
            if _is_unix(address):
                return await connect_unix(address)
            return await connect_tcp(address, security)
    except TimeoutError as error:
        raise ConnectionLost(f"no connection within {CONNECT_TIMEOUT_S} s") from error


async def listen(
    address: str,
    accept: Accept,
    security: Security = Security(),  # noqa: B008
) -> Listener:
    """Listens on the address and serves each connection with `accept`. Raises OSError if the
    address is in use, InsecureTransport if TCP is used without the required security, and
    ValueError for a malformed address."""
    if _is_unix(address):
        return await listen_unix(address, accept)
    return await listen_tcp(address, accept, security)


async def exchange_hello(connection: GatewayConnection | WorkerConnection, own: Hello) -> Hello:
    """Sends this side's Hello and returns the peer's Hello. Raises ProtocolMismatch if both sides
    support no common version, PeerRefused if the peer refuses this side, or any other
    TransportError."""
    connection.send(own)
    try:
        async with asyncio.timeout(HELLO_TIMEOUT_S):
            first = await connection.receive()
    except TimeoutError as error:
        raise ConnectionLost(f"no Hello within {HELLO_TIMEOUT_S} s") from error
    if first is None:
        raise ConnectionLost("the other side left before its Hello")
    if isinstance(first, Failed):
        raise PeerRefused(f"the other side refuses this one: {first.message}")
    if not isinstance(first, Hello):
        raise ProtocolMismatch(f"the first frame is a {type(first).__name__}, not a Hello")
    if common_version(own, first) is None:
        raise ProtocolMismatch(
            f"{first.instance_id} speaks protocol {_versions(first)}, this side {_versions(own)}"
        )
    return first


def _versions(hello: Hello) -> str:
    newest = max(hello.version, hello.newest)
    return str(newest) if newest == hello.version else f"{hello.version} to {newest}"


def _is_unix(address: str) -> bool:
    scheme = address.partition(":")[0]
    if scheme not in ("unix", "tcp"):
        raise ValueError(f"{address!r}: the schemes are unix, tcp")
    return scheme == "unix"
