"""Parsers written as readers: a generator reads characters and waits where it needs more of them.

So a parser says what comes after what, and cannot depend on how the text is cut into pieces.
"""

from __future__ import annotations

import re
from abc import abstractmethod
from collections.abc import Callable, Generator
from typing import TypeVar

from gateway.text.parsers.parser import Parser, Part, Text, ToolCall

T = TypeVar("T")
Reading = Generator[None, None, T]
"""Yields where it waits for more text, and returns what it has read."""

SPACE = " \t\r\n"
MAX_SPACE = 64
"""White space in a row, where a format allows some: a model may write it without end."""
MAX_TRIMMED = 8
"""White space that is taken off a text before a marker, and so is held back."""
MAX_NAME = 128
"""Characters of the name of a tool or of an argument."""


class Malformed(Exception):
    """What has been read is not of the format."""


class ReadingParser(Parser):
    """Its `read` goes on until the text ends."""

    def __init__(self) -> None:
        self._text = ""
        self._at = 0
        """What has come is read up to here."""
        self._is_ended = False
        self._is_cut = False
        """Whether the length ended the answer."""
        self._parts: list[Part] = []
        self._num_calls = 0
        self._follows_call = False
        """White space after a call belongs to no text."""
        self._is_lost = False
        """What follows a call that broke off belongs to no text either."""
        self._unsure: list[str] | None = None
        """What was read since it was unsure what it is; None: it is sure."""
        self._reading = self.read()
        self._is_begun = False

    def push(self, text: str) -> list[Part]:
        self._text = self._text[self._at :] + text
        self._at = 0
        next(self._reading, None)
        return self._taken()

    def finish(self, rest: str = "", *, is_cut: bool = False) -> list[Part]:
        self._text = self._text[self._at :] + rest
        self._at = 0
        self._is_ended = True
        self._is_cut = is_cut
        next(self._reading, None)
        return self._taken()

    @abstractmethod
    def read(self) -> Reading[None]:
        """Reads the whole answer and adds its parts."""

    def _taken(self) -> list[Part]:
        parts, self._parts = self._parts, []
        return parts

    # Characters

    def take(self, count: int) -> str:
        """The next characters, which have come."""
        text = self._text[self._at : self._at + count]
        self._at += count
        if self._unsure is not None:
            self._unsure.append(text)
        return text

    def peek(self) -> Reading[str]:
        """The next character, which is not read yet; empty at the end."""
        while self._at == len(self._text):
            if self._is_ended:
                return ""
            yield
        return self._text[self._at]

    def skip_space(self) -> Reading[None]:
        """Raises Malformed if there is too much."""
        for _ in range(MAX_SPACE):
            character = yield from self.peek()
            if not character or character not in SPACE:
                return
            self.take(1)
        raise Malformed

    def skip(self, marker: str) -> Reading[bool]:
        """Whether the marker comes next; then it is read."""
        while len(self._text) - self._at < len(marker):
            if self._is_ended or not marker.startswith(self._text[self._at :]):
                return False
            yield
        if not self._text.startswith(marker, self._at):
            return False
        self.take(len(marker))
        return True

    def skip_end(self, marker: str) -> Reading[None]:
        """Reads the marker if it comes next, or as much of it as comes before the text ends."""
        if not (yield from self.skip(marker)) and self._is_ended:
            rest = self._text[self._at :]
            if marker.startswith(rest):
                self.take(len(rest))

    def expect(self, marker: str) -> Reading[None]:
        """Raises Malformed if the marker does not come next."""
        if not (yield from self.skip(marker)):
            raise Malformed

    def until(self, ends: re.Pattern[str], most: int = MAX_NAME) -> Reading[str]:
        """The text before the first character that matches, which is not read yet. Raises
        Malformed if it is longer than `most`, or the text ends."""
        while (found := ends.search(self._text, self._at)) is None:
            if self._is_ended or len(self._text) - self._at > most:
                raise Malformed
            yield
        if found.start() - self._at > most:
            raise Malformed
        return self.take(found.start() - self._at)

    def pieces_until(
        self,
        *markers: str,
        add: Callable[[str], None],
        trims: int = MAX_TRIMMED,
        must_end: bool = False,
    ) -> Reading[str]:
        """Adds the text before the first marker as it comes, without white space that stands before
        the marker, `trims` characters at most. Returns the marker, once it is read; empty at the
        end, where an answer that is cut leaves out the beginning of a marker. With `must_end`
        raises Malformed there."""
        pattern = re.compile("|".join(map(re.escape, markers)))
        while (found := pattern.search(self._text, self._at)) is None:
            if self._is_ended and not must_end:
                end = len(self._text)
                if self._is_cut:
                    end = _certain(self._text, self._at, markers, trims=0)
                add(self.take(end - self._at))
                self._at = len(self._text)
                return ""
            end = _certain(self._text, self._at, markers, trims)
            if end > self._at:
                add(self.take(end - self._at))
            if self._is_ended:
                raise Malformed
            yield
        text = self.take(found.start() - self._at)
        add(text[: len(text) - _num_spaces(text, trims)])
        return self.take(len(found[0]))

    # Parts

    def add_text(self, text: str) -> None:
        """Adds to the answer itself."""
        if self._is_lost:
            return
        if self._follows_call:
            text = text.lstrip(SPACE)
        if text:
            self._follows_call = False
            self._parts.append(Text(text))

    def begin_call(self, name: str) -> None:
        """Adds a call. From here on it is sure that this is one."""
        self._unsure = None
        self._is_begun = True
        self._is_lost = False
        self._parts.append(ToolCall(self._num_calls, whole_characters(name), ""))

    def add_arguments(self, text: str) -> None:
        if text:
            self._parts.append(ToolCall(self._num_calls, "", whole_characters(text)))

    def end_call(self) -> None:
        """What follows may be another call, or not."""
        self._unsure = []
        self._is_begun = False
        self._num_calls += 1
        self._follows_call = True

    def attempt(self, reading: Reading[None], before: str = "") -> Reading[None]:
        """Reads what may turn out not to be of the format. If it is not, what was read is text, and
        the marker `before` it too; a call that has begun breaks off. In an answer that is cut while
        this is open, it is no text."""
        self._unsure = [before]
        try:
            yield from reading
        except Malformed:
            if self._is_begun:
                self.end_call()
                self._is_lost = True
            elif self._is_cut:
                self._at = len(self._text)
            else:
                self.add_text("".join(self._unsure))
        finally:
            self._unsure = None

    def attempt_if(self, firsts: str, reading: Reading[None]) -> Reading[None]:
        """As `attempt`, of a text that begins with one of these characters, behind white space.
        Any other is read again, as something else."""
        yield from self.attempt(self._read_if(firsts, reading))

    def _read_if(self, firsts: str, reading: Reading[None]) -> Reading[None]:
        yield from self.skip_space()
        first = yield from self.peek()
        if first and first in firsts:
            yield from reading
            return
        self._text = "".join(self._unsure or ()) + self._text[self._at :]
        self._at = 0
        self._unsure = None


def whole_characters(text: str) -> str:
    """Joins the halves of characters that escapes of JSON or Python spell, and replaces a half that
    stands alone: no encoding has it."""
    if text.isascii():
        return text
    return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")


def _certain(text: str, start: int, markers: tuple[str, ...], trims: int) -> int:
    """Where that part of a text ends which stands before any marker, whatever comes."""
    end = len(text)
    for marker in markers:
        for length in range(min(len(marker) - 1, len(text) - start), 0, -1):
            if text.endswith(marker[:length]):
                end = min(end, len(text) - length)
                break
    return end - _num_spaces(text[max(start, end - trims) : end], trims)


def _num_spaces(text: str, most: int) -> int:
    """White space at the end of a text."""
    return min(len(text) - len(text.rstrip(SPACE)), most)
