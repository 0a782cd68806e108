"""Parses calls of Mistral's models: `[TOOL_CALLS][{"name": "...", "arguments": {...}}]`, and in
newer models `[TOOL_CALLS]name[ARGS]{...}` for each call."""

from __future__ import annotations

import re

from gateway.text.parsers.json_calls import JsonCallParser
from gateway.text.parsers.reading_parser import Malformed, Reading

OPEN, CALL_ID, ARGS = "[TOOL_CALLS]", "[CALL_ID]", "[ARGS]"
END_OF_NAME = re.compile(r"[\[{]")


class MistralParser(JsonCallParser):
    def read(self) -> Reading[None]:
        while (yield from self.pieces_until(OPEN, add=self.add_text)):
            yield from self.attempt(self._read_calls(), OPEN)

    def _read_calls(self) -> Reading[None]:
        yield from self.skip_space()
        if (yield from self.peek()) in ("[", "{"):
            yield from self.read_calls()
            return
        name = (yield from self.until(END_OF_NAME)).strip()
        if not name:
            raise Malformed
        if (yield from self.skip(CALL_ID)):
            yield from self.until(END_OF_NAME)
        yield from self.skip(ARGS)
        yield from self.skip_space()
        if (yield from self.peek()) != "{":
            raise Malformed
        self.begin_call(name)
        yield from self.read_value(self.add_arguments)
        self.end_call()
