"""Limits of schemas and grammars that are checked before they are compiled. A compiler follows
references and brackets by recursion, and an expression may cost the square of its length."""

from __future__ import annotations

from typing import Any

from gateway.exceptions import InvalidRequest
from gateway.text.lark_rules import LarkRules
from gateway.text.schema_graph import SchemaGraph

MAX_PATH = 128
"""Lists, objects and references on a path through a schema, or rules and brackets on one through a
grammar."""
MAX_EXPRESSION_BYTES = 16 << 10
MAX_PATTERN_BYTES = 4 << 10
"""Bytes of an expression in a schema. They are fewer because the compiler leaves such an expression
to the token of the answer that needs it."""


def check_expression(expression: str, *, param: str) -> None:
    """Checks a regular expression. Raises InvalidRequest."""
    _check_length("An expression", expression, MAX_EXPRESSION_BYTES, param)


def check_schema(schema: Any, *, param: str) -> None:
    """Checks a JSON Schema. Raises InvalidRequest."""
    _check_graph(SchemaGraph(schema), param)


def check_lark(grammar: str, *, param: str) -> None:
    """Checks a grammar in Lark's syntax. Raises InvalidRequest."""
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
    if (length := schema.longest_path()) > MAX_PATH:
        raise InvalidRequest(
            f"A schema may have {MAX_PATH} lists, objects and references on one path; '{param}' "
            f"has {length}. Shorten its longest chain of '$ref'.",
            param=param,
        )


def _check_length(what: str, text: str, most: int, param: str) -> None:
    if (num_bytes := len(text.encode(errors="surrogatepass"))) > most:
        raise InvalidRequest(
            f"{what} may have {most} bytes; '{param}' has one of {num_bytes}.", param=param
        )
