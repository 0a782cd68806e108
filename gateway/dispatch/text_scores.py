"""Assigns log-probabilities to the pieces of an answer's text."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from itertools import accumulate

import msgspec

from gateway.text.detokenizer import TokenBytes
from gateway.text.parsers.parser import Part, Text
from workers.wire.protocol import TokenLogprobs


class TextScores:
    """Log-probabilities of one answer's text, without tokens of thoughts, calls and their markers.

    Tokens are matched to the text by their bytes. If the tokens do not spell the text, because a
    special token is omitted from it, the text gets all tokens since the previous piece.
    """

    def __init__(self, spelled: TokenBytes) -> None:
        """`spelled` maps token ids to bytes."""
        self._spelled = spelled
        self._open: list[TokenLogprobs] = []
        """Tokens that are not assigned to a piece yet."""

    def told(self, parts: Sequence[Part], scored: Sequence[TokenLogprobs]) -> list[Part]:
        """Returns the parts of a step, each text with the log-probabilities of its tokens. `scored`
        are the step's tokens."""
        self._open += scored
        told: list[Part] = []
        for part in parts:
            if isinstance(part, Text) and part.text:
                part = msgspec.structs.replace(part, scored=self._take(part.text.encode()))
            told.append(part)
        if told and not isinstance(told[-1], Text):
            self._open.clear()
        return told

    def _take(self, text: bytes) -> list[TokenLogprobs]:
        spelled = [self._spelled[entry.token] for entry in self._open]
        begin = b"".join(spelled).rfind(text)
        if begin < 0:
            taken, self._open = self._open, []
            return taken
        ends = list(accumulate(map(len, spelled)))
        first = bisect_right(ends, begin)
        after = bisect_left(ends, begin + len(text)) + 1
        taken, self._open = self._open[first:after], self._open[after:]
        return taken
