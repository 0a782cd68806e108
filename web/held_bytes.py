"""Counts the bytes of requests' bodies and of their answers in memory, and limits them, for each
tenant and for all. A body counts until it is tokenised or its request is answered. An answer counts
until its client has read it. The server counts the bytes, and the plane sets the owner."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Literal, NamedTuple, Protocol

from litestar.types import HTTPResponseStartEvent, Message, Send

from web.errors import Overloaded

Excess = Literal["tenant", "all"]
HELD_BODY = "held_body"
"""Key in the state of an ASGI scope for the request's `HeldBody`."""
MAX_BODIES_BYTES = 256 << 20
"""Default maximum bytes of all bodies together. Enough for 25 bodies of the largest size."""
BODIES_TENANT_PART = 8
"""Divisor of the total limit. The quotient is the limit of one tenant, and also the limit of all
bodies together that belong to requests whose key is not known yet."""
GRACE_S = 30.0
MIN_BYTES_PER_S = 32 << 10
"""Minimum rate of a body. A body may take 30 s after its head, plus 1 s for each 32 KiB, at most
350 s for 10 MiB. A mobile link of 0.5 Mbit/s is twice as fast."""
MAX_UNREAD_BYTES = 16 << 20
"""Maximum bytes of a body that are received after its request was answered. Clients send up to 10
MiB before they read a 413."""
HELD_ANSWER = "held_answer"
"""Key in the state of an ASGI scope for the request's `HeldAnswer`."""
PIECE_BYTES = 256 << 10
"""Maximum bytes of an answer that are written before the client must have read them. A client has
`slow_client_s` for each piece."""
SLOW_CLIENT_S = 30.0
"""Default seconds without reading after which a client is disconnected."""
MAX_ANSWER_BYTES = 256 << 20
"""Default maximum bytes of all answers together that wait for their clients."""
ANSWERS_TENANT_PART = 4
"""Divisor of this maximum. The quotient is the maximum of one tenant, and holds the largest answer,
of 2,097,152 numbers."""
_EXCEEDED: dict[Excess, str] = {
    "tenant": "This tenant's answers that are generated or not read yet may be too large together.",
    "all": "All answers that are generated or not read yet may be too large together.",
}
CHEAP_BODY_BYTES = 16 << 10
"""Bytes of a request up to which it costs little to find out how large its answer may be. The size
of a small request says little about that: a few fields may ask for a large answer."""


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

    def __init__(self, max_bytes: int = MAX_BODIES_BYTES, grace_s: float = GRACE_S) -> None:
        """`grace_s` is the number of seconds that a body of any size may take. Each
        `MIN_BYTES_PER_S` bytes add 1 s."""
        super().__init__(max_bytes, BODIES_TENANT_PART)
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


class _Full(NamedTuple):
    """Refusal of an answer because of its owner's other answers, of which there is at least one."""

    num_body_bytes: int
    """Bytes of the smallest request that was refused."""
    num_held: int
    """Bytes of the owner's answers at that time."""


class AnswerBudget(ByteBudget):
    """Bytes of answers that clients have not read yet, or that are about to be written."""

    def __init__(self, max_bytes: int = MAX_ANSWER_BYTES) -> None:
        super().__init__(max_bytes, ANSWERS_TENANT_PART)
        self._full: dict[str, _Full] = {}
        """Owners whose newest answers were refused and who have read nothing since."""

    def note_refusal(self, owner: str, num_body_bytes: int) -> None:
        self._full[owner] = _Full(num_body_bytes, self.owned_by(owner))

    def is_full(self, owner: str, num_body_bytes: int) -> bool:
        """Returns whether the request is large, one that was not larger has just been refused, and
        the owner has read nothing since."""
        full = self._full.get(owner)
        if full is None or num_body_bytes <= CHEAP_BODY_BYTES:
            return False
        if self.owned_by(owner) < full.num_held:
            del self._full[owner]
            return False
        return num_body_bytes >= full.num_body_bytes


class Reader(Protocol):
    """Client that reads an answer."""

    @property
    def is_behind(self) -> bool:
        """Whether written bytes wait for the client."""
        ...

    async def catch_up(self) -> None:
        """Waits until no written bytes wait for the client. Disconnects a client that takes too
        long."""
        ...


