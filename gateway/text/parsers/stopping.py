"""Searches for stop strings in the text of an answer, but not in its thoughts and calls."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from gateway.text.parsers.parser import Parser, Part, Text


class StopStrings:
    """Knuth-Morris-Pratt search for several patterns at once, in time linear in the text.

    If there are several matches, the one that ends first is used. If several end at the same
    character, the longest of these is used. So the result does not depend on where the text is cut
    into pieces. Once `matched` is set, no more text may be pushed.
    """

    def __init__(self, stops: list[str]) -> None:
        self.matched: str | None = None
        self._stops = sorted(stops, key=len, reverse=True)
        self._failures = [failure_function(stop) for stop in self._stops]
        self._states = [0] * len(stops)
        self._held = ""

    def push(self, text: str) -> str:
        """Adds the next piece of text, and returns the text that can be shown. Holds back text at
        the end that may be the beginning of a stop string. If a stop string is found, returns the
        text before it."""
        start = len(self._held)
        text = self._held + text
        for position in range(start, len(text)):
            self._advance(text[position])
            if self.matched is not None:
                self._held = ""
                return text[: position + 1 - len(self.matched)]
        num_held = max(self._states, default=0)
        self._held = text[len(text) - num_held :]
        return text[: len(text) - num_held]

    def flush(self) -> str:
        """Ends the text, and returns the text that was held back. Text that is pushed afterwards is
        searched separately."""
        held, self._held = self._held, ""
        self._states = [0] * len(self._stops)
        return held

    def _advance(self, character: str) -> None:
        for i, (stop, failure) in enumerate(zip(self._stops, self._failures, strict=True)):
            state = self._states[i]
            while state and stop[state] != character:
                state = failure[state - 1]
            if stop[state] == character:
                state += 1
            self._states[i] = state
            if state == len(stop):
                self.matched = stop
                return


def failure_function(pattern: Sequence[Any]) -> list[int]:
    """Returns, for each prefix of the pattern, the length of the prefix's longest proper suffix
    that is also a prefix of the pattern."""
    failure = [0] * len(pattern)
    length = 0
    for i in range(1, len(pattern)):
        while length and pattern[i] != pattern[length]:
            length = failure[length - 1]
        if pattern[i] == pattern[length]:
            length += 1
        failure[i] = length
    return failure


class StoppingParser(Parser):
    """Parser that returns the parts of another parser up to a stop string in the answer's text.

    Thoughts, calls and their markers are not searched. A stop string that is interrupted by a
    thought or a call is not found.
    """

    def __init__(self, parser: Parser, stops: list[str], *, shows_stop: bool) -> None:
        """`shows_stop` means that the text ends after the stop string instead of before it."""
        self.is_searching = True
        """Whether text that is pushed is searched for stop strings."""
        self._parser = parser
        self._search = StopStrings(stops)
        self._shows_stop = shows_stop

    @property
    def matched(self) -> str | None:
        """Stop string that ended the answer. None if none was found."""
        return self._search.matched

    @property
    def is_over(self) -> bool:
        return self.matched is not None or self._parser.is_over

    @property
    def needs_each_token(self) -> bool:
        return True

    @property
    def num_thought_tokens(self) -> int:
        return self._parser.num_thought_tokens

    def push(self, text: str) -> list[Part]:
        return self._up_to_stop(self._parser.push(text))

    def finish(self, rest: str = "", *, is_cut: bool = False) -> list[Part]:
        if self.matched is not None:
            return []
        parts = self._up_to_stop(self._parser.finish(rest, is_cut=is_cut))
        return parts if self.matched is not None else parts + self._held()

    def _up_to_stop(self, parts: list[Part]) -> list[Part]:
        if not self.is_searching:
            return parts
        shown: list[Part] = []
        for part in parts:
            if not isinstance(part, Text):
                shown += [*self._held(), part]
                continue
            text = self._search.push(part.text)
            if self.matched is not None and self._shows_stop:
                text += self.matched
            shown += [Text(text)] if text else []
            if self.matched is not None:
                break
        return shown

    def _held(self) -> list[Part]:
        """Returns the text that was held back because it might have become a stop string."""
        held = self._search.flush()
        return [Text(held)] if held else []
