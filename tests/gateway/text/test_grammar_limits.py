"""The longest path through schemas and grammars, and the limits that it is held to."""

from __future__ import annotations

import json
from typing import Any

import pytest

from gateway.exceptions import InvalidRequest
from gateway.text.grammar_limits import (
    MAX_EXPRESSION_BYTES,
    MAX_PATH,
    MAX_PATTERN_BYTES,
    LarkRules,
    SchemaGraph,
    check_expression,
    check_lark,
    check_schema,
)
from tests.hostile_grammars import DOUBLES, INTEGER, RULES, WRAPS, chain, nest, rules

INTEGERS: dict[str, Any] = {"type": "integer"}


@pytest.mark.parametrize(
    ("schema", "length"),
    [
        (True, 0),
        (INTEGERS, 1),
        ({"items": INTEGERS}, 2),
        ({"anyOf": [INTEGERS, {"items": INTEGERS}]}, 4),
        ({"$ref": "#/$defs/a", "$defs": {"a": {"items": INTEGERS}}}, 4),
        ({"items": {"$ref": "#/definitions/a~1b"}, "definitions": {"a/b": INTEGERS}}, 3),
        ({"items": {"$ref": "#/%24defs/x%20y"}, "$defs": {"x y": {"items": INTEGERS}}}, 4),
        ({"items": {"$ref": "#/anyOf/1"}, "anyOf": [INTEGERS, {"items": INTEGERS}]}, 4),
        ({"items": {"$ref": "#here"}, "anyOf": [{"$anchor": "here", "items": INTEGERS}]}, 4),
        ({"items": {"$ref": "urn:x"}, "anyOf": [{"$id": "urn:x", "items": INTEGERS}]}, 4),
        ({"items": {"$ref": "#"}}, 2),
        ({"properties": {"$ref": INTEGERS}}, 3),
        ({"items": {"$ref": "#/not/there"}}, 2),
        ({"items": {"$ref": 7}}, 2),
        ({"items": {"$ref": "#/items/$ref/0"}}, 2),
    ],
)
def test_path_through_a_schema(schema: Any, length: int) -> None:
    assert SchemaGraph(schema).longest_path() == length


def test_a_recursive_schema_has_a_path() -> None:
    """It ends where it meets itself."""
    tree = {"properties": {"left": {"$ref": "#"}, "right": {"$ref": "#"}}}
    assert SchemaGraph(tree).longest_path() == 3
    check_schema(tree, param="x")


@pytest.mark.parametrize(
    ("grammar", "length"),
    [
        ('start: "a"', 1),
        ('start: a\na: "x"', 2),
        ('start: (a | ("b" c)+)\n?a.5: c\nc[capture, max_tokens=5]: /x:(/', 5),
        ("start: a // b: a\na: a a\n# c: start\n", 2),
        ('start: a "\\" b: a" \nb: start\na: "x', 3),
        (f'start: a\na: (%json {{"items": {INTEGER}}} )', 5),
        (f"start: %json  {INTEGER} a\na: %json {INTEGER}", 4),
        ("start: %json {", 1),
        (")))) start: ((", 3),
        ("no rules", 0),
    ],
)
def test_path_through_a_grammar(grammar: str, length: int) -> None:
    assert LarkRules(grammar).longest_path() == length


@pytest.mark.parametrize("definition", ["%s", *WRAPS.values(), *DOUBLES.values()])
def test_a_chain_of_references_is_bounded(definition: str) -> None:
    check_schema(json.loads(chain(definition, 20)), param="x")
    with pytest.raises(InvalidRequest, match="lists, objects and references"):
        check_schema(json.loads(chain(definition, MAX_PATH)), param="x")


def test_a_refusal_names_field_limit_and_length() -> None:
    with pytest.raises(InvalidRequest) as refused:
        check_schema(json.loads(chain("%s", 2_500)), param="guided_json")
    assert refused.value.param == "guided_json"
    assert "'guided_json' has 2503" in refused.value.message and "128" in refused.value.message
    with pytest.raises(InvalidRequest) as refused:
        check_lark(rules(RULES["rules"], 2_700), param="guided_grammar")
    assert "'guided_grammar' has 2702" in refused.value.message and "128" in refused.value.message
    with pytest.raises(InvalidRequest) as refused:
        check_expression("a?" * 20_000, param="guided_regex")
    assert "'guided_regex' has 40000" in refused.value.message
    assert str(MAX_EXPRESSION_BYTES) in refused.value.message


@pytest.mark.parametrize("rule", RULES.values())
def test_a_chain_of_rules_is_bounded(rule: str) -> None:
    check_lark(rules(rule, 20), param="x")
    with pytest.raises(InvalidRequest, match="rules and brackets"):
        check_lark(rules(rule, MAX_PATH), param="x")


def test_expressions_inside_are_bounded() -> None:
    long = "a?" * MAX_PATTERN_BYTES
    for schema in (
        {"pattern": long},
        {"patternProperties": {long: INTEGERS}},
        {"$defs": {"a": {"anyOf": [{"pattern": long}]}}},
        {"pattern": "\ud800" * MAX_PATTERN_BYTES},
    ):
        with pytest.raises(InvalidRequest, match="'pattern'"):
            check_schema(schema, param="x")
        with pytest.raises(InvalidRequest, match="'pattern'"):
            check_lark(f"start: %json {json.dumps(schema)}", param="x")
    with pytest.raises(InvalidRequest, match="expression"):
        check_lark(f"start: /{long * 2}/", param="x")
    check_schema({"properties": {"pattern": INTEGERS}, "pattern": "a" * 4_000}, param="x")


def test_patterns_of_a_schema_are_bounded_together() -> None:
    """Each may be short, and their work adds up."""
    for count, fits in ((8, True), (9, False)):
        properties = {f"p{i}": {"type": "string", "pattern": "a?" * 1000} for i in range(count)}
        if fits:
            check_schema({"properties": properties}, param="x")
            continue
        with pytest.raises(InvalidRequest, match="patterns of a schema together"):
            check_schema({"properties": properties}, param="x")


@pytest.mark.parametrize(
    "text",
    [
        *('"\\' * 128_000, "/\\" * 128_000, "a[" * 128_000, "a:" * 128_000, "(" * 256_000),
        *("%json [" * 36_000, "%json 1" * 36_000, "%json " + "[" * 250_000, "a: a\n" * 50_000),
        nest(WRAPS["items"], 9_000),
    ],
    ids=lambda text: text[:8],
)
def test_what_is_no_grammar_is_read_to_its_end(text: str) -> None:
    """In steps that are proportional to its length, and without recursion."""
    LarkRules(text).longest_path()
