"""Interface of the dialects: from a body to the neutral request, and from deltas to bytes."""

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
"""Maximum log-probabilities that are written before the event loop runs other tasks: 192 tokens
with 20 alternatives each, which take about 10 ms."""

B = TypeVar("B")
T = TypeVar("T")


class Answer(msgspec.Struct):
    """Deltas of one choice, accumulated."""

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
        """Pieces, with neighbouring ones of a part joined."""
        return join_parts(self.pieces)

    @property
    def text(self) -> str:
        """Text of the answer itself."""
        return "".join([piece.text for piece in self.pieces if type(piece) is Text])


class BodyFormat(ABC):
    """Format of one response that is not streamed."""

    @abstractmethod
    async def body(self, answers: list[Answer], usage: Usage) -> bytes:
        """Returns the body of the response. Lets the event loop run while it writes a large one."""


class AnswerFormat(BodyFormat):
    """Format of one response, as server-sent events or as one body."""

    ping: ClassVar[bytes] = b": ping\n\n"
    """Comment sent while a stream is silent. Clients skip it."""

    def start(self, usage: Usage) -> bytes:
        """Returns the events before the first delta. `usage` contains the prompt's usage."""
        return b""

    @abstractmethod
    def chunk(self, delta: Delta) -> bytes:
        """Returns the events of a delta, which are empty if it has nothing to show."""

    @abstractmethod
    def end(self, usage: Usage) -> bytes:
        """Returns the events that end a stream after all choices have ended."""

    @abstractmethod
    def error_event(self, error: Exception) -> bytes:
        """Returns the event that ends a stream that failed."""


class Dialect(ABC, Generic[B]):
    """One API: its request schema `B`, a msgspec struct with all bounds, and its meaning."""

    id_prefix: ClassVar[str]
    """Prefix of the request's id in the id of a response."""

    @abstractmethod
    def read(self, body: B) -> GenerationRequest:
        """Returns the neutral request. Raises InvalidRequest, naming the field."""

    @abstractmethod
    def answer_format(
        self, body: B, request_id: str, spelled: TokenBytes, used: SamplingParams
    ) -> BodyFormat:
        """Returns the format of the answer to `body`. It is an AnswerFormat if the answer may be
        streamed.

        `spelled` has the bytes of each token id. `used` are the sampling parameters, defaults
        included.
        """


def num_scores(scored: Iterable[Scored]) -> int:
    """Returns the number of log-probabilities, of the tokens and their alternatives."""
    return sum([len(entry.top) + 1 for entry in scored])


def slices(scored: Sequence[Scored]) -> Iterator[list[Scored]]:
    """Yields scored tokens in slices of at most SCORES_AT_ONCE log-probabilities, or of a single
    token."""
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
    """Returns the result of `write`, and lets the event loop run afterwards. Calls `write` in a
    thread if the slice is a single token with too many alternatives."""
    if num_scores(scored) > SCORES_AT_ONCE:
        return await asyncio.to_thread(write)
    written = write()
    await asyncio.sleep(0)
    return written


def split(deltas: Iterable[Delta]) -> Iterator[Delta]:
    """Yields the deltas, split so that each has at most SCORES_AT_ONCE log-probabilities. The first
    piece of a delta has its text, and the last its end."""
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