class HeldAnswer:
    """Answer to one request on its way to the client. It counts until the client has read it, or
    until its bytes are in the send buffer of the operating system."""

    __slots__ = ("_budget", "_is_reserved", "_num_bytes", "body")

    def __init__(self, budget: AnswerBudget, body: HeldBody) -> None:
        """The answer's owner is the owner of `body`, the request's body."""
        self.body = body
        self._budget = budget
        self._num_bytes = 0
        self._is_reserved = False

    def refuse_if_full(self) -> None:
        """Raises Overloaded if an answer to a similar request would be refused now. This costs less
        than finding out how large the answer may be."""
        owner = self.body.owner
        if owner is not None and self._budget.is_full(owner, self.body.num_read):
            raise _refusal_of("tenant")

    def reserve(self, num_bytes: int) -> None:
        """Counts the bytes that an answer may have, before it is generated. Raises Overloaded if
        they exceed a limit. The answer is then sent in any case."""
        # An answer that exceeds the tenant's part alone is sent if the tenant has no other.
        num_bytes = min(num_bytes, self._budget.max_tenant_bytes)
        owner = self.body.owner
        if (excess := self._budget.excess_with(owner, num_bytes)) is not None:
            # If only the limit of all is exceeded, the owner need not read anything.
            if excess == "tenant" and owner is not None:
                self._budget.note_refusal(owner, self.body.num_read)
            raise _refusal_of(excess)
        self._is_reserved = True
        self._hold(num_bytes)

    def refusal_of(self, start: HTTPResponseStartEvent) -> Overloaded | None:
        """Counts the announced bytes of an answer with one large body, in place of the reserved
        bytes. Returns the refusal if no bytes were reserved and there is no room for the answer."""
        num_bytes = next(
            (int(value) for name, value in start["headers"] if name == b"content-length"), 0
        )
        if not self._is_reserved:
            if num_bytes <= PIECE_BYTES:
                return None
            excess = self._budget.excess_with(self.body.owner, num_bytes)
            if excess is not None:
                return _refusal_of(excess)
        self._hold(num_bytes - self._num_bytes)
        return None

    async def send(self, message: Message, send: Send, reader: Reader) -> None:
        """Sends a message. If it is a part of the body, cuts it into pieces of `PIECE_BYTES`, and
        returns when the client has read them."""
        if message["type"] != "http.response.body":
            await send(message)
            return
        body, more = message["body"], message.get("more_body", False)
        num_bytes = len(body)
        if num_bytes > PIECE_BYTES:
            view = memoryview(body)
            for begin in range(0, num_bytes, PIECE_BYTES):
                # The view makes no copy of the body.
                piece: Any = view[begin : begin + PIECE_BYTES]
                await self._write(piece, send, reader, more=True)
            body = b""
        if body or not more:
            await self._write(body, send, reader, more=more)
        self._hold(-min(num_bytes, self._num_bytes))

    def end(self) -> None:
        """Releases the bytes that still count."""
        self._hold(-self._num_bytes)

    async def _write(self, piece: bytes, send: Send, reader: Reader, *, more: bool) -> None:
        await send({"type": "http.response.body", "body": piece, "more_body": more})
        if not reader.is_behind:
            return
        num_uncounted = max(0, len(piece) - self._num_bytes)
        self._hold(num_uncounted)
        try:
            await reader.catch_up()
        finally:
            self._hold(-num_uncounted)

    def _hold(self, num_bytes: int) -> None:
        # Answers without an owner are small, or are documents of which there is one copy.
        if num_bytes and (owner := self.body.owner) is not None:
            self._num_bytes += num_bytes
            self._budget.add(owner, num_bytes)


def _refusal_of(excess: Excess) -> Overloaded:
    return Overloaded(_EXCEEDED[excess], code="too_many_unread")


def held_answer(scope: Mapping[str, Any]) -> HeldAnswer:
    """Returns the held answer of an ASGI scope's request. If another server runs the application,
    returns a new one, whose budget no other request shares."""
    held = scope["state"].get(HELD_ANSWER)
    if held is not None:
        return held
    return HeldAnswer(AnswerBudget(), held_body(scope))
