"""Checks the limits of schemas and grammars before they are compiled, because the compiler follows
references and brackets recursively, and may take quadratic time for a regular expression."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar, cast
from urllib.parse import unquote

from gateway.exceptions import InvalidRequest

K = TypeVar("K", int, str)
Container = dict[str, Any] | list[Any]
TOKEN = re.compile(
    r"""
    (?://|\#)[^\n]*
    | "(?:\\.|[^"\\\n])*"?
    | (?P<expression> /(?:\\.|[^/\\\n])*/? )
    | (?P<json> %json\b\s* )
    | (?P<name> [A-Za-z_]\w* )
    | (?P<mark> [()\[\]{}:] )
    """,
    re.VERBOSE,
)
"""Matches the next token. A string or expression that is not closed ends at the end of its line, so
that no text is scanned twice."""
DECODER = json.JSONDecoder()
MAX_PATH = 128
"""Maximum number of lists, objects and references on one path through a schema, and of rules and
brackets on one path through a grammar."""
MAX_EXPRESSION_BYTES = 16 << 10
MAX_PATTERN_BYTES = 4 << 10
"""Maximum bytes of a regular expression in a schema. It is smaller than `MAX_EXPRESSION_BYTES`,
because the compiler postpones the work on an expression of a schema until the first generated token
that needs it."""


@dataclass(slots=True)
class _Step(Generic[K]):
    key: K
    followers: Iterator[K]
    longest: int = 0
    """Largest weight of a path that begins at one of the node's followers visited so far."""


def longest_path(
    begins: Iterable[K], followers: Callable[[K], Iterable[K]], weight: Callable[[K], int]
) -> int:
    """Returns the largest sum of weights on a path from one of `begins`. Ignores edges that close a
    cycle. Processes each node only once, and so takes linear time."""
    lengths: dict[K, int] = {}
    """Weight of the longest path from each visited node. 0 for nodes on the current path."""
    for begin in begins:
        if begin in lengths:
            continue
        lengths[begin] = 0
        path = [_Step(begin, iter(followers(begin)))]
        while path:
            step = path[-1]
            key = next(step.followers, None)
            if key is None:
                path.pop()
                length = lengths[step.key] = weight(step.key) + step.longest
                if path:
                    path[-1].longest = max(path[-1].longest, length)
            elif key in lengths:
                step.longest = max(step.longest, lengths[key])
            else:
                lengths[key] = 0
                path.append(_Step(key, iter(followers(key))))
    return max(lengths.values(), default=0)


class SchemaGraph:
    """Graph of the lists and objects of one schema."""

    def __init__(self, schema: Any) -> None:
        self._root = schema
        self._containers = {id(container): container for container in _containers(schema)}
        self._names: dict[str, Any] = {}
        """Parts of the schema by their `$id`, or by their `$anchor` with a `#` before it."""
        self.patterns: list[str] = []
        for container in self._containers.values():
            if isinstance(container, dict):
                self._index(container)

    def longest_path(self) -> int:
        """Returns the number of lists, objects and references on the longest path."""
        return longest_path(self._containers, self._followers, lambda _: 1)

    def _index(self, part: dict[str, Any]) -> None:
        if isinstance(name := part.get("$id"), str):
            self._names[name] = part
        if isinstance(name := part.get("$anchor"), str):
            self._names[f"#{name}"] = part
        if isinstance(pattern := part.get("pattern"), str):
            self.patterns.append(pattern)
        if isinstance(patterns := part.get("patternProperties"), dict):
            self.patterns += cast("dict[str, Any]", patterns)

    def _followers(self, key: int) -> Iterator[int]:
        container = self._containers[key]
        if isinstance(container, list):
            values = container
        else:
            values = [*container.values(), self._target(container.get("$ref"))]
        return (id(value) for value in values if id(value) in self._containers)

    def _target(self, reference: Any) -> Any:
        """Returns the part of the schema that a `$ref` points to. Returns None if there is no such
        part."""
        if not isinstance(reference, str):
            return None
        base, _, fragment = reference.partition("#")
        if fragment and not fragment.startswith("/"):
            return self._names.get(f"#{fragment}")
        part = self._names.get(base) if base else self._root
        for name in unquote(fragment).split("/")[1:]:
            part = _child(part, name.replace("~1", "/").replace("~0", "~"))
        return part


