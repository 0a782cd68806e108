"""Parses calls of Qwen 3 Coder: `<function=name><parameter=city>Bern</parameter></function>` inside
`<tool_call>`.

Each tag and each value is on a line of its own. If a schema constrains the arguments, they are a
JSON object instead.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence, Set

import msgspec

from gateway.request import Tool
from gateway.text.parsers.json_calls import HERMES_CLOSE, HERMES_OPEN, JsonCallParser
from gateway.text.parsers.pythonic import as_json
from gateway.text.parsers.reading_parser import Malformed, Reading
from gateway.text.parsers.schema_types import ALL, SchemaTypes

FUNCTION, END_OF_FUNCTION = "<function=", "</function>"
PARAMETER, END_OF_PARAMETER = "<parameter=", "</parameter>"
TEXT = frozenset(("string",))
END_OF_NAME = re.compile(r"[>\n]")


class QwenXmlParser(JsonCallParser):
    """Parser that converts the values of arguments to the types in the tool's schema. Returns a
    string while it is read, and any other value once it is complete."""

    def __init__(self, tools: Sequence[Tool]) -> None:
        super().__init__()
        self._schemas = {tool.name: tool.parameters for tool in tools}

    def read(self) -> Reading[None]:
        while marker := (yield from self.pieces_until(HERMES_OPEN, FUNCTION, add=self.add_text)):
            is_tagged = marker == HERMES_OPEN
            yield from self.attempt(self._read_calls(is_tagged=is_tagged), marker)

    def _read_calls(self, *, is_tagged: bool) -> Reading[None]:
        """Reads calls after the marker that begins them: `<tool_call>` if `is_tagged` is set,
        otherwise `<function=`."""
        if is_tagged:
            yield from self.skip_space()
            if (yield from self.peek()) in ("{", "["):
                yield from self.read_calls()
            else:
                yield from self.expect(FUNCTION)
                yield from self._read_call()
        else:
            yield from self._read_call()
        yield from self.skip_space()
        yield from self.skip_end(HERMES_CLOSE)

    def _read_call(self) -> Reading[None]:
        name = (yield from self.until(END_OF_NAME)).strip()
        yield from self.expect(">")
        self.begin_call(name)
        yield from self.skip_space()
        if (yield from self.peek()) == "{":
            yield from self.read_value(self.add_arguments)
            yield from self.skip_space()
            yield from self.expect(END_OF_FUNCTION)
            self.end_call()
            return
        separator = "{"
        schema = SchemaTypes(self._schemas.get(name, {}))
        while True:
            yield from self.skip_space()
            if not (yield from self.skip(PARAMETER)):
                break
            key = (yield from self.until(END_OF_NAME)).strip()
            yield from self.expect(">")
            self.add_arguments(f"{separator}{json.dumps(key, ensure_ascii=False)}: ")
            separator = ", "
            yield from self._read_argument(schema.of_property(key))
        if not ((yield from self.skip(END_OF_FUNCTION)) or (yield from self.skip(HERMES_CLOSE))):
            raise Malformed
        self.add_arguments("{}" if separator == "{" else "}")
        self.end_call()

    def _read_argument(self, types: Set[str]) -> Reading[None]:
        """Reads an argument whose schema allows `types`. It is a string if all types are
        allowed."""
        yield from self.skip("\n")
        if types in (TEXT, ALL):
            self.add_arguments('"')
            yield from self._read_value_text(self.add_string)
            self.add_arguments('"')
        else:
            pieces: list[str] = []
            yield from self._read_value_text(pieces.append)
            self.add_arguments(_as_json("".join(pieces), types))

    def _read_value_text(self, add: Callable[[str], None]) -> Reading[str]:
        return self.pieces_until(END_OF_PARAMETER, add=add, trims=1, must_end=True)


def _as_json(text: str, types: Set[str]) -> str:
    """Returns an argument as JSON. `types` are the JSON types that its schema allows. The text may
    be JSON or a Python literal, such as `True`. It becomes a string if it is neither, or if strings
    are allowed and its own type is not `null`, or not allowed."""
    written = text.strip()
    try:
        msgspec.json.decode(written)
    except (msgspec.DecodeError, RecursionError):
        written = as_json(written)
    if "string" not in types or (written == "null" and "null" in types):
        return written
    return json.dumps(text, ensure_ascii=False)
