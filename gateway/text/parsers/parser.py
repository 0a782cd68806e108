"""Interface between the text of an answer and its dialect: parsers split the text into parts.

Each answer has its own parser. It receives the text in pieces of any length, and returns the same
parts wherever the text is cut.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from itertools import groupby

import msgspec

from workers.wire.protocol import TokenLogprobs


class Text(msgspec.Struct, frozen=True):
    """Piece of the answer itself."""

    text: str
    scored: list[TokenLogprobs] = []
    """Tokens of the piece with their log-probabilities. Empty unless they are requested by
    piece."""


class Reasoning(msgspec.Struct, frozen=True):
    """Piece of the text that the model writes before its answer."""

    text: str


class ToolCall(msgspec.Struct, frozen=True):
    """Piece of a tool call."""

    index: int
    """Number of the call within the answer, from 0."""
    name: str
    """Name of the tool. Empty in all pieces but the first."""
    arguments: str
    """Next characters of the arguments, which are a JSON object."""


Part = Text | Reasoning | ToolCall


class Parser(ABC):
    """Base class of parsers that split the text of one answer into parts."""

    @abstractmethod
    def push(self, text: str) -> list[Part]:
        """Adds text and returns the parts that are certain now. Holds back at most the longest
        marker of the format and some white space before it."""

    @abstractmethod
    def finish(self, rest: str = "", *, is_cut: bool = False) -> list[Part]:
        """Returns the parts that were held back. Called once, at the end of the answer. `rest` are
        the last characters, which belong to tokens pushed before. `is_cut` says that the length
        limit ended the answer, so that a possible beginning of a marker or call is not returned as
        text."""

    @property
    def is_over(self) -> bool:
        """Whether further text cannot add parts."""
        return False

    @property
    def needs_each_token(self) -> bool:
        """Whether the next `push` must be the text of a single token, because the answer may end
        there or the token may belong to a thought."""
        return False

    @property
    def num_thought_tokens(self) -> int:
        """Number of tokens of the thought so far, without the markers around it."""
        return 0


class IdentityParser(Parser):
    """Parser that treats all text as the answer itself."""

    def push(self, text: str) -> list[Part]:
        return [Text(text)] if text else []

    def finish(self, rest: str = "", *, is_cut: bool = False) -> list[Part]:
        return self.push(rest)


class SingleCallParser(Parser):
    """Parser that passes on the parts of another parser until its second call begins."""

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
    """Parser that passes on only the calls of another parser. The grammar of such an answer allows
    only calls, so that any text is the beginning of a truncated call."""

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
    """Joins neighbouring pieces of the same part."""
    return [_joined(list(each)) for _, each in groupby(pieces, part_key)]


def part_key(piece: Part) -> tuple[type[Part], int]:
    """Returns a key that is equal for pieces of one part: the kind, and the index of a tool
    call."""
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
