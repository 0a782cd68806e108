"""The client's address, as both planes log it, limit by it and check keys against it."""

from __future__ import annotations

import ipaddress
from collections.abc import Mapping
from functools import lru_cache
from typing import Any

MAX_CHARS = 45
"""Length of an IPv6 address with an embedded IPv4 address, the longest spelling there is."""
IPV6_PREFIX = 64
"""Bits: one subscriber holds all addresses below."""


def client_address(scope: Mapping[str, Any]) -> str | None:
    """IP address of the client of an ASGI scope, or None over a Unix socket.

    It is the peer's, or, where the peer is in `trusted_proxies`, the last address of
    X-Forwarded-For that is not: the server has put it into the scope. Text of that header that is
    no address gives None.
    """
    client = scope.get("client")
    return canonical(client[0]) if client else None


def canonical(host: str) -> str | None:
    """The one spelling of an IP address; None for any other text."""
    return None if len(host) > MAX_CHARS else _canonical(host)


def address_prefix(address: str | None) -> str:
    """What limits and sampled log lines group by: an IPv4 address, or the /64 of an IPv6 one."""
    if address is None:
        return "unknown"
    if ":" not in address:
        return address
    return str(ipaddress.ip_network((address, IPV6_PREFIX), strict=False))


@lru_cache(4096)
def _canonical(host: str) -> str | None:
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return None
    if isinstance(address, ipaddress.IPv6Address):
        return str(address.ipv4_mapped or ipaddress.IPv6Address(int(address)))
    return str(address)
