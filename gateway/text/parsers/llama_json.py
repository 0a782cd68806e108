"""Parses calls of Llama 3: the answer is `{"name": "...", "parameters": {...}}`, which may follow
the marker `<|python_tag|>`."""

from __future__ import annotations

from collections.abc import Set

from gateway.text.parsers.json_calls import JsonCallParser
from gateway.text.parsers.reading_parser import Reading

TAG = "<|python_tag|>"


class LlamaJsonParser(JsonCallParser):
    """Parser of Llama 3's calls. Treats JSON that does not begin as a call of a known tool as
    text."""

    def __init__(self, names: Set[str]) -> None:
        """`names` are the names of the tools that may be called."""
        super().__init__()
        self._names = names

    def read(self) -> Reading[None]:
        yield from self.attempt_if("{[", self.read_calls(self._names))
        while (yield from self.pieces_until(TAG, add=self.add_text)):
            yield from self.attempt(self.read_calls(self._names), TAG)
