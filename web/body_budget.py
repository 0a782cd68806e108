"""Memory budget of request bodies, from the socket until they are decoded, for each tenant and in
all. The server counts bytes, and the planes name the owner."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Literal

HELD_BODY = "held_body"
"""Key in an ASGI scope's state for the request's `HeldBody`."""
ALL = 256 << 20
"""Default total in bytes: 25 bodies of the largest size, or thousands of usual ones."""
TENANT_PART = 8
"""Divisor of the total: the share of one tenant, and that of all bodies without a valid key."""
GRACE_S = 30.0
MIN_BYTES_PER_S = 32 << 10
"""A body may take 30 s after its head, plus 1 s for each 32 KiB: at most 350 s for 10 MiB. A mobile
link of 0.5 Mbit/s is twice as fast."""

MAX_UNREAD_BYTES = 16 << 20
"""Maximum bytes of a body received after its request is answered. Clients send 10 MiB before they
read the 413."""

Excess = Literal["tenant", "all"]


class BodyBudget:
    def __init__(self, max_bytes: int = ALL, grace_s: float = GRACE_S) -> None:
        """`grace_s` are the seconds that a body may take, plus 1 s for each `MIN_BYTES_PER_S`."""
        self.max_bytes = max_bytes
        self.grace_s = grace_s
        self.max_tenant_bytes = max_bytes // TENANT_PART
        self.num_bytes = 0
        """Bytes of bodies that have an owner."""
        self.num_unowned_bytes = 0
        self._by_owner: dict[str, int] = {}

    def owned_by(self, owner: str) -> int:
        return self._by_owner.get(owner, 0)

    def add(self, owner: str | None, num_bytes: int) -> None:
        """Adds bytes, or releases them if negative. `owner` is None before the key is known."""
        if owner is None:
            self.num_unowned_bytes += num_bytes
            return
        self.num_bytes += num_bytes
        left = self._by_owner.get(owner, 0) + num_bytes
        if left:
            self._by_owner[owner] = left
        else:
            self._by_owner.pop(owner, None)

    @property
    def is_full_of_unowned(self) -> bool:
        return self.num_unowned_bytes > self.max_tenant_bytes


class HeldBody:
    """Memory of one request's body, and bytes received after its request is answered."""

    __slots__ = (
        "_budget",
        "_num_unread",
        "_owner",
        "num_bytes",
        "num_read",
        "on_unread",
    )

    def __init__(self, budget: BodyBudget) -> None:
        self._budget = budget
        self._owner: str | None = None
        self._num_unread = 0
        self.num_bytes = 0
        self.num_read = 0
        """Bytes received before the answer."""
        self.on_unread: Callable[[int], None] | None = None
        """Called with the bytes received after the answer, which are discarded."""

    def add(self, num_bytes: int) -> None:
        """Adds received bytes."""
        self.num_read += num_bytes
        self._hold(num_bytes)

    def release(self, num_bytes: int | None = None) -> None:
        """Releases bytes, all of them if `num_bytes` is None."""
        self._hold(-(self.num_bytes if num_bytes is None else num_bytes))

    def charge(self, owner: str) -> None:
        """Charges the body to an owner."""
        num_bytes = self.num_bytes
        self.release()
        self._owner = owner
        self._hold(num_bytes)

    def throw_away(self, num_bytes: int) -> bool:
        """Counts discarded bytes that arrived after the answer. Returns whether more may arrive."""
        self._num_unread += num_bytes
        if self.on_unread is not None:
            self.on_unread(num_bytes)
        return self._num_unread <= MAX_UNREAD_BYTES

    def latest_end(self, began: float, num_bytes: int) -> float:
        """Returns when the body must be complete, on the clock of `began`, if `num_bytes` have
        arrived."""
        return began + self._budget.grace_s + num_bytes / MIN_BYTES_PER_S

    @property
    def has_owner(self) -> bool:
        return self._owner is not None

    @property
    def excess(self) -> Excess | None:
        """Limit that is exceeded now: the tenant's or the total one. None if neither is."""
        return self.excess_with(0)

    def excess_with(self, num_more: int) -> Excess | None:
        """Returns the limit that would be exceeded with `num_more` bytes of this body, or None."""
        budget, owner = self._budget, self._owner
        if owner is not None and budget.owned_by(owner) + num_more > budget.max_tenant_bytes:
            return "tenant"
        return "all" if budget.num_bytes + num_more > budget.max_bytes else None

    def _hold(self, num_bytes: int) -> None:
        self.num_bytes += num_bytes
        self._budget.add(self._owner, num_bytes)


def held_body(scope: Mapping[str, Any]) -> HeldBody:
    """Returns the body of an ASGI scope's request. It is unlimited if another server runs."""
    held = scope["state"].get(HELD_BODY)
    return held if held is not None else HeldBody(BodyBudget())
