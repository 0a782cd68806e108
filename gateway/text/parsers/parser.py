"""Defines the interface of parsers. A parser splits the text of an answer into the parts that the
API dialects send: text, thoughts and tool calls.

Each answer has its own parser, which receives the text in pieces of any length. After the pieces of
each part are joined, the parts do not depend on where the text was cut.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from itertools import groupby

import msgspec

from workers.wire.protocol import TokenLogprobs


class Text(msgspec.Struct, frozen=True):
    """Piece of the text of the answer itself, outside thoughts and calls."""

    text: str
    scored: list[TokenLogprobs] = []
    """Tokens of this piece with their log-probabilities. Empty unless the request sets
    `scores_texts`."""


class Reasoning(msgspec.Struct, frozen=True):
    """Piece of a thought, which is text that the model writes before its answer."""

    text: str


class ToolCall(msgspec.Struct, frozen=True):
    """Piece of a tool call."""

    index: int
    """Index of the call in the answer, from 0."""
    name: str
    """Name of the tool in the first piece of a call. Empty in later pieces."""
    arguments: str
    """Part of the arguments that this piece adds. The arguments of all pieces together are a JSON
    object."""


Part = Text | Reasoning | ToolCall


class Parser(ABC):
    """Base class of parsers that split the text of one answer into parts."""

    @abstractmethod
    def push(self, text: str) -> list[Part]:
        """Adds text, and returns the parts that later text cannot change. Text that may be the
        beginning of a marker is held back, with some white space before it."""

    @abstractmethod
    def finish(self, rest: str = "", *, is_cut: bool = False) -> list[Part]:
        """Returns the parts that were held back. Called once, at the end of the answer. `rest` is
        the last text of the detokenizer, and belongs to tokens that were pushed before. If `is_cut`
        is set, the length limit ended the answer, and text at its end that may be the beginning of
        a marker or call is dropped."""

    @property
    def is_over(self) -> bool:
        """Whether the answer has ended, so that further text cannot add parts."""
        return False

    @property
    def needs_each_token(self) -> bool:
        """Whether the next `push` must have the text of exactly one token, because the answer may
        end after any token, or because tokens of a thought are counted."""
        return False

    @property
    def num_thought_tokens(self) -> int:
        """Number of tokens of the thought so far, without the markers before and after it."""
        return 0


class IdentityParser(Parser):
    """Parser that treats all text as the answer itself."""

    def push(self, text: str) -> list[Part]:
        return [Text(text)] if text else []

    def finish(self, rest: str = "", *, is_cut: bool = False) -> list[Part]:
        return self.push(rest)


class SingleCallParser(Parser):
    """Parser that returns the parts of another parser, and ends the answer where a second call
    begins."""

    def __init__(self, parser: Parser) -> None:
        self._parser = parser
        self._is_over = False

    @property
    def is_over(self) -> bool:
        return self._is_over

    @property
    def needs_each_token(self) -> bool:
        return True

    def push(self, text: str) -> list[Part]:
        return [] if self._is_over else self._up_to_second_call(self._parser.push(text))

    def finish(self, rest: str = "", *, is_cut: bool = False) -> list[Part]:
        if self._is_over:
            return []
        return self._up_to_second_call(self._parser.finish(rest, is_cut=is_cut))

    def _up_to_second_call(self, parts: list[Part]) -> list[Part]:
        for number, part in enumerate(parts):
            if isinstance(part, ToolCall) and part.index > 0:
                self._is_over = True
                return parts[:number]
        return parts


class CallsOnlyParser(Parser):
    """Parser that returns only the calls of another parser, for answers whose grammar allows only
    calls. Text in such an answer is the beginning of a truncated call."""

    def __init__(self, parser: Parser) -> None:
        self._parser = parser

    @property
    def is_over(self) -> bool:
        return self._parser.is_over

    @property
    def needs_each_token(self) -> bool:
        return self._parser.needs_each_token

    def push(self, text: str) -> list[Part]:
        return _calls(self._parser.push(text))

    def finish(self, rest: str = "", *, is_cut: bool = False) -> list[Part]:
        return _calls(self._parser.finish(rest, is_cut=is_cut))


def _calls(parts: list[Part]) -> list[Part]:
    return [part for part in parts if isinstance(part, ToolCall)]


def join_parts(pieces: Iterable[Part]) -> list[Part]:
    """Returns the pieces with consecutive pieces of the same part joined."""
    return [_joined(list(each)) for _, each in groupby(pieces, part_key)]


def part_key(piece: Part) -> tuple[type[Part], int]:
    """Returns a key: the piece's class and, for a tool call, the index of the call (otherwise 0).
    Consecutive pieces with equal keys belong to the same part of the answer."""
    return type(piece), piece.index if isinstance(piece, ToolCall) else 0


def _joined(pieces: Sequence[Part]) -> Part:
    match pieces[0]:
        case ToolCall(index=index, name=name):
            written = [piece.arguments for piece in pieces if isinstance(piece, ToolCall)]
            return ToolCall(index, name, "".join(written))
        case Text():
            texts = [piece for piece in pieces if isinstance(piece, Text)]
            scored = [entry for piece in texts for entry in piece.scored]
            return Text("".join([piece.text for piece in texts]), scored)
        case Reasoning():
            spoken = [piece.text for piece in pieces if isinstance(piece, Reasoning)]
            return Reasoning("".join(spoken))
