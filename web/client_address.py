"""Address of the client, as used for logs, rate limits and the networks of keys."""

from __future__ import annotations

import ipaddress
from collections.abc import Mapping
from functools import lru_cache
from typing import Any

from store.records import ApiKey
from web.errors import Forbidden

MAX_CHARS = 45
"""Number of characters of the longest IP address, which is IPv6 with an embedded IPv4 address."""
IPV6_PREFIX = 64
"""Length in bits of the IPv6 prefix that one subscriber usually has."""


def client_address(scope: Mapping[str, Any]) -> str | None:
    """Returns the IP address of an ASGI scope's client. Returns None over a Unix socket.

    The address is the peer's. If the peer is one of `trusted_proxies`, the server has replaced it
    with the last address of X-Forwarded-For that is not a trusted proxy. Returns None if the
    header's text is not an address.
    """
    client = scope.get("client")
    return canonical(client[0]) if client else None


def check_address(key: ApiKey, scope: Mapping[str, Any]) -> None:
    """Raises Forbidden unless the key may be used from the client's address."""
    if not key.may_come_from(client_address(scope)):
        raise Forbidden("This API key may not be used from this address.", code="ip_not_allowed")


def canonical(host: str) -> str | None:
    """Returns the canonical form of an IP address. Returns None for other text."""
    return None if len(host) > MAX_CHARS else _canonical(host)


def address_prefix(address: str | None) -> str:
    """Returns the prefix by which rate limits and log lines group addresses: the whole IPv4
    address, or the /64 of an IPv6 address."""
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
