"""Parses Gemma's calls:
`<start_function_call>call:name{city:<escape>Bern<escape>}<end_function_call>`."""

from __future__ import annotations

import json
import re
from typing import NamedTuple

import msgspec

from gateway.text.parsers.json_calls import JsonCallParser
from gateway.text.parsers.reading_parser import Malformed, Reading

MAX_DEPTH = 64
END_OF_NAME = re.compile(r"[^\w.-]")
END_OF_KEY = re.compile(r":")
END_OF_SCALAR = re.compile(r"[,}\]]")
MAX_SCALAR = 1024


class GemmaMarkers(NamedTuple):
    """Markers that begin and end a call, and the quote around each string in it."""

    begin: str
    end: str
    quote: str


FUNCTION_GEMMA = GemmaMarkers("<start_function_call>", "<end_function_call>", "<escape>")
GEMMA_4 = GemmaMarkers("<|tool_call>", "<tool_call|>", '<|"|>')


class GemmaParser(JsonCallParser):
    """Parser of Gemma's calls, whose arguments are JSON or an object with unquoted keys and
    scalars. Returns the arguments piece by piece while they are read."""

    def __init__(self, markers: GemmaMarkers) -> None:
        super().__init__()
        self._markers = markers

    def read(self) -> Reading[None]:
        begin = self._markers.begin
        while (yield from self.pieces_until(begin, add=self.add_text)):
            yield from self.attempt(self._read_call(), begin)

    def _read_call(self) -> Reading[None]:
        yield from self.skip_space()
        yield from self.expect("call:")
        name = yield from self.until(END_OF_NAME)
        if not name or (yield from self.peek()) != "{":
            raise Malformed
        self.begin_call(name)
        self.add_arguments(self.take(1))
        yield from self.skip_space()
        if (yield from self.peek()) == '"':
            yield from self.read_value(self.add_arguments, depth=1)
        else:
            yield from self._read_items("{", "}", 0)
        yield from self.skip_space()
        yield from self.skip_end(self._markers.end)
        self.end_call()

    def _read_value(self, depth: int) -> Reading[None]:
        if depth > MAX_DEPTH:
            raise Malformed
        yield from self.skip_space()
        if (yield from self.skip(self._markers.quote)):
            self.add_arguments('"')
            yield from self.pieces_until(
                self._markers.quote, add=self.add_string, trims=0, must_end=True
            )
            self.add_arguments('"')
            return
        match (yield from self.peek()):
            case "{" | "[" as begin:
                self.add_arguments(self.take(1))
                yield from self._read_items(begin, "}" if begin == "{" else "]", depth)
            case _:
                self.add_arguments(_scalar((yield from self.until(END_OF_SCALAR, MAX_SCALAR))))

    def _read_items(self, begin: str, end: str, depth: int) -> Reading[None]:
        is_first = True
        while True:
            yield from self.skip_space()
            if (yield from self.skip(end)):
                break
            if not is_first:
                yield from self.expect(",")
                self.add_arguments(", ")
                yield from self.skip_space()
            is_first = False
            if begin == "{":
                yield from self._read_key()
            yield from self._read_value(depth + 1)
        self.add_arguments(end)

    def _read_key(self) -> Reading[None]:
        quote = self._markers.quote
        key = (yield from self.until(END_OF_KEY)).removeprefix(quote).removesuffix(quote)
        self.take(1)
        self.add_arguments(json.dumps(key.strip(), ensure_ascii=False) + ": ")


PYTHON_CONSTANTS: dict[str, bool | None] = {"": None, "None": None, "True": True, "False": False}


def _scalar(text: str) -> str:
    """Returns a number or constant as JSON, and any other text as a JSON string. Constants may be
    Python's."""
    word = text.strip()
    try:
        msgspec.json.decode(word)
    except (msgspec.DecodeError, RecursionError):
        return json.dumps(PYTHON_CONSTANTS.get(word, word), ensure_ascii=False)
    return word
