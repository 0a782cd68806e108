"""Work that one rendering of a chat template may do, counted in steps.

A step is about a tenth of a microsecond: one node of the template's syntax tree, 16 characters that
are read or written, or one item of a list. Costs that can be known are counted before the work is
done, so no single operation exceeds what is left.
"""

from __future__ import annotations

import re
import string
from collections.abc import Iterator
from contextvars import ContextVar
from dataclasses import dataclass
from types import GeneratorType
from typing import Any

from jinja2.exceptions import SecurityError, TemplateRuntimeError

CHARS_PER_STEP = 16
SEARCHED_PER_STEP = 256
"""Characters of the text times characters of what is searched for; some searches compare each."""
SHORT = 128
"""Characters of a text that are covered by the step of the expression that handles it."""
BASE_STEPS = 1 << 19
STEPS_PER_MESSAGE = 2048
"""Several times what the longest published template takes for a message."""
STEPS_PER_CHAR = 1
"""16 passes over each character of the conversation."""
MAX_INTEGER = 1 << 63
"""Larger ones cost more than a step, and can be chosen so that their hashes collide."""
MAX_WIDTH = 4096
"""Characters that a number in a format, an indentation or a list of fillings may ask for."""
MAX_DIGITS = 9
EMPTY: dict[Any, Any] = {}
SIZED: Any = (list, tuple, dict, range)
SEQUENCES: Any = (list, tuple, range, type(EMPTY.keys()), type(EMPTY.values()), type(EMPTY.items()))
NUMBERS = re.compile(r"[0-9]+")
TAKEN_WIDTH = re.compile(r"%[-#0 +0-9.]*\*")
"""A width that is one of the values."""
MAX_NESTED_ITERATORS = 16
"""Lazy filters on lazy filters: each takes the interpreter's stack."""


class BudgetExceeded(Exception):
    """The template asks for more work than one rendering may do."""


@dataclass(slots=True)
class Budget:
    steps: int


_budget: ContextVar[Budget] = ContextVar("budget")


def steps_for(num_messages: int, num_chars: int) -> int:
    """Steps that rendering a conversation of this size may take."""
    return BASE_STEPS + STEPS_PER_MESSAGE * num_messages + STEPS_PER_CHAR * num_chars


class limited:
    """Renderings inside the `with` block share this many steps. A thread has its own."""

    __slots__ = ("_budget", "_token")

    def __init__(self, steps: int) -> None:
        self._budget = Budget(steps)

    def __enter__(self) -> Budget:
        self._token = _budget.set(self._budget)
        return self._budget

    def __exit__(self, *_: object) -> None:
        _budget.reset(self._token)


def spend(steps: int) -> bool:
    """True. Raises BudgetExceeded."""
    budget = _budget.get()
    budget.steps -= steps
    if budget.steps < 0:
        raise BudgetExceeded
    return True


