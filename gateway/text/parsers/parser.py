"""The stage between an answer's text and its dialect: text becomes parts.

A parser is made for each answer. It sees the text after stop strings were cut off, in pieces of any
length, and gives the same parts however the text is cut into pieces.
"""

from __future__ import annotations

from abc import ABC, abstractmethod

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
    def finish(self) -> list[Part]:
        """The parts that were held back when the answer ends. Called once, after every `push`."""

    @property
    def is_over(self) -> bool:
        """Whether what comes would add no more parts."""
        return False


class IdentityParser(Parser):
    """All text is the answer itself."""

    def push(self, text: str) -> list[Part]:
        return [Text(text)] if text else []

    def finish(self) -> list[Part]:
        return []


class SingleCallParser(Parser):
    """Takes the parts of another parser up to its second call."""

    def __init__(self, parser: Parser) -> None:
        self._parser = parser
        self._is_over = False

    @property
    def is_over(self) -> bool:
        return self._is_over

    def push(self, text: str) -> list[Part]:
        return [] if self._is_over else self._up_to_second_call(self._parser.push(text))

    def finish(self) -> list[Part]:
        return [] if self._is_over else self._up_to_second_call(self._parser.finish())

    def _up_to_second_call(self, parts: list[Part]) -> list[Part]:
        for number, part in enumerate(parts):
            if isinstance(part, ToolCall) and part.index > 0:
                self._is_over = True
                return parts[:number]
        return parts
