"""Memory budget in bytes, for each tenant and for all."""

from __future__ import annotations

from typing import Literal

Excess = Literal["tenant", "all"]


class ByteBudget:
    """Bytes in memory, counted for each owner and in all. An owner is a tenant's id or `admin`."""

    def __init__(self, max_bytes: int, tenant_part: int) -> None:
        """The limit of one owner is `max_bytes` divided by `tenant_part`."""
        self.max_bytes = max_bytes
        self.max_tenant_bytes = max_bytes // tenant_part
        self.num_bytes = 0
        """Bytes of all owners."""
        self._by_owner: dict[str, int] = {}

    def owned_by(self, owner: str) -> int:
        return self._by_owner.get(owner, 0)

    def add(self, owner: str, num_bytes: int) -> None:
        """Charges bytes to an owner. A negative number releases bytes."""
        self.num_bytes += num_bytes
        left = self._by_owner.get(owner, 0) + num_bytes
        if left:
            self._by_owner[owner] = left
        else:
            self._by_owner.pop(owner, None)

    def excess_with(self, owner: str | None, num_more: int) -> Excess | None:
        """Returns the limit that `num_more` further bytes of the owner would exceed, or None. Only
        the limit of all applies if the owner is not known."""
        if owner is not None and self.owned_by(owner) + num_more > self.max_tenant_bytes:
            return "tenant"
        return "all" if self.num_bytes + num_more > self.max_bytes else None
