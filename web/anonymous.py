"""Rate limits of requests without a valid key: one for each client address, and one for all."""

from __future__ import annotations

import ipaddress
from collections import OrderedDict

from web.client_address import address_prefix

ADDRESS_PER_S, ADDRESS_BURST = 5.0, 50
"""Requests per second, and maximum burst, of one address prefix. A reader of the API's description
needs a few requests per minute."""
ALL_PER_S, ALL_BURST = 50.0, 200
"""Requests per second, and maximum burst, of all addresses together. 50 requests of about 0.2 ms
each take 1 % of a core."""
MAX_ADDRESSES = 4096
"""Maximum number of address prefixes that have a bucket. The least recently used bucket is
dropped first. The next request from its prefix then gets a new, full bucket."""


class AnonymousLimit:
    """One token bucket for each address prefix, and one for all addresses. A bucket is stored as
    the time at which it is full again (GCRA, ITU-T I.371)."""

    def __init__(self) -> None:
        self._full_at = 0.0
        self._addresses: OrderedDict[str, float] = OrderedDict()

    def take(self, address: str | None, now: float) -> str | None:
        """Takes a token for a request. Returns None, or the name of the exhausted limit: `address`
        or `all`.

        `address` is None for a Unix socket. A Unix socket and loopback addresses have only the
        limit for all.
        """
        full_at = _after_one(self._full_at, now, ALL_PER_S, ALL_BURST)
        if full_at is None:
            return "all"
        if address is not None and not ipaddress.ip_address(address).is_loopback:
            prefix = address_prefix(address)
            own = _after_one(self._addresses.get(prefix, 0.0), now, ADDRESS_PER_S, ADDRESS_BURST)
            if own is None:
                return "address"
            self._addresses[prefix] = own
            self._addresses.move_to_end(prefix)
            if len(self._addresses) > MAX_ADDRESSES:
                self._addresses.popitem(last=False)
        self._full_at = full_at
        return None


def _after_one(full_at: float, now: float, per_s: float, burst: int) -> float | None:
    """Takes a token. Returns the time at which the bucket is full again, or None if it is empty."""
    after = max(full_at, now) + 1 / per_s
    # Allows for rounding errors, which are less than half a token.
    return after if after - now < (burst + 0.5) / per_s else None
