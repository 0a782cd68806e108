"""Memory budgets of request bodies, for each tenant and for all. A body counts until it is
tokenised or its request is answered. The server counts the bytes, and the plane sets the owner."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Literal

Excess = Literal["tenant", "all"]
HELD_BODY = "held_body"
"""Key in the state of an ASGI scope for the request's `HeldBody`."""
ALL = 256 << 20
"""Default maximum bytes of all bodies. Enough for 25 bodies of the largest size."""
TENANT_PART = 8
"""Divisor of the total limit. The quotient is the limit of one tenant, and also the limit of all
bodies together that belong to requests whose key is not known yet."""
GRACE_S = 30.0
MIN_BYTES_PER_S = 32 << 10
"""Minimum rate of a body. A body may take 30 s after its head, plus 1 s for each 32 KiB, at most
350 s for 10 MiB. A mobile link of 0.5 Mbit/s is twice as fast."""
MAX_UNREAD_BYTES = 16 << 20
"""Maximum bytes of a body that are received after its request was answered. Clients send up to 10
MiB before they read a 413."""


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


class BodyBudget(ByteBudget):
    """Bytes of request bodies. Bodies whose owner is not known yet have a limit of their own."""

    def __init__(self, max_bytes: int = ALL, grace_s: float = GRACE_S) -> None:
        """`grace_s` is the number of seconds that a body of any size may take. Each
        `MIN_BYTES_PER_S` bytes add 1 s."""
        super().__init__(max_bytes, TENANT_PART)
        self.grace_s = grace_s
        self.num_unowned_bytes = 0

    @property
    def is_full_of_unowned(self) -> bool:
        return self.num_unowned_bytes > self.max_tenant_bytes


class HeldBody:
    """Counter of one request's body bytes in memory, and of bytes received after the answer."""

    __slots__ = (
        "_budget",
        "_num_unread",
        "num_bytes",
        "num_read",
        "on_unread",
        "owner",
    )

    def __init__(self, budget: BodyBudget) -> None:
        self._budget = budget
        self.owner: str | None = None
        """Id of the tenant, or `admin`. None while the request's key is not known."""
        self._num_unread = 0
        self.num_bytes = 0
        self.num_read = 0
        """Bytes received before the answer, and bytes decoded from them."""
        self.on_unread: Callable[[int], None] | None = None
        """Function that is called with the number of bytes that were received after the answer."""

    def add(self, num_bytes: int) -> None:
        """Adds received or decoded bytes."""
        self.num_read += num_bytes
        self.hold(num_bytes)

    def release(self, num_bytes: int | None = None) -> None:
        """Releases bytes, all of them if `num_bytes` is None."""
        self.hold(-(self.num_bytes if num_bytes is None else num_bytes))

    def charge(self, owner: str) -> None:
        """Charges the body to an owner."""
        num_bytes = self.num_bytes
        self.release()
        self.owner = owner
        self.hold(num_bytes)

    def throw_away(self, num_bytes: int) -> bool:
        """Counts bytes that were discarded because the request was already answered. Returns
        whether more may be received."""
        self._num_unread += num_bytes
        if self.on_unread is not None:
            self.on_unread(num_bytes)
        return self._num_unread <= MAX_UNREAD_BYTES

    def latest_end(self, began: float, num_bytes: int) -> float:
        """Returns the time by which the body must be complete if `num_bytes` have been received so
        far. `began` is the time at which reading the body began, on the same clock."""
        return began + self._budget.grace_s + num_bytes / MIN_BYTES_PER_S

    @property
    def excess(self) -> Excess | None:
        """Exceeded limit: `tenant` (one tenant's) or `all`. None if neither is exceeded."""
        return self.excess_with(0)

    def excess_with(self, num_more: int) -> Excess | None:
        """Returns the limit that `num_more` further bytes of this body would exceed, or None."""
        return self._budget.excess_with(self.owner, num_more)

    def hold(self, num_bytes: int) -> None:
        """Counts further bytes in memory that are needed to read the body."""
        self.num_bytes += num_bytes
        if self.owner is None:
            self._budget.num_unowned_bytes += num_bytes
        else:
            self._budget.add(self.owner, num_bytes)


def held_body(scope: Mapping[str, Any]) -> HeldBody:
    """Returns the held body of an ASGI scope's request. If another server runs the application,
    returns a new one, whose budget no other request shares."""
    held = scope["state"].get(HELD_BODY)
    return held if held is not None else HeldBody(BodyBudget())
