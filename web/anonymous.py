"""Rate limits of requests without a valid key: one for each client address, and one for all."""

from __future__ import annotations

import ipaddress
import time
from collections.abc import Callable

from web.client_address import address_prefix
from web.token_buckets import TokenBuckets

ADDRESS_PER_S, ADDRESS_BURST = 5.0, 50
"""Requests per second, and maximum burst, of one address prefix. A reader of the API's description
needs a few requests per minute."""
ALL_PER_S, ALL_BURST = 50.0, 200
"""Requests per second, and maximum burst, of all addresses together. 50 requests of about 0.2 ms
each take 1 % of a core."""
MAX_ADDRESSES = 4096
"""Maximum number of address prefixes that have a bucket."""


class AnonymousLimit:
    """One token bucket for each address prefix, and one for all addresses."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._all = TokenBuckets(ALL_BURST / ALL_PER_S, clock=clock)
        self._addresses = TokenBuckets(ADDRESS_BURST / ADDRESS_PER_S, MAX_ADDRESSES, clock)

    def take(self, address: str | None) -> str | None:
        """Takes a token for a request. Returns None, or the name of the exhausted limit: `address`
        or `all`.

        `address` is None for a Unix socket. A Unix socket and loopback addresses have only the
        limit for all.
        """
        if self._all.wait_s("", 1 / ALL_PER_S):
            return "all"
        is_limited = address is not None and not ipaddress.ip_address(address).is_loopback
        if is_limited and self._addresses.take(address_prefix(address), 1 / ADDRESS_PER_S):
            return "address"
        self._all.charge("", 1 / ALL_PER_S)
        return None
