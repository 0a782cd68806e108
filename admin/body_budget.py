"""Bytes of request bodies in memory: counted from the socket until they are decoded, and bounded
for each tenant and in all. The server counts what comes, the planes say whose it is."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Literal

HELD_BODY = "held_body"
"""Key in an ASGI scope's state of the request's `HeldBody`."""
ALL = 256 << 20
"""Bytes in all by default: 25 bodies of the largest size, or thousands of usual ones."""
TENANT_PART = 8
"""A tenant may hold this part of all; so may what has no valid key yet, beside it."""
GRACE_S = 30.0
MIN_BYTES_PER_S = 32 << 10
"""A body must have come 30 s after its head, and 1 s for each 32 KiB of it: 10 MiB take 350 s at
most. A mobile link of 0.5 Mbit/s is twice as fast."""

MAX_UNREAD_BYTES = 16 << 20
"""Bound of what comes of a body after its request is answered. Clients send 10 MiB before they read
the 413."""

Excess = Literal["tenant", "all"]


class BodyBudget:
    def __init__(self, max_bytes: int = ALL, grace_s: float = GRACE_S) -> None:
        """grace_s: how long a body may take beside 1 s for each `MIN_BYTES_PER_S`."""
        self.max_bytes = max_bytes
        self.grace_s = grace_s
        self.max_tenant_bytes = max_bytes // TENANT_PART
        self.num_bytes = 0
        """Size of bodies with an owner."""
        self.num_unowned_bytes = 0
        self._by_owner: dict[str, int] = {}

    def owned_by(self, owner: str) -> int:
        return self._by_owner.get(owner, 0)

    def add(self, owner: str | None, num_bytes: int) -> None:
        """Counts bytes, or with a negative number gives them back. owner: None before the key is
        known."""
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
    """The bytes of one request's body that are in memory, and what may come of it after its request
    is answered."""

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
        """Bytes in memory."""
        self.num_read = 0
        """Bytes that came before the answer."""
        self.on_unread: Callable[[int], None] | None = None
        """Counts bytes that come after the answer and are thrown away."""

    def add(self, num_bytes: int) -> None:
        """Counts bytes that have come."""
        self.num_read += num_bytes
        self._hold(num_bytes)

    def release(self, num_bytes: int | None = None) -> None:
        """Gives back so many bytes; None: all."""
        self._hold(-(self.num_bytes if num_bytes is None else num_bytes))

    def charge(self, owner: str) -> None:
        """Counts the body as the owner's from now on."""
        num_bytes = self.num_bytes
        self.release()
        self._owner = owner
        self._hold(num_bytes)

    def throw_away(self, num_bytes: int) -> bool:
        """Counts bytes that have come after the answer. Returns whether more may come."""
        self._num_unread += num_bytes
        if self.on_unread is not None:
            self.on_unread(num_bytes)
        return self._num_unread <= MAX_UNREAD_BYTES

    def latest_end(self, began: float, num_bytes: int) -> float:
        """When the body must be whole that began then, of which so many bytes have come; on the
        clock of `began`."""
        return began + self._budget.grace_s + num_bytes / MIN_BYTES_PER_S

    @property
    def has_owner(self) -> bool:
        return self._owner is not None

    @property
    def excess(self) -> Excess | None:
        """The bound that is exceeded while this body is held; None if none is."""
        return self.excess_with(0)

    def excess_with(self, num_more: int) -> Excess | None:
        """The bound that is exceeded once so many more bytes of this body are held; None if none
        is."""
        budget, owner = self._budget, self._owner
        if owner is not None and budget.owned_by(owner) + num_more > budget.max_tenant_bytes:
            return "tenant"
        return "all" if budget.num_bytes + num_more > budget.max_bytes else None

    def _hold(self, num_bytes: int) -> None:
        self.num_bytes += num_bytes
        self._budget.add(self._owner, num_bytes)


def held_body(scope: Mapping[str, Any]) -> HeldBody:
    """The body of an ASGI scope's request; not bounded where another server serves."""
    held = scope["state"].get(HELD_BODY)
    return held if held is not None else HeldBody(BodyBudget())
