"""The stage between an answer's text and its dialect: text becomes parts.

A parser is made for each answer. It sees the text after stop strings were cut off, in pieces of any
length, and gives the same parts however the text is cut into pieces.
"""

from __future__ import annotations

from abc import ABC, abstractmethod

import msgspec


class Text(msgspec.Struct, frozen=True):
    """A piece of the answer itself."""

    text: str


class Reasoning(msgspec.Struct, frozen=True):
    """A piece of what the model writes before its answer."""

    text: str


class ToolCall(msgspec.Struct, frozen=True):
    """A piece of a call of a tool."""

    index: int
    """Of the call within the answer, from 0."""
    name: str
    """Of the tool, in the first piece; empty in those after it."""
    arguments: str
    """The next characters of its arguments, a JSON object."""


Part = Text | Reasoning | ToolCall


class Parser(ABC):
    """Turns the text of one answer into parts."""

    @abstractmethod
    def push(self, text: str) -> list[Part]:
        """The parts that are certain once `text` is added. Holds back no more text than the longest
        marker of its format."""

    @abstractmethod
    def finish(self) -> list[Part]:
        """The parts that were held back when the answer ends. Called once, after every `push`."""


class IdentityParser(Parser):
    """All text is the answer itself."""

    def push(self, text: str) -> list[Part]:
        return [Text(text)] if text else []

    def finish(self) -> list[Part]:
        return []
