"""Creates the sandboxed Jinja environment in which chat templates spend the steps of their budget.

A template may use only the functions, methods, filters and tests listed here.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable
from datetime import datetime
from types import BuiltinMethodType, MethodType
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.exceptions import SecurityError, TemplateRuntimeError
from jinja2.ext import Extension, loopcontrols
from jinja2.filters import FILTERS  # pyright: ignore[reportUnknownVariableType]
from jinja2.parser import Parser
from jinja2.runtime import BlockReference, Context, LoopContext, Macro, Undefined
from jinja2.sandbox import ImmutableSandboxedEnvironment, safe_range
from jinja2.utils import Cycler, Joiner

from gateway.text.template_budget import (
    CountedIterator,
    counted,
    key,
    multiply,
    spend,
    spend_chars,
    spend_format,
    spend_percent,
    spend_replace,
    spend_search,
    spend_size,
    spend_width,
    text,
    weighed,
)
from gateway.text.template_compiler import CountingCodeGenerator

MAX_ERROR_CHARS = 1000
MAX_PATTERN_CHARS = 256
MAX_INDENT = 16

# fmt: off
JINJA_FILTERS: Any = FILTERS  # pyright: ignore[reportUnknownVariableType]
CONTAINERS: Any = (dict, list, tuple)
STR_METHODS = frozenset((
    "capitalize", "casefold", "center", "count", "endswith", "expandtabs", "find", "index",
    "isalnum", "isalpha", "isascii", "isdecimal", "isdigit", "isidentifier", "islower",
    "isnumeric", "isprintable", "isspace", "istitle", "isupper", "join", "ljust", "lower",
    "lstrip", "partition", "removeprefix", "removesuffix", "replace", "rfind", "rindex",
    "rjust", "rpartition", "rsplit", "rstrip", "split", "splitlines", "startswith", "strip",
    "swapcase", "title", "upper", "zfill"
))
# fmt: on
METHODS: dict[type, frozenset[str]] = {
    dict: frozenset(("copy", "get", "items", "keys", "values")),
    list: frozenset(("copy", "count", "index")),
    tuple: frozenset(("count", "index")),
    int: frozenset(("bit_length", "is_integer")),
    float: frozenset(("is_integer",)),
}
DICT_ATTRIBUTES = frozenset(dir(dict))

# fmt: off
SHALLOW = frozenset((
    "attr", "batch", "count", "d", "default", "first", "items", "last", "length", "list", "map",
    "reject", "rejectattr", "select", "selectattr", "slice"
))
"""Names of filters that do not read the contents of the items that they filter."""
DEEP = frozenset((
    "abs", "capitalize", "center", "dictsort", "e", "escape", "float", "format", "groupby",
    "indent", "int", "join", "lower", "max", "min", "replace", "reverse", "round", "safe",
    "sort", "string", "sum", "title", "tojson", "trim", "truncate", "unique", "upper",
    "wordcount"
))
LAZY = frozenset(("batch", "map", "reject", "rejectattr", "select", "selectattr", "slice"))
CHEAP_TESTS = frozenset((
    "odd", "even", "divisibleby", "defined", "undefined", "none", "boolean", "false", "true",
    "integer", "float", "string", "mapping", "number", "sequence", "iterable", "callable",
    "sameas", "escaped"
))
# fmt: on


class Generation(Extension):
    """Extension for the block `{% generation %}`, which marks answers for training. Renders only
    the block's body."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class Namespace(jinja2.utils.Namespace):
    """Namespace that refuses names with a leading underscore. The sandbox already refuses such
    names on all other objects."""

    def __setitem__(self, name: str, value: Any) -> None:
        if name.startswith("_"):
            raise SecurityError(f"a namespace may not have {name!r}")
        super().__setitem__(name, value)

    def __repr__(self) -> str:
        return "<Namespace>"


def raise_exception(message: Any) -> None:
    raise jinja2.TemplateError(text(message)[:MAX_ERROR_CHARS])


def strftime_now(pattern: str) -> str:
    if len(pattern) > MAX_PATTERN_CHARS:
        raise TemplateRuntimeError(f"a pattern has at most {MAX_PATTERN_CHARS} characters")
    return datetime.now().strftime(pattern)


def tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Returns the value as JSON. Does not escape HTML, unlike Jinja's own filter, because chat
    templates expect unescaped text."""
    if indent is not None or separators is not None:
        if (indent or 0) > MAX_INDENT:
            raise TemplateRuntimeError(f"an indentation is at most {MAX_INDENT}")
        if any(len(each) > MAX_INDENT for each in separators or ()):
            raise TemplateRuntimeError(f"a separator has at most {MAX_INDENT} characters")
        _spend_indentation(value)
    options: dict[str, Any] = {"ensure_ascii": ensure_ascii, "sort_keys": sort_keys}
    return json.dumps(value, indent=indent, separators=separators, **options)


def _spend_indentation(value: Any) -> None:
    """Spends the steps for writing each part of the value on its own line, indented by its
    depth."""
    level: list[Any] = [value]
    depth = 0
    while level:
        depth += 1
        spend(len(level) * depth)
        containers: list[Any] = [each for each in level if isinstance(each, CONTAINERS)]
        level = []
        for each in containers:
            level += each.values() if type(each) is dict else each  # pyright: ignore[reportUnknownArgumentType]


def spend_method(owner: Any, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Spends the steps that `owner.name(*args, **kwargs)` takes, and returns the positional
    arguments with which the method must be called. Raises SecurityError if a template may not call
    the method."""
    if not isinstance(owner, str):
        kind = next((kind for kind in METHODS if isinstance(owner, kind)), None)
        if kind is None or name not in METHODS[kind]:
            raise SecurityError(f"a chat template may not call {type(owner).__name__}.{name}")
        if name == "copy":
            spend_size(owner)
        elif kind is not dict:
            weighed(owner)
        weighed(args)
        return args
    if name not in STR_METHODS:
        raise SecurityError(f"a chat template may not call str.{name}")
    if name == "replace" and len(args) > 1:
        spend_replace(owner, args[0], args[1])
    elif name == "join" and args:
        args = (_join(owner, args[0]), *args[1:])
    elif name in ("center", "expandtabs", "ljust", "rjust", "zfill"):
        for value in (*args, *kwargs.values()):
            spend_width(value)
            if isinstance(value, int):
                spend_chars(len(owner) + value * (owner.count("\t") + 1))
    else:
        num_chars = 0
        for value in (*args, *kwargs.values()):
            if isinstance(value, str):
                num_chars += len(value)
            elif isinstance(value, tuple):
                weighed(value)
        spend_search(owner, num_chars)
    return args


def _join(separator: Any, parts: Any) -> list[Any]:
    """Returns `parts` as a list, after spending the steps of joining them."""
    found = weighed(list(spend_size(parts)))
    spend_chars(len(text(separator)) * len(found))
    return found


class BudgetedEnvironment(ImmutableSandboxedEnvironment):
    """Jinja environment whose templates spend steps, and must be rendered inside
    `template_budget.limited`."""

    code_generator_class = CountingCodeGenerator

    def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
        """Returns whether the sandbox allows access to the attribute. Has a faster path for `loop`,
        which templates use for each message."""
        if type(obj) is LoopContext:
            return not attr.startswith("_")
        return super().is_safe_attribute(obj, attr, value)

    def getattr(self, obj: Any, attribute: str) -> Any:
        if type(obj) is dict and attribute not in DICT_ATTRIBUTES:
            try:
                return obj[attribute]  # pyright: ignore[reportUnknownVariableType]
            except KeyError:
                return self.undefined(obj=obj, name=attribute)
        return super().getattr(obj, attribute)

    def getitem(self, obj: Any, argument: Any) -> Any:
        if type(argument) is str and type(obj) is dict:
            try:
                return obj[argument]  # pyright: ignore[reportUnknownVariableType]
            except KeyError:
                return super().getitem(obj, argument)
        return super().getitem(obj, weighed(argument))

    def call(self, context: Context, obj: Any, /, *args: Any, **kwargs: Any) -> Any:
        kind = type(obj)  # pyright: ignore[reportUnknownVariableType]
        if kind in (Macro, BlockReference, LoopContext) or isinstance(obj, Undefined):
            return context.call(obj, *args, **kwargs)
        # Jinja adds `_loop_vars` and `_block_vars` for functions that take a context. The functions
        # that are allowed below take no context.
        kwargs.pop("_loop_vars", None)
        kwargs.pop("_block_vars", None)
        if kind is BuiltinMethodType or kind is MethodType:
            owner = obj.__self__
            if isinstance(owner, LoopContext | Cycler | Joiner):
                weighed(args)
            else:
                args = spend_method(owner, obj.__name__, args, kwargs)
            return spend_size(obj(*args, **kwargs))
        formatted: Any = getattr(obj, "__wrapped__", None)
        if isinstance(formatted, BuiltinMethodType | MethodType):
            # The sandbox wraps str.format and str.format_map. `__wrapped__` is the method itself.
            spend_format(str(formatted.__self__), args, kwargs)
        elif obj is dict:
            if args and not isinstance(args[0], dict):
                raise SecurityError("dict() takes a mapping")
            spend(sum(map(len, args)) + len(kwargs))
        elif obj not in (safe_range, raise_exception, strftime_now, Namespace, Cycler, Joiner):
            raise SecurityError("a chat template may not call this")
        return obj(*args, **kwargs)  # pyright: ignore[reportUnknownVariableType]


