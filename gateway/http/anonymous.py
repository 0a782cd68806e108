"""How often requests without a valid key are answered: per client address and in all."""

from __future__ import annotations

import ipaddress
from collections import OrderedDict

from admin.client_address import address_prefix

ADDRESS_PER_S, ADDRESS_BURST = 5.0, 50
"""Bounds of one address prefix. A person reading the API's description needs a few a minute."""
ALL_PER_S, ALL_BURST = 50.0, 200
"""Bounds of all addresses: at some 0.2 ms each, 1 % of a core."""
MAX_ADDRESSES = 4096
"""Remembered at a time. The oldest is forgotten first; the bound for all holds none the less."""


class AnonymousLimit:
    """Two token buckets, each kept as the moment when it is full again (GCRA, ITU-T I.371)."""

    def __init__(self) -> None:
        self._full_at = 0.0
        self._addresses: OrderedDict[str, float] = OrderedDict()

    def take(self, address: str | None, now: float) -> str | None:
        """Takes one request, or says which bound has none left: `address` or `all`.

        address: None for a Unix socket, which like loopback has only the bound for all.
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
    """When the bucket is full again once one is taken; None if it has none."""
    after = max(full_at, now) + 1 / per_s
    # Sums of fractions are off by less than half a request.
    return after if after - now < (burst + 0.5) / per_s else None
