"""Parses calls of Hermes, Qwen 2.5 and Qwen 3: `<tool_call>{"name": "...", "arguments":
{...}}</tool_call>`.

Also used for models whose template does not render tools (see `text/plain_tools.py`). Such models
may omit the tags.
"""

from __future__ import annotations

from collections.abc import Set

from gateway.text.parsers.json_calls import JsonCallParser
from gateway.text.parsers.reading_parser import Reading

OPEN, CLOSE = "<tool_call>", "</tool_call>"


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
        while (yield from self.pieces_until(OPEN, add=self.add_text)):
            yield from self.attempt(self._read_tagged(), OPEN)

    def _read_tagged(self) -> Reading[None]:
        yield from self.read_calls()
        yield from self.skip_space()
        yield from self.skip_end(CLOSE)
