"""Limits of the connections that a server keeps open, in total and from one address.

When a limit is reached, an open connection is closed to make room for a new one: the oldest one
with an incomplete head, otherwise the one that has been idle longest. A connection with a request
in progress is never closed. If all have requests in progress, the new connection is refused.
"""

from __future__ import annotations

import ipaddress
import resource
from typing import Protocol

from web.client_address import address_prefix, canonical

MAX_DEFAULT = 16_384
"""Default maximum of connections, unless the open-file limit is lower. An idle one takes 20 KiB."""
RESERVE = 512
"""File descriptors that are reserved for the usage log, the database (about 24), workers, uploads
(up to three for each of 64), folders, and connections that are being closed."""
ADDRESS_PART = 4
"""Divisor of the maximum number of connections. The quotient is the limit of one address, so that
one client with many streams, or one office behind a shared address, cannot fill the server."""
MAX_HEAD_BYTES = 64 << 20
"""Maximum bytes of all incomplete heads together."""


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
        while self._num_head_bytes > MAX_HEAD_BYTES:
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
