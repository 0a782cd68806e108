"""Parses the thought that a model writes before its answer: `<think>...</think>`."""

from __future__ import annotations

from bisect import bisect_left

from gateway.request import Message
from gateway.text.parsers.parser import Parser, Part, Reasoning
from gateway.text.parsers.reading_parser import MAX_SPACE, SPACE, Reading, ReadingParser

MARKERS = OPEN, CLOSE = "<think>", "</think>"
COMPARED = 8
"""Number of characters at the end of a prompt that are compared with a thought."""


def is_in_thought(prompt: str) -> bool:
    """Returns whether a prompt ends with the opening marker of a thought."""
    return prompt.rstrip(SPACE).endswith(OPEN)


def ends_with(prompt: str, thought: str) -> bool:
    """Returns whether the last characters of a prompt are those of a thought, except for space."""
    return prompt.rstrip(SPACE).endswith(thought.rstrip(SPACE)[-COMPARED:])


def begun_thought(message: Message) -> str:
    """Returns the text of the thought that an answer which continues the message continues, too.
    Returns an empty text if the message does not end inside a thought."""
    if not message.content.strip():
        return message.reasoning
    _, marker, thought = message.content.rpartition(OPEN)
    return thought if marker and CLOSE not in thought else ""


class ThoughtParser(ReadingParser):
    """Parser of a thought at the beginning of the text. Passes the rest of the text to the parser
    `answer`."""

    def __init__(self, answer: Parser, *, is_begun: bool, is_continued: bool = False) -> None:
        """`is_begun` means that the prompt ends inside the thought, and `is_continued` that it has
        a part of the thought's text, so that a space at the beginning belongs to the thought."""
        super().__init__()
        self._answer = answer
        self._is_thinking = is_begun
        self._is_continued = is_continued
        self._num_taken = 0
        """Number of characters read so far."""
        self._tokens: ThoughtTokens | None = ThoughtTokens()
        """Counter of the thought's tokens. None if there is no thought, or once it has ended."""
        self._num_thought_tokens = 0
        """Number of tokens of the thought. Set when the thought has ended."""

    @property
    def is_over(self) -> bool:
        return self._answer.is_over

    @property
    def needs_each_token(self) -> bool:
        return self._tokens is not None or self._answer.needs_each_token

    @property
    def num_thought_tokens(self) -> int:
        if self._tokens is None:
            return self._num_thought_tokens
        return self._tokens.count(self._num_taken)

    def push(self, text: str) -> list[Part]:
        if self._tokens is not None:
            self._tokens.add(len(text))
        return super().push(text)

    def take(self, count: int) -> str:
        self._num_taken += count
        return super().take(count)

    def read(self) -> Reading[None]:
        before = ""
        if not self._is_thinking:
            before = yield from self._space()
            self._is_thinking = yield from self.skip(OPEN)
            if self._is_cut:
                yield from self.skip_end(OPEN)
        if self._is_thinking:
            assert self._tokens is not None
            self._tokens.begin = self._num_taken
            before = ""
            if not self._is_continued:
                yield from self._space()
            marker = yield from self.pieces_until(CLOSE, add=self._add_thought)
            self._num_thought_tokens = self._tokens.count(self._num_taken - len(marker))
            self._tokens = None
            yield from self._space()
        self._tokens = None
        self._parts += self._answer.push(before)
        while True:
            self._parts += self._answer.push(self.take(len(self._text) - self._at))
            if self._is_ended:
                self._parts += self._answer.finish(is_cut=self._is_cut)
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


class ThoughtTokens:
    """Counter of the tokens of a thought. Records at which position the text of each token
    begins."""

    def __init__(self) -> None:
        self.begin: int | None = None
        """Position of the first character of the thought. None until the thought begins."""
        self._starts: list[int] = []
        self._num_chars = 0

    def add(self, num_chars: int) -> None:
        """Adds a token whose text has `num_chars` characters. This is 0 for a token that ends
        inside a character."""
        self._starts.append(self._num_chars)
        self._num_chars += num_chars

    def count(self, end: int) -> int:
        """Returns the number of tokens whose text lies, at least in part, between the beginning of
        the thought and the position `end`."""
        if self.begin is None:
            return 0
        first = bisect_left(self._starts, self.begin)
        after = self._starts[first] if first < len(self._starts) else self._num_chars
        if first and after > self.begin:
            # The previous token also counts, because its text contains both the end of the opening
            # marker and the beginning of the thought.
            first -= 1
        return max(bisect_left(self._starts, end) - first, 0)
