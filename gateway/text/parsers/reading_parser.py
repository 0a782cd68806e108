"""Base class of parsers that are written as generators. A generator yields whenever it needs more
text.

Such a parser reads the text from its beginning to its end, and cannot depend on where the text is
cut into pieces.
"""

from __future__ import annotations

import re
from abc import abstractmethod
from collections.abc import Callable, Generator
from typing import TypeVar

from gateway.text.parsers.parser import Parser, Part, Text, ToolCall

T = TypeVar("T")
Reading = Generator[None, None, T]
"""Generator that yields when it needs more text, and returns a value of type T that it has read."""

SPACE = " \t\r\n"
MAX_SPACE = 64
"""Maximum number of consecutive white space characters that are skipped, because a model may write
white space without end."""
MAX_TRIMMED = 8
"""Maximum number of white space characters that are removed before a marker, and that must be held
back until it is clear whether a marker follows."""
MAX_NAME = 128
"""Maximum number of characters in the name of a tool or an argument."""


class Malformed(Exception):
    """Error for text that does not match the format."""


class ReadingParser(Parser):
    """Base class of parsers whose generator `read` reads the text until it ends."""

    def __init__(self) -> None:
        self._text = ""
        self._at = 0
        """Position in `_text` up to which the text has been read."""
        self._is_ended = False
        self._is_cut = False
        """Whether the length limit ended the answer."""
        self._parts: list[Part] = []
        self._num_calls = 0
        self._follows_call = False
        """Whether white space is dropped because the text read last was a call."""
        self._is_lost = False
        """Whether text is dropped because it follows a malformed call of which parts were already
        returned."""
        self._unsure: list[str] | None = None
        """Text that the current attempt (see `attempt`) has read since the last call, and that
        becomes plain text if the attempt fails. None if there is no attempt, and during a call."""
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

    def take(self, count: int) -> str:
        """Reads and returns the next `count` characters, which must be available."""
        text = self._text[self._at : self._at + count]
        self._at += count
        if self._unsure is not None:
            self._unsure.append(text)
        return text

    def peek(self) -> Reading[str]:
        """Returns the next character without reading it, or an empty string at the end of the
        text."""
        while self._at == len(self._text):
            if self._is_ended:
                return ""
            yield
        return self._text[self._at]

    def skip_space(self) -> Reading[None]:
        """Reads white space. Raises Malformed if there are MAX_SPACE characters of it or more."""
        for _ in range(MAX_SPACE):
            character = yield from self.peek()
            if not character or character not in SPACE:
                return
            self.take(1)
        raise Malformed

    def skip(self, marker: str) -> Reading[bool]:
        """Reads the marker if it comes next, and returns whether it was read."""
        while len(self._text) - self._at < len(marker):
            if self._is_ended or not marker.startswith(self._text[self._at :]):
                return False
            yield
        if not self._text.startswith(marker, self._at):
            return False
        self.take(len(marker))
        return True

    def skip_end(self, marker: str) -> Reading[None]:
        """Reads the marker if it comes next. At the end of the text, also reads an incomplete
        marker."""
        if not (yield from self.skip(marker)) and self._is_ended:
            rest = self._text[self._at :]
            if marker.startswith(rest):
                self.take(len(rest))

    def expect(self, marker: str) -> Reading[None]:
        """Reads the marker. Raises Malformed if it does not come next."""
        if not (yield from self.skip(marker)):
            raise Malformed

    def until(self, ends: re.Pattern[str], most: int = MAX_NAME) -> Reading[str]:
        """Reads and returns the text before the next match of `ends`. Raises Malformed if that text
        is longer than `most` characters, or if there is no match."""
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
        """Reads up to and including the first of the markers, and returns the marker. Passes the
        text before the marker to `add` in pieces while it is read, but omits up to `trims` white
        space characters directly before the marker. If the text ends without a marker, returns an
        empty string, or raises Malformed if `must_end` is set. If the length limit ended the
        answer, omits text at its end that may be the beginning of a marker."""
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

    def add_text(self, text: str) -> None:
        """Adds text to the answer itself. Drops white space directly after a call, and all text
        after a malformed call."""
        if self._is_lost:
            return
        if self._follows_call:
            text = text.lstrip(SPACE)
        if text:
            self._follows_call = False
            self._parts.append(Text(text))

    def begin_call(self, name: str) -> None:
        """Begins a call. The text that the current attempt has read so far does not become plain
        text if the attempt fails later."""
        self._unsure = None
        self._is_begun = True
        self._is_lost = False
        self._parts.append(ToolCall(self._num_calls, whole_characters(name), ""))

    def add_arguments(self, text: str) -> None:
        if text:
            self._parts.append(ToolCall(self._num_calls, "", whole_characters(text)))

    def end_call(self) -> None:
        """Ends a call. Text that the current attempt reads after the call becomes plain text if the
        attempt fails later."""
        self._unsure = []
        self._is_begun = False
        self._num_calls += 1
        self._follows_call = True

    def attempt(self, reading: Reading[None], before: str = "") -> Reading[None]:
        """Runs `reading` on text that may turn out not to be a call. If `reading` raises Malformed
        inside a call, ends the call and drops the text that follows. If it raises Malformed outside
        a call, adds the text read since the last call as plain text, or drops it if the length
        limit ended the answer. `before` is the marker that was read before the attempt. It is
        added before this plain text if the attempt has read no call."""
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
        """Runs `reading` as an attempt if the next character after white space is one of `firsts`.
        Otherwise leaves the text, with the white space, to be read by the caller."""
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
    """Joins surrogate pairs, which can result from escapes in JSON or Python. Replaces lone
    surrogates, because they cannot be encoded as UTF-8."""
    if text.isascii():
        return text
    return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")


def _certain(text: str, start: int, markers: tuple[str, ...], trims: int) -> int:
    """Returns the position up to which `text` certainly contains no part of a marker, and no white
    space that is removed before a marker, whatever text follows. Searches from `start`."""
    end = len(text)
    for marker in markers:
        for length in range(min(len(marker) - 1, len(text) - start), 0, -1):
            if text.endswith(marker[:length]):
                end = min(end, len(text) - length)
                break
    return end - _num_spaces(text[max(start, end - trims) : end], trims)


def _num_spaces(text: str, most: int) -> int:
    """Returns the number of white space characters at the end of a text, but at most `most`."""
    return min(len(text) - len(text.rstrip(SPACE)), most)
