"""Sends answers as fast as clients read them. Limits the bytes of answers that wait in memory for
their clients, for each tenant and for all."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple, Protocol

from litestar.types import HTTPResponseStartEvent, Message, Send

from web.body_budget import ByteBudget, Excess, HeldBody, held_body
from web.errors import Overloaded

HELD_ANSWER = "held_answer"
"""Key in the state of an ASGI scope for the request's `HeldAnswer`."""
PIECE_BYTES = 256 << 10
"""Maximum bytes of an answer that are written before the client must have read them. A client has
`slow_client_s` for each piece."""
SLOW_CLIENT_S = 30.0
"""Default seconds without reading after which a client is disconnected."""
MAX_ANSWER_BYTES = 256 << 20
"""Default maximum bytes of all answers together that wait for their clients."""
TENANT_PART = 4
"""Divisor of this maximum. The quotient is the maximum of one tenant, and holds the largest answer,
of 2,097,152 numbers."""
_EXCEEDED: dict[Excess, str] = {
    "tenant": "This tenant's answers that are generated or not read yet may be too large together.",
    "all": "All answers that are generated or not read yet may be too large together.",
}


CHEAP_BODY_BYTES = 16 << 10
"""Bytes of a request up to which it costs little to find out how large its answer may be. The size
of a small request says little about that: a few fields may ask for a large answer."""


class _Full(NamedTuple):
    """Refusal of an answer because of its owner's other answers, of which there is at least one."""

    num_body_bytes: int
    """Bytes of the smallest request that was refused."""
    num_held: int
    """Bytes of the owner's answers at that time."""


class AnswerBudget(ByteBudget):
    """Bytes of answers that clients have not read yet, or that are about to be written."""

    def __init__(self, max_bytes: int = MAX_ANSWER_BYTES) -> None:
        super().__init__(max_bytes, TENANT_PART)
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

    __slots__ = ("_body", "_budget", "_is_reserved", "_num_bytes")

    def __init__(self, budget: AnswerBudget, body: HeldBody) -> None:
        """The answer's owner is the owner of `body`, the request's body."""
        self._budget = budget
        self._body = body
        self._num_bytes = 0
        self._is_reserved = False

    def refuse_if_full(self) -> None:
        """Raises Overloaded if an answer to a similar request would be refused now. This costs less
        than finding out how large the answer may be."""
        owner = self._body.owner
        if owner is not None and self._budget.is_full(owner, self._body.num_read):
            raise _refusal_of("tenant")

    def reserve(self, num_bytes: int) -> None:
        """Counts the bytes that an answer may have, before it is generated. Raises Overloaded if
        they exceed a limit. The answer is then sent in any case."""
        # An answer that exceeds the tenant's part alone is sent if the tenant has no other.
        num_bytes = min(num_bytes, self._budget.max_tenant_bytes)
        owner = self._body.owner
        if (excess := self._budget.excess_with(owner, num_bytes)) is not None:
            # If only the limit of all is exceeded, the owner need not read anything.
            if excess == "tenant" and owner is not None:
                self._budget.note_refusal(owner, self._body.num_read)
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
            excess = self._budget.excess_with(self._body.owner, num_bytes)
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
        if num_bytes and (owner := self._body.owner) is not None:
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
