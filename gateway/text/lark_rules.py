"""Parses a grammar in Lark's syntax far enough to find which rules refer to which other rules."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, field

from gateway.text.longest_path import longest_path
from gateway.text.schema_graph import SchemaGraph

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
"""Matches the next token. An unclosed quote or slash ends at the end of its line, so that no text
is scanned twice."""
DECODER = json.JSONDecoder()


@dataclass(slots=True)
class _Rule:
    names: list[str] = field(default_factory=list[str])
    """All names in the rule, including names that are not rules."""
    weight: int = 1
    """Largest depth of nested brackets, plus one. Brackets of embedded JSON Schemas count."""


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
                        return  # the compiler refuses the grammar
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
