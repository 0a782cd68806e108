"""Parses calls of Llama 3.2 and 4: `[name(city="Bern", days=3), other()]` or `[name(**{"city":
"Bern"})]`."""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Set
from typing import Any

from gateway.text.parsers.json_calls import JsonCallParser
from gateway.text.parsers.reading_parser import Malformed, Reading

OPEN, CLOSE = "<|python_start|>", "<|python_end|>"
NAME = re.compile(r"[A-Za-z_][\w.-]*")
END_OF_NAME = re.compile(r"[^\w.-]")
MAX_LITERAL = 1 << 16
"""Maximum characters of one argument."""
MARKS = re.compile(r"""[\\"'()\[\]{},]""")
CONSTANTS = {"true": True, "false": False, "null": None}


class PythonicParser(JsonCallParser):
    """Parser of calls in Python's syntax. A list that does not begin with a call is treated as
    text. Returns each keyword argument once it is complete."""

    def __init__(self, names: Set[str]) -> None:
        """`names` are the names of the tools that may be called."""
        super().__init__()
        self._names = names

    def read(self) -> Reading[None]:
        yield from self.attempt_if("[", self._read_calls())
        while (yield from self.pieces_until(OPEN, add=self.add_text)):
            yield from self.attempt(self._read_calls(), OPEN)

    def _read_calls(self) -> Reading[None]:
        yield from self.skip_space()
        yield from self.expect("[")
        while True:
            yield from self.skip_space()
            yield from self._read_call()
            yield from self.skip_space()
            if not (yield from self.skip(",")):
                break
        yield from self.expect("]")
        yield from self.skip_space()
        yield from self.skip_end(CLOSE)

    def _read_call(self) -> Reading[None]:
        name = yield from self.until(END_OF_NAME)
        if name not in self._names:
            raise Malformed
        yield from self.expect("(")
        self.begin_call(name)
        yield from self.skip_space()
        if (yield from self.skip("**")):
            if (yield from self.peek()) != "{":
                raise Malformed
            yield from self.read_value(self.add_arguments)
            yield from self.skip_space()
            yield from self.expect(")")
            self.end_call()
            return
        separator = "{"
        while True:
            yield from self.skip_space()
            if (yield from self.skip(")")):
                break
            key = yield from self.until(END_OF_NAME)
            yield from self.skip_space()
            yield from self.expect("=")
            literal = yield from self._read_literal()
            self.add_arguments(f"{separator}{json.dumps(key)}: {as_json(literal)}")
            separator = ", "
            yield from self.skip(",")
        self.add_arguments("{}" if separator == "{" else "}")
        self.end_call()

    def _read_literal(self) -> Reading[str]:
        """Reads and returns a literal, up to the comma or bracket that ends it."""
        literal, at = OpenLiteral(), self._at
        while (end := literal.find_end(self._text, at)) is None:
            if self._is_ended or len(self._text) - self._at > MAX_LITERAL:
                raise Malformed
            num_read = len(self._text) - self._at
            yield
            at = self._at + num_read
        if end - self._at > MAX_LITERAL:
            raise Malformed
        return self.take(end - self._at)


class OpenLiteral:
    """Incremental search for the end of the literal of a keyword argument."""

    def __init__(self) -> None:
        self._depth = 0
        self._quote = ""
        self._is_escaped = False

    def find_end(self, text: str, start: int) -> int | None:
        """Searches `text[start:]`, the part that was not searched before. Returns the position of
        the comma or bracket after the literal, or None if the literal continues."""
        if self._is_escaped and start < len(text):
            self._is_escaped = False
            start += 1
        at = start
        while (found := MARKS.search(text, at)) is not None:
            at = found.end()
            character = found[0]
            if character == "\\":
                self._is_escaped = at == len(text)
                at += 1
            elif self._quote:
                self._quote = "" if character == self._quote else self._quote
            elif character in "\"'":
                self._quote = character
            elif character in "([{":
                self._depth += 1
            elif self._depth == 0:
                return found.start()
            elif character != ",":
                self._depth -= 1
        return None


def as_json(literal: str) -> str:
    """Returns a Python literal or a JSON value as JSON. Returns any other text, such as a bare
    word, as a JSON string."""
    word = literal.strip()
    if word in CONSTANTS:
        return json.dumps(CONSTANTS[word])
    try:
        value: Any = ast.literal_eval(word)
        return json.dumps(value, ensure_ascii=False, allow_nan=False)
    except (ValueError, TypeError, SyntaxError, RecursionError, MemoryError):
        pass
    try:
        return json.dumps(json.loads(word), ensure_ascii=False, allow_nan=False)
    except (ValueError, RecursionError):
        return json.dumps(word, ensure_ascii=False)
