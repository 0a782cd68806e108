"""Searches for stop strings in the text of an answer, but not in its thoughts and calls."""

from __future__ import annotations

from gateway.text.parsers.parser import Parser, Part, Text
from gateway.text.stop_strings import StopStrings


class StoppingParser(Parser):
    """Parser that returns the parts of another parser up to a stop string in the answer's text.

    Thoughts, calls and their markers are not searched. A stop string is not found if one of them
    interrupts it.
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
