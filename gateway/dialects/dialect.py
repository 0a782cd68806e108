"""Defines the interface of the API dialects. A dialect translates a request's body into a
`Request`, which has the same form for all dialects, and the answer's deltas into bytes."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import ClassVar, Generic, NamedTuple, TypeVar

import msgspec

from gateway.dispatch.sequence import Delta, Scored
from gateway.limits.admission import Usage
from gateway.request import Request
from gateway.text.detokenizer import TokenBytes
from gateway.text.parsers.parser import Part, Text, join_parts
from workers.wire.protocol import SamplingParams

SCORES_AT_ONCE = 192 * 21
"""Maximum log-probabilities that are written before the event loop runs other tasks: 192 tokens
with 20 alternatives each, which take about 10 ms."""

B = TypeVar("B")
T = TypeVar("T")


class Answer(msgspec.Struct):
    """Accumulated deltas of one choice."""

    index: int
    pieces: list[Part] = []
    scored: list[Scored] = []
    prompt_scored: list[Scored] = []
    prompt: list[int] = []
    tokens: list[int] = []
    finish_reason: str | None = None
    stop: str | int | None = None
    """Stop string, or id of the request's stop token, that ended the choice."""
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
        """Parts of the answer, in which consecutive pieces of the same part are joined."""
        return join_parts(self.pieces)

    @property
    def text(self) -> str:
        """Text of the answer, without reasoning and tool calls."""
        return "".join([piece.text for piece in self.pieces if type(piece) is Text])


class BodyFormat(ABC):
    """Format of one response that is not streamed."""

    @abstractmethod
    async def body(self, answers: list[Answer], usage: Usage) -> list[bytes]:
        """Returns the body of the response in pieces, so that a large body is not copied to join
        them. While it encodes a large body, it lets the event loop run other tasks in between."""


class AnswerFormat(BodyFormat):
    """Format of one response, as server-sent events or as one body."""

    ping: ClassVar[bytes] = b": ping\n\n"
    """Event or comment that is sent while a stream is silent. Clients ignore it."""

    def start(self, usage: Usage) -> bytes:
        """Returns the events before the first delta. `usage` contains the prompt's usage."""
        return b""

    @abstractmethod
    def chunk(self, delta: Delta) -> bytes:
        """Returns the events of a delta, or empty bytes if the delta has nothing to show."""

    @abstractmethod
    def end(self, usage: Usage) -> bytes:
        """Returns the events that end a stream after all choices have ended."""

    @abstractmethod
    def error_event(self, error: Exception) -> bytes:
        """Returns the event that ends a stream that failed."""


class AnswerContext(NamedTuple):
    """Facts about a request that answer formats use in addition to its body."""

    request_id: str
    spelled: TokenBytes
    """Bytes of each token id."""
    used: SamplingParams
    """Sampling parameters of the answer, including defaults."""


class Dialect(ABC, Generic[B]):
    """Translation of one API. `B` is the API's request schema, a msgspec struct that checks the
    bounds of all fields."""

    id_prefix: ClassVar[str]
    """Prefix that precedes the request's id in the id of the response."""

    @abstractmethod
    def read(self, body: B) -> Request:
        """Converts the body. Raises InvalidRequest, which names the invalid field."""

    @abstractmethod
    def answer_format(self, body: B, context: AnswerContext) -> BodyFormat:
        """Returns the format of the answer to `body`. It is an AnswerFormat if the answer may be
        streamed."""


def num_scores(scored: Iterable[Scored]) -> int:
    """Returns the number of log-probabilities of these tokens and their alternatives."""
    return sum([len(entry.top) + 1 for entry in scored])


def slices(scored: Sequence[Scored]) -> Iterator[list[Scored]]:
    """Yields the scored tokens in slices. A slice has at most SCORES_AT_ONCE log-probabilities,
    unless it is a single token that has more."""
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
    """Returns the result of `write`, which converts the slice `scored` to bytes. Runs `write` on
    the event loop and then lets other tasks run. If the slice is a single token with more than
    SCORES_AT_ONCE log-probabilities, runs `write` in a thread instead."""
    if num_scores(scored) > SCORES_AT_ONCE:
        return await asyncio.to_thread(write)
    written = write()
    await asyncio.sleep(0)
    return written


def split(deltas: Iterable[Delta]) -> Iterator[Delta]:
    """Yields the deltas, split so that each has at most SCORES_AT_ONCE log-probabilities, or a
    single token. The first piece of a delta has its text, and the last piece its finish reason."""
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