def _counting_filter(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """Returns a Jinja filter that calls `function` and spends the steps that the call takes. The
    first argument of `function` may be a context."""
    first = 1 if hasattr(function, "jinja_pass_arg") else 0
    is_deep = name in DEEP
    guard = GUARDS.get(name)

    @functools.wraps(function)
    def counting(*args: Any, **kwargs: Any) -> Any:
        value = args[first]
        if is_deep:
            if isinstance(value, CountedIterator):
                value = list(value)
                args = (*args[:first], value, *args[first + 1 :])
            weighed(value)
        others = args[first + 1 :]
        if others or kwargs:
            weighed(others)
            weighed(kwargs)
        if guard is not None:
            guard(value, others, kwargs)
        if name in LAZY and value:
            # Items that the filter does not yield also cost steps.
            steps = 4 + sum(len(each) for each in others if isinstance(each, str)) // 4
            depth = value.depth + 1 if isinstance(value, CountedIterator) else 1
            value = CountedIterator(iter(value), steps, depth)
            args = (*args[:first], value, *args[first + 1 :])
        return counted(function(*args, **kwargs), value)

    return counting


Guard = Callable[[Any, tuple[Any, ...], dict[str, Any]], None]


def _guard_widths(value: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    for each in (*args, *kwargs.values()):
        spend_width(each)
        if isinstance(each, str | int):
            width = len(each) if isinstance(each, str) else abs(each)
            num_lines = value.count("\n") + 1 if isinstance(value, str) else 1
            spend_chars(width * num_lines)


def _guard_format(value: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    spend_percent(text(value), kwargs or args)


def _guard_replace(value: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    old, new = (*args, *(kwargs.get(name, "") for name in ("old", "new")[len(args) :]))[:2]
    spend_replace(text(value), text(old), text(new))


def _guard_join(value: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    separator = args[0] if args else kwargs.get("d", "")
    multiply(text(separator), len(value) if hasattr(value, "__len__") else 1)


def _guard_sum(value: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    start = args[1] if len(args) > 1 else kwargs.get("start", 0)
    if not isinstance(start, int | float):
        raise TemplateRuntimeError("a sum is of numbers")


def _guard_keys(value: Any, _args: tuple[Any, ...], _kwargs: dict[str, Any]) -> None:
    for item in value:
        key(item)


def _guard_search(value: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    for each in (*args, *kwargs.values()):
        spend_search(text(value), len(text(each)))


def _guard_number(value: Any, _args: tuple[Any, ...], _kwargs: dict[str, Any]) -> None:
    if isinstance(value, str) and len(value) > MAX_PATTERN_CHARS:
        raise TemplateRuntimeError(f"a number has at most {MAX_PATTERN_CHARS} characters")


GUARDS: dict[str, Guard] = {
    "batch": _guard_widths,
    "center": _guard_widths,
    "float": _guard_number,
    "format": _guard_format,
    "indent": _guard_widths,
    "int": _guard_number,
    "join": _guard_join,
    "replace": _guard_replace,
    "round": _guard_widths,
    "slice": _guard_widths,
    "sum": _guard_sum,
    "trim": _guard_search,
    "unique": _guard_keys,
}


def _counting_test(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def counting(*args: Any) -> Any:
        for each in args:
            weighed(each)
        return function(*args)

    return counting


def _trim(value: Any, chars: str | None = None) -> str:
    if chars is None and type(value) is str:
        return text(value).strip()
    return _counting_trim(value, chars)


def _length(value: Any) -> int:
    return len(value)


def make_environment() -> BudgetedEnvironment:
    """Returns an environment that renders chat templates as `apply_chat_template` of transformers
    does."""
    environment: Any = BudgetedEnvironment(
        trim_blocks=True, lstrip_blocks=True, optimized=False, extensions=[loopcontrols, Generation]
    )
    filters: dict[str, Any] = {**JINJA_FILTERS, "tojson": tojson}
    environment.filters = {
        name: _counting_filter(name, filters[name]) for name in SHALLOW | DEEP
    } | {"trim": _trim, "length": _length, "count": _length}
    environment.tests = {
        name: test if name in CHEAP_TESTS else _counting_test(test)
        for name, test in environment.tests.items()
        if name not in ("filter", "test")
    } | {"in": _counting_test(environment.tests["in"])}
    environment.globals = {
        "range": safe_range,
        "dict": dict,
        "cycler": Cycler,
        "joiner": Joiner,
        "namespace": Namespace,
        "raise_exception": raise_exception,
        "strftime_now": strftime_now,
    }
    return environment


_counting_trim = _counting_filter("trim", JINJA_FILTERS["trim"])
