"""What a model writes before its answer: `<think>...</think>`."""

from __future__ import annotations

from gateway.text.parsers.parser import Parser, Reasoning
from gateway.text.parsers.reading_parser import MAX_SPACE, SPACE, Reading, ReadingParser

MARKERS = OPEN, CLOSE = "<think>", "</think>"


def is_in_thought(prompt: str) -> bool:
    """Whether a prompt ends with the beginning of a thought."""
    return prompt.rstrip(SPACE).endswith(OPEN)


class ThoughtParser(ReadingParser):
    """Takes the thought from the beginning, and leaves the rest to the answer's own parser."""

    def __init__(self, answer: Parser, *, is_begun: bool) -> None:
        """`is_begun`: the prompt ends inside the thought."""
        super().__init__()
        self._answer = answer
        self._is_thinking = is_begun

    @property
    def is_over(self) -> bool:
        return self._answer.is_over

    def read(self) -> Reading[None]:
        before = ""
        if not self._is_thinking:
            before = yield from self._space()
            self._is_thinking = yield from self.skip(OPEN)
        if self._is_thinking:
            before = ""
            yield from self._space()
            yield from self.pieces_until(CLOSE, add=self._add_thought)
            yield from self._space()
        self._parts += self._answer.push(before)
        while True:
            self._parts += self._answer.push(self.take(len(self._text) - self._at))
            if self._is_ended:
                self._parts += self._answer.finish()
                return
            yield

    def _space(self) -> Reading[str]:
        found = ""
        for _ in range(MAX_SPACE):
            character = yield from self.peek()
            if not character or character not in SPACE:
                break
            found += self.take(1)
        return found

    def _add_thought(self, text: str) -> None:
        if text:
            self._parts.append(Reasoning(text))
