"""Limits the work that one rendering of a chat template may do. Work is counted in steps.

A step takes about 0.1 µs, and is the work for one node of the template's syntax tree, for 16
characters that are read or written, or for one item of a list. If the cost of an operation is known
before it runs, the operation's steps are spent first, so that no single operation can exceed the
remaining budget by much.
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
"""Number of pairs of characters whose comparison costs one step. Searching one text for another is
charged for all pairs of their characters, because some searches compare every pair."""
SHORT = 128
"""Maximum number of characters of a short text. An expression that reads or writes only short texts
costs no steps for their length."""
BASE_STEPS = 1 << 19
STEPS_PER_MESSAGE = 2048
"""Steps allowed for each message of a conversation. The longest published template needs only a
fraction of them for a message."""
STEPS_PER_CHAR = 1
"""Steps allowed for each character of a conversation, enough to read each character 16 times."""
MAX_INTEGER = 1 << 63
"""Bound of the absolute value of integers. Computing with larger integers costs more than a step,
and their hashes can be made to collide."""
MAX_WIDTH = 4096
"""Maximum value of integer arguments, such as widths, of methods and filters that pad, indent or
group."""
MAX_DIGITS = 9
EMPTY: dict[Any, Any] = {}
SIZED: Any = (list, tuple, dict, range)
SEQUENCES: Any = (list, tuple, range, type(EMPTY.keys()), type(EMPTY.values()), type(EMPTY.items()))
NUMBERS = re.compile(r"[0-9]+")
TAKEN_WIDTH = re.compile(r"%[-#0 +0-9.]*\*")
"""Matches a conversion of a % format whose width is `*`, that is, taken from the values."""
MAX_NESTED_ITERATORS = 16
"""Maximum depth of nested lazy filters. Each level uses the interpreter's stack."""


class BudgetExceeded(Exception):
    """Error for a rendering that needs more steps than its budget has left."""


@dataclass(slots=True)
class Budget:
    steps: int


_budget: ContextVar[Budget] = ContextVar("budget")


def steps_for(num_messages: int, num_chars: int) -> int:
    """Returns the number of steps that rendering a conversation of this size may take."""
    return BASE_STEPS + STEPS_PER_MESSAGE * num_messages + STEPS_PER_CHAR * num_chars


class limited:
    """Context manager that limits all renderings inside its block together to `steps` steps."""

    __slots__ = ("_budget", "_token")

    def __init__(self, steps: int) -> None:
        self._budget = Budget(steps)

    def __enter__(self) -> Budget:
        self._token = _budget.set(self._budget)
        return self._budget

    def __exit__(self, *_: object) -> None:
        _budget.reset(self._token)


def spend(steps: int) -> bool:
    """Spends steps and returns True. Raises BudgetExceeded if the budget has fewer steps left."""
    budget = _budget.get()
    budget.steps -= steps
    if budget.steps < 0:
        raise BudgetExceeded
    return True


def spend_chars(num_chars: int) -> None:
    if num_chars > SHORT:
        spend(num_chars // CHARS_PER_STEP)


def weighed(value: Any) -> Any:
    """Spends the steps that it takes to read the whole value, and returns the value.

    A part that occurs several times is charged each time, because a short template can build a
    value in which the same part occurs very often.
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
    """Returns `str(value)`, after spending the steps that this takes."""
    if type(value) is str:
        if len(value) > SHORT:
            spend(len(value) // CHARS_PER_STEP)
        return value
    return str(weighed(value))


def joined(*values: Any) -> str:
    """Returns the result of Jinja's operator `~`, after spending the steps that it takes."""
    return "".join([text(value) for value in values])


def add(first: Any, *rest: Any) -> Any:
    """Returns the sum of the values, added from the left. Spends the steps of each addition after
    it is done."""
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
    """Returns the value. Raises TemplateRuntimeError if it is an integer of more than 64 bits."""
    if isinstance(value, int) and not -MAX_INTEGER < value < MAX_INTEGER:
        raise TemplateRuntimeError("integers have at most 64 bits")
    return value


def spend_size(value: Any) -> Any:
    """Returns the value, after spending the steps that a shallow copy of it takes."""
    if isinstance(value, str):
        spend_chars(len(value))
    elif isinstance(value, SIZED):
        spend(len(value) + 1)
    return value


def multiply(left: Any, right: Any) -> Any:
    """Returns `left * right`, after spending the steps that this takes."""
    for value, count in ((left, right), (right, left)):
        if isinstance(count, int) and count > 0:
            if isinstance(value, str):
                spend_chars(len(value) * count)
            elif isinstance(value, (list, tuple)):
                spend(len(value) * count + 1)  # pyright: ignore[reportUnknownArgumentType]
    return integer(left * right)


def power(left: Any, right: Any) -> Any:
    """Returns `left ** right`. Raises TemplateRuntimeError if the result has more than 64 bits."""
    if isinstance(left, int) and isinstance(right, int) and abs(left) > 1:
        integer(MAX_INTEGER if right > 64 else 0)
    return integer(left**right)


def modulo(left: Any, right: Any) -> Any:
    """Returns `left % right`, after spending the steps that this takes."""
    if isinstance(left, str):
        spend_percent(left, right)
    return left % right


def contains(item: Any, container: Any) -> bool:
    """Returns `item in container`, after spending the steps that this takes."""
    if isinstance(container, str) and isinstance(item, str):
        spend_search(container, len(item))
    elif not isinstance(container, dict):
        weighed(container)
        weighed(item)
    else:
        weighed(item)
    return item in container


def key(value: Any) -> Any:
    """Returns the value, which is about to be hashed, for example as the key of a dict. Raises
    SecurityError for a tuple, because the hashes of tuples can be made to collide."""
    if isinstance(value, tuple):
        raise SecurityError("a tuple cannot be a key")
    return value


def spend_search(searched: str, num_chars: int) -> None:
    """Spends the steps for searching the text `searched` for a text of `num_chars` characters."""
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
    """Spends the steps that `pattern % values` takes."""
    spend_chars(len(pattern))
    if TAKEN_WIDTH.search(pattern):
        raise TemplateRuntimeError("a width in a format is a number")
    _spend_widths(pattern)
    _spend_values(pattern.count("%"), values)


def spend_format(pattern: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Spends the steps that `pattern.format(*args, **kwargs)` takes."""
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
    """Spends the steps of the worst case, in which each field of a format shows all values."""
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
    """Iterator over the items of a lazy filter. Spends `steps` steps for each item."""

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
    """Returns the result of a filter, after spending the steps for its size. If the result is lazy,
    returns an iterator that spends the steps item by item. `source` is the value that was
    filtered."""
    if isinstance(result, (GeneratorType, ReversedList)):
        depth = source.depth if isinstance(source, CountedIterator) else 1
        return CountedIterator(result, 1, depth)  # pyright: ignore[reportUnknownArgumentType]
    return integer(spend_size(result))
