"""Checks the limits of schemas and grammars before they are compiled, because the compiler follows
references and brackets recursively, and may take quadratic time for a regular expression."""

from __future__ import annotations

from typing import Any

from gateway.exceptions import InvalidRequest
from gateway.text.lark_rules import LarkRules
from gateway.text.schema_graph import SchemaGraph

MAX_PATH = 128
"""Maximum number of lists, objects and references on one path through a schema, and of rules and
brackets on one path through a grammar."""
MAX_EXPRESSION_BYTES = 16 << 10
MAX_PATTERN_BYTES = 4 << 10
"""Maximum bytes of a regular expression in a schema. It is smaller than `MAX_EXPRESSION_BYTES`,
because the compiler defers the work on such an expression to the first token that needs it."""


def check_expression(expression: str, *, param: str) -> None:
    """Raises InvalidRequest if a regular expression is too long."""
    _check_length("An expression", expression, MAX_EXPRESSION_BYTES, param)


def check_schema(schema: Any, *, param: str) -> None:
    """Raises InvalidRequest if a JSON Schema has patterns that are too long, or a path with too
    many parts."""
    _check_graph(SchemaGraph(schema), param)


def check_lark(grammar: str, *, param: str) -> None:
    """Raises InvalidRequest if a Lark grammar has a regular expression or a pattern of a schema
    that is too long, or a path with too many parts."""
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
