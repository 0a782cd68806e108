"""Full matching of a stranger's regular expression in polynomial time. Torch-free.

Python's own matcher backtracks, so a short hostile pattern stalls the process. Here the parsed
pattern is walked with the *set* of positions it may have reached (Thompson's simulation), which
accepts the same strings as `re` for the constructs peft users write; others are refused by name.
"""

# The parse tree of `re` has no public types; everything untyped stays inside this file.
# pyright: basic

from __future__ import annotations

import re
from collections.abc import Callable
from re import _constants as c  # type: ignore[attr-defined]
from re import _parser  # type: ignore[attr-defined]
from typing import Any

from adapters.errors import AdapterRejected

MAX_PATTERN_LENGTH = 2048
MAX_WORK = 600_000
"""Positions visited over the life of one matcher, about half a second."""

CATEGORIES = {
    c.CATEGORY_DIGIT: str.isdecimal,
    c.CATEGORY_NOT_DIGIT: lambda ch: not ch.isdecimal(),
    c.CATEGORY_SPACE: str.isspace,
    c.CATEGORY_NOT_SPACE: lambda ch: not ch.isspace(),
    c.CATEGORY_WORD: lambda ch: ch.isalnum() or ch == "_",
    c.CATEGORY_NOT_WORD: lambda ch: not (ch.isalnum() or ch == "_"),
}

PLAIN = re.compile(r"[\w.^\\]*")
"""Patterns without a choice in them, which Python's own matcher takes in linear time."""

Positions = frozenset[int]
NOWHERE: Positions = frozenset()


class PatternMatcher:
    """Matches patterns against module names, within one work budget.

    All methods raise AdapterRejected(adapter.config.pattern*) for a pattern that is invalid,
    unsupported or too costly; `field` says where it came from.
    """

    def __init__(self, field: str) -> None:
        self._field = field
        self._work = 0
        self._parsed: dict[str, Any] = {}
        self._compiled: dict[str, re.Pattern[str]] = {}

    def fullmatch(self, pattern: str, text: str) -> bool:
        """Whether the pattern matches the whole text."""
        return len(text) in self._reach(pattern, text)

    def match(self, pattern: str, text: str) -> bool:
        """Whether the pattern matches a prefix of `text`."""
        return bool(self._reach(pattern, text))

    def ends_with(self, pattern: str, text: str) -> bool:
        """Whether the pattern matches whole dotted parts at the end of the text."""
        whole = rf"(.*\.)?({pattern})$"
        if not PLAIN.fullmatch(pattern):
            return bool(self._reach(whole, text))
        self._spend(4)
        if pattern not in self._compiled:
            self._compiled[pattern] = self._guard(pattern, lambda: re.compile(whole))
        return self._compiled[pattern].match(text) is not None

    def _reach(self, pattern: str, text: str) -> Positions:
        try:
            return self._ends(self._parse(pattern), text, frozenset({0}))
        except RecursionError:
            return self._refuse("adapter.config.pattern_too_complex", pattern)

    def _parse(self, pattern: str) -> Any:
        if pattern not in self._parsed:
            if len(pattern) > MAX_PATTERN_LENGTH:
                self._refuse("adapter.config.pattern_too_complex", pattern)
            tree = self._guard(pattern, lambda: _parser.parse(pattern))
            if tree.state.flags & ~re.UNICODE:
                self._refuse("adapter.config.pattern", pattern)
            self._parsed[pattern] = tree
        return self._parsed[pattern]

    def _guard(self, pattern: str, compile_: Callable[[], Any]) -> Any:
        try:
            return compile_()
        except (re.error, RecursionError, OverflowError) as error:
            return self._refuse("adapter.config.pattern", f"{pattern[:80]}: {error}")

    def _spend(self, work: int) -> None:
        self._work += work
        if self._work > MAX_WORK:
            self._refuse("adapter.config.pattern_too_complex", "too much work to match")

    def _refuse(self, code: str, got: object) -> Any:
        raise AdapterRejected(code, self._field, got)

    def _ends(self, sequence: Any, text: str, starts: Positions) -> Positions:
        for node, argument in sequence:
            self._spend(len(starts) + 1)
            starts = self._step(node, argument, text, starts)
            if not starts:
                return NOWHERE
        return starts

    def _step(self, node: Any, argument: Any, text: str, starts: Positions) -> Positions:
        match node:
            case c.LITERAL | c.NOT_LITERAL | c.ANY | c.IN:
                accepted = (i for i in starts if i < len(text))
                return frozenset(i + 1 for i in accepted if _accepts(node, argument, text[i]))
            case c.SUBPATTERN if not (argument[1] or argument[2]):
                return self._ends(argument[3], text, starts)
            case c.BRANCH:
                return NOWHERE.union(*(self._ends(arm, text, starts) for arm in argument[1]))
            case c.MAX_REPEAT | c.MIN_REPEAT:
                return self._repeat(argument, text, starts)
            case c.AT:
                return frozenset(i for i in starts if self._is_at(argument, text, i))
            case c.ASSERT | c.ASSERT_NOT if argument[0] == 1:
                wanted = node is c.ASSERT
                return frozenset(
                    i
                    for i in starts
                    if bool(self._ends(argument[1], text, frozenset({i}))) is wanted
                )
            case _:
                return self._refuse("adapter.config.pattern", f"unsupported: {node}")

    def _repeat(self, argument: Any, text: str, starts: Positions) -> Positions:
        least, most, body = argument
        # More rounds than characters add nothing: a round that consumes none reaches nothing new.
        for _ in range(min(least, len(text) + 1)):
            starts = self._ends(body, text, starts)
        reached = frontier = starts
        for _ in range(min(most - least, len(text))):
            frontier = self._ends(body, text, frontier) - reached
            if not frontier:
                break
            reached |= frontier
        return reached

    def _is_at(self, place: Any, text: str, i: int) -> bool:
        match place:
            case c.AT_BEGINNING | c.AT_BEGINNING_STRING:
                return i == 0
            case c.AT_END | c.AT_END_STRING:
                return i == len(text)
            case c.AT_BOUNDARY | c.AT_NON_BOUNDARY:
                word = CATEGORIES[c.CATEGORY_WORD]
                before, after = i > 0 and word(text[i - 1]), i < len(text) and word(text[i])
                return (before != after) is (place is c.AT_BOUNDARY)
            case _:
                return self._refuse("adapter.config.pattern", f"unsupported: {place}")


def _accepts(node: Any, argument: Any, ch: str) -> bool:
    match node:
        case c.LITERAL:
            return ord(ch) == argument
        case c.NOT_LITERAL:
            return ord(ch) != argument
        case c.ANY:
            return ch != "\n"
        case c.CATEGORY:
            return CATEGORIES[argument](ch)
        case c.RANGE:
            return argument[0] <= ord(ch) <= argument[1]
        case _:
            negated = argument[0][0] is c.NEGATE
            return negated != any(_accepts(kind, value, ch) for kind, value in argument[negated:])
