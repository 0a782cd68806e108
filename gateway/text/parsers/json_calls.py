"""Calls written as JSON objects: `{"name": "...", "arguments": {...}}`."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Set
from typing import Any

from gateway.text.parsers.reading_parser import SPACE, Malformed, Reading, ReadingParser

NAMES = ("name", "function")
ARGUMENTS = ("arguments", "parameters")
STRING = re.compile(r'"(?:[^"\\]|\\.)*"', re.DOTALL)
MAX_STRING = 1024
"""Characters of a key, or of a name, as they are written."""
MARKS = re.compile(r'[\\"{}\[\]\x00-\x1f]')
END_OF_SCALAR = re.compile(r"[,}\]\s]")


class JsonCallParser(ReadingParser):
    """Reads such objects, one or a list of them."""

    def read_calls(self, names: Set[str] | None = None) -> Reading[None]:
        """Calls that follow each other. With `names` they stand where an answer may stand too: then
        a call begins with one of these names. Raises Malformed."""
        yield from self.skip_space()
        is_list = yield from self.skip("[")
        while True:
            yield from self.skip_space()
            yield from self._read_object(names)
            yield from self.skip_space()
            separator = yield from self.peek()
            if separator and separator in ",;":
                self.take(1)
            elif separator != "{":
                break
        if is_list:
            yield from self.expect("]")

    def add_string(self, text: str) -> None:
        """Adds to a string in the arguments."""
        self.add_arguments(json.dumps(text, ensure_ascii=False)[1:-1])

    def _read_object(self, names: Set[str] | None) -> Reading[None]:
        yield from self.expect("{")
        name, captured = "", ""
        while True:
            yield from self.skip_space()
            if (yield from self.skip("}")):
                break
            key = yield from self._read_string()
            yield from self.skip_space()
            yield from self.expect(":")
            yield from self.skip_space()
            if key in NAMES and not name and (yield from self.peek()) == '"':
                name = yield from self._read_string(names)
                if names is not None and name not in names:
                    raise Malformed
            elif key in ARGUMENTS and name:
                yield from self._read_arguments(name)
            elif key in ARGUMENTS and names is None:
                captured = yield from self._capture()
            elif names is None:
                yield from self._capture()
            elif key == "type":
                yield from self._read_string()
            else:
                raise Malformed
            yield from self.skip_space()
            yield from self.skip(",")
        self._end(name, captured)

    def _end(self, name: str, captured: str) -> None:
        """`captured`: arguments that came before the name."""
        if not self._is_begun:
            if not name:
                raise Malformed
            self.begin_call(name)
            self.add_arguments(as_object(captured))
        self.end_call()

    def _read_arguments(self, name: str) -> Reading[None]:
        if self._is_begun:
            raise Malformed
        if (yield from self.peek()) == "{":
            self.begin_call(name)
            yield from self.read_value(self.add_arguments)
        else:
            written = as_object((yield from self._capture()))
            self.begin_call(name)
            self.add_arguments(written)

    def _read_string(self, choices: Set[str] | None = None) -> Reading[str]:
        """Reads a string. Raises Malformed as soon as it is none of the `choices`, if there are
        any."""
        if (yield from self.peek()) != '"':
            raise Malformed
        while (found := STRING.match(self._text, self._at)) is None:
            if self._is_ended or len(self._text) - self._at >= MAX_STRING:
                raise Malformed
            if choices is not None and not _may_become(self._text[self._at + 1 :], choices):
                raise Malformed
            yield
        if len(found[0]) > MAX_STRING:
            raise Malformed
        try:
            return json.loads(self.take(len(found[0])), strict=False)
        except ValueError:
            raise Malformed from None

    def _capture(self) -> Reading[str]:
        pieces: list[str] = []
        yield from self.read_value(pieces.append)
        return "".join(pieces)

    def read_value(self, add: Callable[[str], None], depth: int = 0) -> Reading[None]:
        """Reads a JSON value and adds its text as it comes. `depth`: of brackets that were read
        before. Raises Malformed at the end of the text."""
        first = yield from self.peek()
        if not depth and first not in ("{", "[", '"'):
            add((yield from self.until(END_OF_SCALAR)))
            return
        value = OpenValue(depth)
        while True:
            written, end = value.read(self._text, self._at)
            self.take((end or len(self._text)) - self._at)
            add(written)
            if end:
                return
            if self._is_ended:
                raise Malformed
            yield


class OpenValue:
    """Reads a JSON list, object or string to its end, in text that comes in pieces."""

    def __init__(self, depth: int) -> None:
        self._depth = depth
        self._is_in_string = False
        self._is_escaped = False
        """The next character is, whatever it is."""

    def read(self, text: str, start: int) -> tuple[str, int | None]:
        """What `text[start:]` adds to the value, and the position behind its end; None: it goes on.
        Control characters in strings, which models write and JSON does not allow, are escaped."""
        written = ""
        at = start
        if self._is_escaped and start < len(text):
            self._is_escaped = False
            at += 1
        while (found := MARKS.search(text, at)) is not None:
            at = found.end()
            character = found[0]
            if character < " ":
                if self._is_in_string:
                    written += text[start : at - 1] + json.dumps(character)[1:-1]
                    start = at
            elif self._is_in_string:
                if character == "\\":
                    self._is_escaped = at == len(text)
                    at += 1
                elif character == '"':
                    self._is_in_string = False
            elif character == '"':
                self._is_in_string = True
            elif character in "{[":
                self._depth += 1
            elif character in "}]":
                self._depth -= 1
            if self._depth == 0 and not self._is_in_string:
                return written + text[start:at], at
        return written + text[start:], None


def _may_become(begun: str, choices: Set[str]) -> bool:
    """Returns whether a string that begins so may be one of the choices. Escapes may spell any."""
    return "\\" in begun or any(choice.startswith(begun) for choice in choices)


def as_object(written: str) -> str:
    """Arguments as an object: they may be missing, or an object written as a string. Raises
    Malformed."""
    try:
        value: Any = json.loads(written, strict=False) if written.strip(SPACE) else None
        if isinstance(value, str):
            value = json.loads(value, strict=False) if value.strip(SPACE) else None
        if value is None:
            return "{}"
        if isinstance(value, dict):
            return json.dumps(value, ensure_ascii=False)
    except (ValueError, RecursionError):
        pass
    raise Malformed