def _child(part: Container | None, name: str) -> Any:
    if isinstance(part, dict):
        return part.get(name)
    if isinstance(part, list) and name.isdecimal() and len(name) < 9 and int(name) < len(part):
        return part[int(name)]
    return None


def _containers(value: Any) -> Iterator[Container]:
    """Yields all lists and objects in a JSON value, including the value itself."""
    waiting = [value]
    while waiting:
        found = waiting.pop()
        if isinstance(found, dict):
            part = cast("dict[str, Any]", found)
            waiting += part.values()
            yield part
        elif isinstance(found, list):
            items = cast("list[Any]", found)
            waiting += items
            yield items


@dataclass(slots=True)
class _Rule:
    names: list[str] = field(default_factory=list[str])
    """All names in the rule, including names that are not rules."""
    weight: int = 1
    """Largest depth of nested brackets, plus one. The lists, objects and references of embedded
    JSON Schemas also count."""


class LarkRules:
    """Rules of one grammar, with its regular expressions and JSON Schemas."""

    def __init__(self, grammar: str) -> None:
        self.expressions: list[str] = []
        self.schemas: list[SchemaGraph] = []
        self._rules: dict[str, _Rule] = {}
        self._read(grammar)

    def longest_path(self) -> int:
        """Returns the number of rules and nested brackets on the longest path of rules that refer
        to each other."""
        return longest_path(
            self._rules,
            lambda name: (other for other in self._rules[name].names if other in self._rules),
            lambda name: self._rules[name].weight,
        )

    def _read(self, grammar: str) -> None:
        rule, depth, at = _Rule(), 0, 0
        while (token := TOKEN.search(grammar, at)) is not None:
            at = token.end()
            match token.lastgroup, token[0]:
                case "expression", expression:
                    self.expressions.append(expression)
                case "json", _:
                    try:
                        schema, at = DECODER.raw_decode(grammar, at)
                    except (ValueError, RecursionError):
                        return  # The compiler refuses the invalid JSON later.
                    self.schemas.append(SchemaGraph(schema))
                    length = self.schemas[-1].longest_path()
                    rule.weight = max(rule.weight, 1 + depth + length)
                case "name", name:
                    rule.names.append(name)
                case "mark", ":" if not depth and rule.names:
                    # A name before a colon begins the next rule.
                    rule = self._rules.setdefault(rule.names.pop(), _Rule())
                case "mark", "(" | "[" | "{":
                    depth += 1
                    rule.weight = max(rule.weight, 1 + depth)
                case "mark", ")" | "]" | "}":
                    depth = max(0, depth - 1)
                case _:
                    pass


def check_expression(expression: str, *, param: str) -> None:
    """Raises InvalidRequest if a regular expression is too long."""
    _check_length("An expression", expression, MAX_EXPRESSION_BYTES, param)


def check_schema(schema: Any, *, param: str) -> None:
    """Raises InvalidRequest if a JSON Schema has patterns that are too long, or a path through too
    many lists, objects and references."""
    _check_graph(SchemaGraph(schema), param)


def check_lark(grammar: str, *, param: str) -> None:
    """Raises InvalidRequest if a Lark grammar has too long a regular expression or schema pattern,
    or a path through too many rules and brackets."""
    rules = LarkRules(grammar)
    for expression in rules.expressions:
        check_expression(expression, param=param)
    for schema in rules.schemas:
        _check_graph(schema, param)
    if (length := rules.longest_path()) > MAX_PATH:
        raise InvalidRequest(
            f"A grammar may have {MAX_PATH} rules and brackets on one path; '{param}' has {length}."
            " Shorten its longest chain of rules that name each other.",
            param=param,
        )


def _check_graph(schema: SchemaGraph, param: str) -> None:
    for pattern in schema.patterns:
        _check_length("A 'pattern' of a schema", pattern, MAX_PATTERN_BYTES, param)
    everything = "".join(schema.patterns)
    _check_length("All patterns of a schema together", everything, MAX_EXPRESSION_BYTES, param)
    if (length := schema.longest_path()) > MAX_PATH:
        raise InvalidRequest(
            f"A schema may have {MAX_PATH} lists, objects and references on one path; '{param}' "
            f"has {length}. Shorten its longest chain of '$ref'.",
            param=param,
        )


def _check_length(what: str, text: str, most: int, param: str) -> None:
    if (num_bytes := len(text.encode(errors="surrogatepass"))) > most:
        raise InvalidRequest(
            f"{what} may have {most} bytes; '{param}' has {num_bytes}.", param=param
        )