def spend_chars(num_chars: int) -> None:
    if num_chars > SHORT:
        spend(num_chars // CHARS_PER_STEP)


def weighed(value: Any) -> Any:
    """The value, once what reading all of it costs is counted.

    Values that share parts may have far more leaves than the template has characters.
    """
    kind = type(value)  # pyright: ignore[reportUnknownVariableType]
    if kind is str:
        if len(value) > SHORT:
            spend(len(value) // CHARS_PER_STEP)
        return value
    if kind is int or kind is bool or value is None or kind is float:
        return value
    pending = [value]
    while pending:
        item = pending.pop()
        if isinstance(item, str):
            spend_chars(len(item))
        elif isinstance(item, dict):
            spend(2 * len(item) + 1)  # pyright: ignore[reportUnknownArgumentType]
            pending += item.keys()  # pyright: ignore[reportUnknownMemberType]
            pending += item.values()  # pyright: ignore[reportUnknownMemberType]
        elif isinstance(item, SEQUENCES):
            spend(len(item) + 1)  # pyright: ignore[reportUnknownArgumentType]
            pending += item  # pyright: ignore[reportUnknownArgumentType]
    return value


def text(value: Any) -> str:
    """As `str`."""
    if type(value) is str:
        if len(value) > SHORT:
            spend(len(value) // CHARS_PER_STEP)
        return value
    return str(weighed(value))


def joined(*values: Any) -> str:
    """The operator `~`."""
    return "".join([text(value) for value in values])


def add(first: Any, *rest: Any) -> Any:
    """`first + ...`, from the left."""
    for value in rest:
        first = first + value
        kind = type(first)  # pyright: ignore[reportUnknownVariableType]
        if kind is str:
            if len(first) > SHORT:
                spend(len(first) // CHARS_PER_STEP)
        elif kind is int:
            integer(first)
        elif kind is not float:
            spend_size(first)
    return first


def integer(value: Any) -> Any:
    """The value, unless it is an integer of more than 64 bits."""
    if isinstance(value, int) and not -MAX_INTEGER < value < MAX_INTEGER:
        raise TemplateRuntimeError("integers have at most 64 bits")
    return value


def spend_size(value: Any) -> Any:
    """The value, once what a copy of it costs is counted: its parts are shared."""
    if isinstance(value, str):
        spend_chars(len(value))
    elif isinstance(value, SIZED):
        spend(len(value) + 1)
    return value


def multiply(left: Any, right: Any) -> Any:
    """The operator `*`."""
    for value, count in ((left, right), (right, left)):
        if isinstance(count, int) and count > 0:
            if isinstance(value, str):
                spend_chars(len(value) * count)
            elif isinstance(value, (list, tuple)):
                spend(len(value) * count + 1)  # pyright: ignore[reportUnknownArgumentType]
    return integer(left * right)


def power(left: Any, right: Any) -> Any:
    """The operator `**`."""
    if isinstance(left, int) and isinstance(right, int) and abs(left) > 1:
        integer(MAX_INTEGER if right > 64 else 0)
    return integer(left**right)


def modulo(left: Any, right: Any) -> Any:
    """The operator `%`."""
    if isinstance(left, str):
        spend_percent(left, right)
    return left % right


def contains(item: Any, container: Any) -> bool:
    """The operator `in`."""
    if isinstance(container, str) and isinstance(item, str):
        spend_search(container, len(item))
    elif not isinstance(container, dict):
        weighed(container)
        weighed(item)
    else:
        weighed(item)
    return item in container


def key(value: Any) -> Any:
    """The value, unless its hash could be chosen to collide."""
    if isinstance(value, tuple):
        raise SecurityError("a tuple cannot be a key")
    return value


def spend_search(searched: str, num_chars: int) -> None:
    """Spends the steps of searching a text for another of so many characters."""
    if len(searched) > SHORT:
        spend(len(searched) // CHARS_PER_STEP + len(searched) * num_chars // SEARCHED_PER_STEP)


def spend_replace(value: str, old: str, new: str) -> None:
    spend_search(value, len(old))
    if len(new) > len(old):
        spend_chars(len(value) + value.count(old) * (len(new) - len(old)))


def spend_width(width: Any) -> None:
    if isinstance(width, int) and abs(width) > MAX_WIDTH:
        raise TemplateRuntimeError(f"a width is at most {MAX_WIDTH}")


def spend_percent(pattern: str, values: Any) -> None:
    """Counts `pattern % values`."""
    spend_chars(len(pattern))
    if TAKEN_WIDTH.search(pattern):
        raise TemplateRuntimeError("a width in a format is a number")
    _spend_widths(pattern)
    _spend_values(pattern.count("%"), values)


def spend_format(pattern: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Counts `pattern.format(*args, **kwargs)`."""
    spend_chars(len(pattern))
    num_fields = 0
    for _, name, spec, _ in string.Formatter().parse(pattern):
        if name is None:
            continue
        num_fields += 1
        if spec and "{" in spec:
            raise TemplateRuntimeError("a width in a format is a number")
        _spend_widths(spec or "")
    _spend_values(num_fields, (*args, *kwargs.values()))


def _spend_values(num_fields: int, values: Any) -> None:
    """Each field may show all of them."""
    budget = _budget.get()
    before = budget.steps
    weighed(values)
    spend(num_fields * (before - budget.steps + 1))


def _spend_widths(spec: str) -> None:
    for width in map(len, NUMBERS.findall(spec)):
        if width > MAX_DIGITS:
            raise TemplateRuntimeError(f"a width has at most {MAX_DIGITS} digits")
    spend_chars(sum(map(int, NUMBERS.findall(spec))))


ReversedList: Any = type(reversed([0]))


class CountedIterator:
    """What a lazy filter yields, a step for each item."""

    __slots__ = ("_iterator", "_steps", "depth")

    def __init__(self, iterator: Iterator[Any], steps: int, depth: int) -> None:
        if depth > MAX_NESTED_ITERATORS:
            raise TemplateRuntimeError("too many filters on one another")
        self._iterator = iterator
        self._steps = steps
        self.depth = depth

    def __iter__(self) -> CountedIterator:
        return self

    def __next__(self) -> Any:
        spend(self._steps)
        return next(self._iterator)


def counted(result: Any, source: Any) -> Any:
    """The result of a filter, with its size counted or, if it is lazy, each of its items."""
    if isinstance(result, (GeneratorType, ReversedList)):
        depth = source.depth if isinstance(source, CountedIterator) else 1
        return CountedIterator(result, 1, depth)  # pyright: ignore[reportUnknownArgumentType]
    return integer(spend_size(result))
