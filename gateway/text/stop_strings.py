"""Finds the first stop string in a text that arrives in pieces."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


class StopStrings:
    """Knuth-Morris-Pratt search for several patterns at once, in time linear in the text.

    Of several matches, the one that ends first counts, and of matches that end at the same
    character, the longest. So the result does not depend on where the text is cut into pieces. Once
    `matched` is set, no more text may be pushed.
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
