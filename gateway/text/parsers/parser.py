"""The stage between an answer's text and its dialect: text becomes parts.

A parser is made for each answer. It sees the text in pieces of any length, and gives the same parts
however the text is cut into pieces.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from itertools import groupby

import msgspec

from workers.wire.protocol import TokenLogprobs


class Text(msgspec.Struct, frozen=True):
    """A piece of the answer itself."""

    text: str
    scored: list[TokenLogprobs] = []
    """Its tokens with their log-probabilities, where they are asked for by piece."""


class Reasoning(msgspec.Struct, frozen=True):
    """A piece of what the model writes before its answer."""

    text: str


class ToolCall(msgspec.Struct, frozen=True):
    """A piece of a call of a tool."""

    index: int
    """Number of the call within the answer, from 0."""
    name: str
    """Name of the tool, in the first piece; empty in those after it."""
    arguments: str
    """The next characters of its arguments, a JSON object."""


Part = Text | Reasoning | ToolCall


class Parser(ABC):
    """Turns the text of one answer into parts."""

    @abstractmethod
    def push(self, text: str) -> list[Part]:
        """The parts that are certain once `text` is added. Of the answer's own text it holds back
        no more than the longest marker of its format, with some white space before it."""

    @abstractmethod
    def finish(self, rest: str = "", *, is_cut: bool = False) -> list[Part]:
        """Returns the parts that were held back when the answer ends. Called once, after every
        `push`. `rest`: the last characters, which are of tokens that were pushed before.
        `is_cut`: the length ended the answer, so that what may be the beginning of a marker or of
        a call is one, and no text."""

    @property
    def is_over(self) -> bool:
        """Whether what comes would add no more parts."""
        return False

    @property
    def needs_each_token(self) -> bool:
        """Whether the next `push` must be the text of a single token, because the answer may end
        there or the token may be one of a thought."""
        return False

    @property
    def num_thought_tokens(self) -> int:
        """Number of tokens so far that spell the thought, without the markers around it."""
        return 0


class IdentityParser(Parser):
    """All text is the answer itself."""

    def push(self, text: str) -> list[Part]:
        return [Text(text)] if text else []

    def finish(self, rest: str = "", *, is_cut: bool = False) -> list[Part]:
        return self.push(rest)


class SingleCallParser(Parser):
    """Takes the parts of another parser up to its second call."""

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
    """Takes only the calls of another parser, for an answer that a grammar holds to calls: any text
    in it is the beginning of a call that was cut off."""

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
    """Returns what is equal for pieces of one part: its kind and, of a tool call, its number."""
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
