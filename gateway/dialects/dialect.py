"""The seam of the dialects: from a body to the neutral request, from deltas to bytes."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import ClassVar, Generic, TypeVar

import msgspec

from gateway.dispatch.choice import Delta, Scored
from gateway.generation_request import GenerationRequest
from gateway.limits.admission import Usage
from gateway.text.detokenizer import TokenBytes
from gateway.text.parsers.parser import Part, Text, join_parts
from workers.wire.protocol import SamplingParams

SCORES_AT_ONCE = 192 * 21
"""Log-probabilities that are written before the event loop goes on with others, which takes about
10 ms: 192 tokens with 20 others each."""

B = TypeVar("B")
T = TypeVar("T")


class Answer(msgspec.Struct):
    """All deltas of one choice, gathered."""

    index: int
    pieces: list[Part] = []
    """As they came."""
    scored: list[Scored] = []
    prompt_scored: list[Scored] = []
    prompt: list[int] = []
    """The prompt's tokens."""
    tokens: list[int] = []
    finish_reason: str | None = None
    stop: str | int | None = None
    """The stop string, or the id of the request's stop token, that ended it."""
    vector: bytes | None = None

    def add(self, delta: Delta) -> None:
        self.pieces.extend(delta.parts)
        self.prompt = delta.prompt
        self.tokens.extend(delta.tokens)
        self.scored.extend(delta.scored)
        self.prompt_scored.extend(delta.prompt_scored)
        self.finish_reason = delta.finish_reason
        self.stop = delta.stop
        self.vector = delta.vector

    @property
    def parts(self) -> list[Part]:
        """The pieces, joined."""
        return join_parts(self.pieces)

    @property
    def text(self) -> str:
        """The text of the answer itself."""
        return "".join([piece.text for piece in self.pieces if type(piece) is Text])


class BodyFormat(ABC):
    """The bytes of one response that is never streamed."""

    @abstractmethod
    async def body(self, answers: list[Answer], usage: Usage) -> bytes:
        """The whole answer. While a large one is made, the event loop goes on."""


class AnswerFormat(BodyFormat):
    """The bytes of one response: server-sent events, or one body."""

    ping: ClassVar[bytes] = b": ping\n\n"
    """Sent while a stream is silent; a comment, which clients skip."""

    def start(self, usage: Usage) -> bytes:
        """The events before a stream's first delta. `usage`: what is known then, the prompt's."""
        return b""

    @abstractmethod
    def chunk(self, delta: Delta) -> bytes:
        """The events of a delta; empty if it has nothing to show."""

    @abstractmethod
    def end(self, usage: Usage) -> bytes:
        """The events that end a stream whose choices have all ended."""

    @abstractmethod
    def error_event(self, error: Exception) -> bytes:
        """The event that ends a stream which failed after it had begun."""


class Dialect(ABC, Generic[B]):
    """One API: its schema `B` (a msgspec struct with every bound), and what it means."""

    id_prefix: ClassVar[str]
    """Stands before the request's id in the id of a response."""

    @abstractmethod
    def read(self, body: B) -> GenerationRequest:
        """The neutral request. Raises InvalidRequest, which names the field."""

    @abstractmethod
    def answer_format(
        self, body: B, request_id: str, spelled: TokenBytes, used: SamplingParams
    ) -> BodyFormat:
        """How the answer to `body` is written; an AnswerFormat if it may be streamed.

        spelled: the bytes of each token id. used: how its tokens are drawn, defaults included.
        """


def num_scores(scored: Iterable[Scored]) -> int:
    """Returns the number of log-probabilities of some tokens and of the others beside them."""
    return sum([len(entry.top) + 1 for entry in scored])


def slices(scored: Sequence[Scored]) -> Iterator[list[Scored]]:
    """Scored tokens, as many at a time as are written at once; a single one may have more others
    beside it."""
    piece: list[Scored] = []
    size = 0
    for entry in scored:
        size += len(entry.top) + 1
        if piece and size > SCORES_AT_ONCE:
            yield piece
            piece, size = [], len(entry.top) + 1
        piece.append(entry)
    if piece:
        yield piece


async def write_scores(scored: Sequence[Scored], write: Callable[[], T]) -> T:
    """Returns what `write` makes of a slice. The event loop goes on with others after it, or in the
    meantime if a token has so many others beside it that they take long."""
    if num_scores(scored) > SCORES_AT_ONCE:
        return await asyncio.to_thread(write)
    written = write()
    await asyncio.sleep(0)
    return written


def split(deltas: Iterable[Delta]) -> Iterator[Delta]:
    """The same deltas, each with as many scored tokens as are written at once: the first piece has
    the text, the last the end."""
    for delta in deltas:
        if num_scores(delta.scored) <= SCORES_AT_ONCE:
            yield delta
            continue
        *pieces, last = slices(delta.scored)
        rest = delta
        for piece in pieces:
            yield msgspec.structs.replace(rest, scored=piece, finish_reason=None, stop=None)
            rest = msgspec.structs.replace(rest, parts=[], tokens=[])
        yield msgspec.structs.replace(rest, scored=last)
