"""Finds the first stop string in a text that comes in pieces; holds back what may become one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


class StopStrings:
    """Knuth-Morris-Pratt over several patterns at once; the cost is linear in the text.

    The match that ends first wins, of those that end together the longest; so the outcome does not
    depend on how the text is cut into pieces. `matched` is the stop string found; nothing may be
    pushed after it.
    """

    def __init__(self, stops: list[str]) -> None:
        self.matched: str | None = None
        self._stops = sorted(stops, key=len, reverse=True)
        self._failures = [failure_function(stop) for stop in self._stops]
        self._states = [0] * len(stops)
        self._held = ""

    def push(self, text: str) -> str:
        """Takes the next piece and returns what can be shown; after a match, the text before it."""
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
        """Returns what was held back and did not become a stop string, because the text ends here.
        A text that is pushed afterwards is another one."""
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
    """For each prefix, the length of its longest proper suffix that is a prefix of the pattern."""
    failure = [0] * len(pattern)
    length = 0
    for i in range(1, len(pattern)):
        while length and pattern[i] != pattern[length]:
            length = failure[length - 1]
        if pattern[i] == pattern[length]:
            length += 1
        failure[i] = length
    return failure
