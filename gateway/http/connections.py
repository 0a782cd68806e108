"""How many connections a server keeps open: in all, and from one address.

When a bound is reached, the connection that least deserves its place makes room: one whose head is
not whole, the oldest first, then one that is idle. One with a request under way is never closed for
another; if all have one, the new connection is refused.
"""

from __future__ import annotations

import ipaddress
import resource
from typing import Protocol

from admin.client_address import address_prefix, canonical

MAX_DEFAULT = 16_384
"""Connections by default, however many descriptors there are: idle ones take some 20 KiB each."""
RESERVE = 512
"""Descriptors kept for our own files: the usage log, the database (two dozen), workers, uploads
(up to three of each of 64), folders, and connections that are being closed."""
ADDRESS_PART = 4
"""An address may hold this part of all: four clients of many streams, or offices behind one
address, fill the server only together."""
MAX_HEAD_BYTES = 64 << 20
"""Bound of all heads that are not whole."""


class Connection(Protocol):
    def shed(self, reason: str) -> None:
        """Closes at once, without an answer."""
        ...


class _Group:
    """Connections that share a bound."""

    __slots__ = ("heads", "idle", "max_open", "num_open")

    def __init__(self, max_open: int) -> None:
        self.max_open = max_open
        self.num_open = 0
        # In the order of their coming.
        self.heads: dict[Connection, None] = {}
        self.idle: dict[Connection, None] = {}

    def first_to_go(self) -> Connection | None:
        return next(iter(self.heads or self.idle), None)

    def forget(self, connection: Connection) -> None:
        self.heads.pop(connection, None)
        self.idle.pop(connection, None)


class Connections:
    def __init__(self, max_open: int | None = None, max_per_address: int | None = None) -> None:
        """max_open None: as many as the limit of descriptors leaves beside the reserve, at most
        `MAX_DEFAULT`. max_per_address None: a part of that; 0: no bound."""
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
        """Takes a new connection, closing another if it must; or says why it is refused.

        host: the peer's; None for a Unix socket, which like loopback is bound only in all.
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
        """Forgets the connection; nothing if it is not there."""
        self._forget_head(connection)
        prefix, groups = self._groups.pop(connection, ("", ()))
        for group in groups:
            group.num_open -= 1
            group.forget(connection)
        if prefix and groups[0].num_open == 0:
            del self._addresses[prefix]

    def add_to_head(self, connection: Connection, num_bytes: int) -> None:
        """Bytes of a head that is not whole have come, outside of any request."""
        if connection not in self._groups:
            return
        if connection not in self._all.heads:
            for group in self._groups[connection][1]:
                group.forget(connection)
                group.heads[connection] = None
        self._head_bytes[connection] = self._head_bytes.get(connection, 0) + num_bytes
        self._num_head_bytes += num_bytes
        while self._num_head_bytes > MAX_HEAD_BYTES:
            first = next(iter(self._head_bytes))
            first.shed("head_bytes")
            self.close(first)

    def begin_request(self, connection: Connection) -> None:
        self._forget_head(connection)
        for group in self._groups.get(connection, ("", ()))[1]:
            group.forget(connection)

    def end_request(self, connection: Connection) -> None:
        """It is idle from now on."""
        for group in self._groups.get(connection, ("", ()))[1]:
            group.idle[connection] = None

    def _forget_head(self, connection: Connection) -> None:
        self._num_head_bytes -= self._head_bytes.pop(connection, 0)

    def _bounded_prefix(self, host: str | None) -> str:
        """What the bound of an address goes by; empty where it does not hold."""
        address = canonical(host) if host and self._max_per_address else None
        if address is None or ipaddress.ip_address(address).is_loopback:
            return ""
        return address_prefix(address)


def default_connections() -> int:
    """What the limit of open descriptors leaves for connections."""
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if limit == resource.RLIM_INFINITY:
        return MAX_DEFAULT
    return max(1, min(limit - min(RESERVE, limit // 2), MAX_DEFAULT))
