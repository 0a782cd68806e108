"""Parses calls that are JSON objects, in the formats of several families of models.

Hermes, Qwen   `<tool_call>{"name": "...", "arguments": {...}}</tool_call>`. Also used for models
               whose template does not render tools (see `text/template_turns.py`). Such models may
               omit the tags.
Llama 3        The answer is `{"name": "...", "parameters": {...}}`, which may follow the marker
               `<|python_tag|>`.
Mistral        `[TOOL_CALLS][{"name": "...", "arguments": {...}}]`, and in newer models
               `[TOOL_CALLS]name[ARGS]{...}` for each call.
"""

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
"""Maximum characters of a key or name, including quotes and escapes."""
MARKS = re.compile(r'[\\"{}\[\]\x00-\x1f]')
END_OF_SCALAR = re.compile(r"[,}\]\s]")
HERMES_TAGS = HERMES_OPEN, HERMES_CLOSE = "<tool_call>", "</tool_call>"
LLAMA_TAG = "<|python_tag|>"
MISTRAL_OPEN, MISTRAL_CALL_ID, MISTRAL_ARGS = "[TOOL_CALLS]", "[CALL_ID]", "[ARGS]"
END_OF_MISTRAL_NAME = re.compile(r"[\[{]")


class JsonCallParser(ReadingParser):
    """Base class of parsers for formats whose calls are JSON objects, alone or in a list."""

    def read_calls(self, names: Set[str] | None = None) -> Reading[None]:
        """Reads consecutive calls. If `names` is given, each call must begin with one of these
        names, because other JSON may be the answer itself. Raises Malformed if the text is not a
        call."""
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
        """Escapes the text as in JSON, and adds it to the current string of the arguments."""
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
        """Ends a call. `captured` are arguments that preceded the name."""
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
        """Reads a JSON string. If `choices` is given, raises Malformed as soon as the string cannot
        become one of them."""
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
        """Reads a JSON value, and passes its text to `add` while it is read. `depth` is the number
        of the value's opening brackets that were read before. Raises Malformed if the text ends
        inside the value."""
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
    """Incremental reader of a JSON list, object or string."""

    def __init__(self, depth: int) -> None:
        self._depth = depth
        self._is_in_string = False
        self._is_escaped = False
        """Whether the next character is escaped."""

    def read(self, text: str, start: int) -> tuple[str, int | None]:
        """Reads `text[start:]`. Returns the part of it that belongs to the value, and the position
        after the value's end, or None if the value continues. In strings, escapes control
        characters, which models write although JSON forbids them."""
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
    """Returns whether a string that begins with `begun` may become one of the choices. If `begun`
    contains an escape, it may become any choice."""
    return "\\" in begun or any(choice.startswith(begun) for choice in choices)


def as_object(written: str) -> str:
    """Returns the arguments `written` as the JSON text of an object. Accepts an object, a string
    that contains an object, null, and an empty text. Raises Malformed for any other value."""
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


class HermesParser(JsonCallParser):
    """Parser of calls in tags. A tag contains one JSON object, several objects, or a list of
    objects."""

    def __init__(self, untagged: Set[str] = frozenset()) -> None:
        """`untagged` are the names of tools that may be called without a tag at the beginning of an
        answer."""
        super().__init__()
        self._untagged = untagged

    def read(self) -> Reading[None]:
        if self._untagged:
            yield from self.attempt_if("{[", self.read_calls(self._untagged))
        while (yield from self.pieces_until(HERMES_OPEN, add=self.add_text)):
            yield from self.attempt(self._read_tagged(), HERMES_OPEN)

    def _read_tagged(self) -> Reading[None]:
        yield from self.read_calls()
        yield from self.skip_space()
        yield from self.skip_end(HERMES_CLOSE)


class LlamaJsonParser(JsonCallParser):
    """Parser of Llama 3's calls. JSON that does not begin like a call of a known tool is treated as
    text."""

    def __init__(self, names: Set[str]) -> None:
        """`names` are the names of the tools that may be called."""
        super().__init__()
        self._names = names

    def read(self) -> Reading[None]:
        yield from self.attempt_if("{[", self.read_calls(self._names))
        while (yield from self.pieces_until(LLAMA_TAG, add=self.add_text)):
            yield from self.attempt(self.read_calls(self._names), LLAMA_TAG)


class MistralParser(JsonCallParser):
    def read(self) -> Reading[None]:
        while (yield from self.pieces_until(MISTRAL_OPEN, add=self.add_text)):
            yield from self.attempt(self._read_calls(), MISTRAL_OPEN)

    def _read_calls(self) -> Reading[None]:
        yield from self.skip_space()
        if (yield from self.peek()) in ("[", "{"):
            yield from self.read_calls()
            return
        name = (yield from self.until(END_OF_MISTRAL_NAME)).strip()
        if not name:
            raise Malformed
        if (yield from self.skip(MISTRAL_CALL_ID)):
            yield from self.until(END_OF_MISTRAL_NAME)
        yield from self.skip(MISTRAL_ARGS)
        yield from self.skip_space()
        if (yield from self.peek()) != "{":
            raise Malformed
        self.begin_call(name)
        yield from self.read_value(self.add_arguments)
        self.end_call()
