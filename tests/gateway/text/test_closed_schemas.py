"""Objects of a schema have only declared properties: random answers are judged by hand-written
schemas with `unevaluatedProperties`, and every closed schema still accepts what it should."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Literal

import jsonschema_rs
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from llguidance import LLMatcher, LLTokenizer
from pydantic import BaseModel, ConfigDict, TypeAdapter

from gateway.text.closed_schemas import MAX_STEPS, closed_schema
from gateway.text.grammar_limits import MAX_PATH, check_schema
from gateway.text.json_schemas import held_schema
from tests.doubles import make_tokenizer
from tests.gateway.text.odd_schemas import ODD_SCHEMAS
from tests.workers.constraints.test_json_schemas import Walk
from workers.wire import grammars

INTEGER = {"type": "integer"}
SEAL = {"unevaluatedProperties": False}


def an_object(*required: str, **properties: Any) -> dict[str, Any]:
    found: dict[str, Any] = {"type": "object", "properties": properties}
    return {**found, "required": list(required)} if required else found


A, B, C = an_object("a", a=INTEGER), an_object("b", b=INTEGER), an_object("c", c=INTEGER)
TREE = an_object("name", name={"enum": ["x"]}, below={"type": "array", "items": {"$ref": "#"}})
SEALED_TREE = TREE | SEAL
DEFINED = {"$defs": {"A": A, "B": B}}
REF_A, REF_B = {"$ref": "#/$defs/A"}, {"$ref": "#/$defs/B"}
NODE = an_object("v", v={"enum": [1]}, next={"anyOf": [{"$ref": "#/$defs/N"}, {"type": "null"}]})
TAGGED = {"oneOf": [an_object("k", k={"const": each}, **{each: INTEGER}) for each in ("p", "q")]}
CASES: dict[str, tuple[Any, Any, list[str]]] = {
    "an object": (A, A | SEAL, ['{"a":1}']),
    "an object without a type": (
        {"properties": {"a": INTEGER}},
        {"properties": {"a": INTEGER}} | SEAL,
        ['{"a":1}', "5"],
    ),
    "no properties": (an_object(), an_object() | SEAL, ["{}"]),
    "objects in objects": (
        an_object("o", o=A, l={"type": "array", "items": B, "maxItems": 2}),
        an_object("o", o=A | SEAL, l={"type": "array", "items": B | SEAL, "maxItems": 2}) | SEAL,
        ['{"o":{"a":1},"l":[{"b":2}]}'],
    ),
    "objects in a map": (
        {"type": "object", "additionalProperties": A},
        {"type": "object", "additionalProperties": A | SEAL},
        ['{"x":{"a":1}}'],
    ),
    "allOf": ({"allOf": [A, B]}, {"allOf": [A, B]} | SEAL, ['{"a":1,"b":2}']),
    "allOf beside properties": (
        {**C, "allOf": [A, {"allOf": [B]}]},
        {**C, "allOf": [A, B]} | SEAL,
        ['{"c":3,"a":1,"b":2}'],
    ),
    "allOf of references": (
        {**DEFINED, "allOf": [REF_A, REF_B]},
        {"allOf": [A, B]} | SEAL,
        ['{"a":1,"b":2}'],
    ),
    "a definition alone and in allOf": (
        {**DEFINED, **an_object("x", "y", x=REF_A, y={"allOf": [REF_A, B]})},
        an_object("x", "y", x=A | SEAL, y={"allOf": [A, B]} | SEAL) | SEAL,
        ['{"x":{"a":1},"y":{"a":1,"b":2}}'],
    ),
    "a reference beside properties": (
        {**DEFINED, **REF_A, **B},
        {"allOf": [A, B]} | SEAL,
        ['{"a":1,"b":2}'],
    ),
    "a union": ({"anyOf": [A, B]}, {"anyOf": [A | SEAL, B | SEAL]}, ['{"a":1}', '{"b":2}']),
    "a union of references": (
        {**DEFINED, "anyOf": [REF_A, REF_B, {"type": "null"}]},
        {"anyOf": [A | SEAL, B | SEAL, {"type": "null"}]},
        ['{"a":1}', '{"b":2}', "null"],
    ),
    "a union beside properties": (
        {**C, "anyOf": [A, B]},
        {**C, "anyOf": [A, B]} | SEAL,
        ['{"c":3,"a":1}', '{"c":3,"b":2}'],
    ),
    "a union of what is required": (
        {**an_object(a=INTEGER, b=INTEGER), "anyOf": [{"required": ["a"]}, {"required": ["b"]}]},
        {**an_object(a=INTEGER, b=INTEGER), "anyOf": [{"required": ["a"]}, {"required": ["b"]}]}
        | SEAL,
        ['{"a":1}', '{"b":2}', '{"a":1,"b":2}'],
    ),
    "a union behind a reference": (
        {"$defs": {"U": {"anyOf": [A, B]}}, "allOf": [{"$ref": "#/$defs/U"}, C]},
        {"allOf": [{"anyOf": [A, B]}, C]} | SEAL,
        ['{"a":1,"c":3}', '{"b":2,"c":3}'],
    ),
    "two unions": (
        {"allOf": [{"anyOf": [A, B]}, {"anyOf": [C, an_object("d", d=INTEGER)]}]},
        {"allOf": [{"anyOf": [A, B]}, {"anyOf": [C, an_object("d", d=INTEGER)]}]} | SEAL,
        ['{"a":1,"c":3}', '{"b":2,"d":4}'],
    ),
    "tags": (TAGGED, {"oneOf": [each | SEAL for each in TAGGED["oneOf"]]}, ['{"k":"p","p":1}']),
    "a tree": (TREE, SEALED_TREE, ['{"name":"x","below":[{"name":"x"}]}']),
    "a list with a base": (
        {"$defs": {"N": NODE, "M": {"allOf": [{"$ref": "#/$defs/N"}, A]}}, "$ref": "#/$defs/M"},
        {"$defs": {"N": NODE | SEAL}, "allOf": [NODE, A]} | SEAL,
        ['{"v":1,"next":{"v":1,"next":null},"a":1}'],
    ),
    "required and not declared": (
        {"type": "object", "properties": {"a": INTEGER}, "required": ["a", "b"]},
        {"type": "object", "properties": {"a": INTEGER, "b": True}, "required": ["a", "b"]} | SEAL,
        ['{"a":1,"b":null}'],
    ),
    "closed by the schema": (A | SEAL, A | SEAL, ['{"a":1}']),
    "closed as a whole by the schema": (
        {"allOf": [A, B]} | SEAL,
        {"allOf": [A, B]} | SEAL,
        ['{"a":1,"b":2}'],
    ),
    "named by a condition": (
        {**A, "if": {"properties": {"a": {"const": 1}}}, "then": {"properties": {"t": INTEGER}}},
        {**an_object("a", a=INTEGER, t=True)} | SEAL,
        ['{"a":1,"t":2}'],
    ),
}
"""A schema, the schema that judges random answers, and answers that are accepted."""
OPEN: dict[str, tuple[Any, str]] = {
    "a map": ({"type": "object"}, '{"x":1}'),
    "a map with a required key": ({"type": "object", "required": ["x"]}, '{"x":1,"y":2}'),
    "opened": (A | {"additionalProperties": True}, '{"a":1,"x":1}'),
    "opened to some": (A | {"additionalProperties": INTEGER}, '{"a":1,"x":1}'),
    "opened by a pattern": (A | {"patternProperties": {"^x": INTEGER}}, '{"a":1,"x":1}'),
    "opened by names": (A | {"propertyNames": {"maxLength": 2}}, '{"a":1,"x":1}'),
    "opened as a whole": (A | {"unevaluatedProperties": True}, '{"a":1,"x":1}'),
    "opened by a member": ({"allOf": [A, {"additionalProperties": INTEGER}]}, '{"a":1,"x":1}'),
    "opened by a branch": ({**A, "anyOf": [{"additionalProperties": INTEGER}, B]}, '{"a":1,"x":1}'),
    "a map in a union": ({"anyOf": [{"type": "object", "required": ["z"]}, A]}, '{"z":1,"x":1}'),
    "values of a map": (an_object("m", m={"type": "object"}), '{"m":{"x":1}}'),
}
"""A schema that says something about other properties, and an answer with one."""


class Base(BaseModel):
    number: int


class Part(Base):
    kind: Literal["part"]
    whole: Whole | None = None


class Whole(Base):
    kind: Literal["whole"]
    parts: list[Part] = []
    sizes: dict[str, int] = {}


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> LLTokenizer:
    folder = tmp_path_factory.mktemp("tokenizer")
    make_tokenizer(folder)
    return LLTokenizer(str(folder / "tokenizer.json"), eos_token=[257])


def grammar_of(schema: Any) -> str:
    held = held_schema(json.dumps(schema), is_strict=False, is_closed=True)
    grammar = grammars.of_json_schema(held.text)
    assert grammars.refusal(grammar) is None, held.text
    return grammar


def accepts(tokenizer: LLTokenizer, grammar: str, text: str) -> bool:
    matcher = LLMatcher(tokenizer, grammar, log_level=0, limits=grammars.limits())
    tokens = tokenizer.tokenize_str(text)
    return matcher.try_consume_tokens(tokens) == len(tokens) and matcher.is_accepting()


def walks(tokenizer: LLTokenizer, grammar: str, number: int) -> Iterator[str]:
    for seed in range(number):
        if (text := Walk(tokenizer, grammar, seed).text) is not None:
            yield text


def without_repeats(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    assert len(dict(pairs)) == len(pairs), pairs
    return dict(pairs)


@pytest.mark.parametrize("name", CASES)
def test_answers_have_only_declared_properties(tokenizer: LLTokenizer, name: str) -> None:
    """None of them twice."""
    schema, judge, accepted = CASES[name]
    before = json.dumps(schema)
    grammar, validator = grammar_of(schema), jsonschema_rs.Draft202012Validator(judge)
    assert json.dumps(schema) == before
    for text in accepted:
        assert accepts(tokenizer, grammar, text), text
        validator.validate(json.loads(text))
        if text.endswith("}") and "map" not in name:
            further = text[:-1] + (', "x": 1}' if text != "{}" else '"x": 1}')
            assert not accepts(tokenizer, grammar, further), further
    for text in walks(tokenizer, grammar, 16):
        validator.validate(json.loads(text, object_pairs_hook=without_repeats))


@pytest.mark.parametrize("name", OPEN)
def test_what_the_schema_says_of_others_holds(tokenizer: LLTokenizer, name: str) -> None:
    schema, text = OPEN[name]
    jsonschema_rs.Draft202012Validator(schema).validate(json.loads(text))
    assert accepts(tokenizer, grammar_of(schema), text)


@pytest.mark.parametrize("kind", [Part, Whole, list[Part | Whole], Part | Whole | None])
def test_models_of_pydantic_forbid_extra_properties(tokenizer: LLTokenizer, kind: Any) -> None:
    """Judged by the same models with `extra="forbid"`."""
    adapter: TypeAdapter[Any] = TypeAdapter(kind)
    grammar = grammar_of(adapter.json_schema())
    texts = list(walks(tokenizer, grammar, 16))
    for model in (Base, Part, Whole):
        model.model_config = ConfigDict(extra="forbid")
    try:
        for model in (Base, Part, Whole):
            model.model_rebuild(force=True)
        for text in texts:
            TypeAdapter(kind).validate_json(text)
    finally:
        for model in (Base, Part, Whole):
            model.model_config = ConfigDict()
            model.model_rebuild(force=True)
    assert texts


def test_a_definition_by_anchor_keeps_its_place(tokenizer: LLTokenizer) -> None:
    schema = {"$defs": {"x": {"$anchor": "a", **A}}, **an_object("p", p={"$ref": "#a"})}
    assert closed_schema(schema)["$defs"] == schema["$defs"]


def test_work_is_bounded() -> None:
    """Of unions of references to unions, 40 deep, beside properties, and of schemas that contain
    themselves in every way."""
    levels = {f"a{n}": {"anyOf": [{"$ref": f"#/$defs/a{n + 1}"}] * 2} for n in range(40)}
    deep = {**A, "anyOf": [{"$ref": "#/$defs/a0"}], "$defs": {**levels, "a40": B}}
    assert len(json.dumps(closed_schema(deep))) < 200 * MAX_STEPS
    for keyword in ("allOf", "anyOf", "oneOf"):
        closed_schema({**A, keyword: [{"$ref": "#"}, B]})
        closed_schema(
            {"$ref": "#/$defs/x", "$defs": {"x": {keyword: [{"$ref": "#/$defs/x"}, B, A]}}}
        )


@pytest.mark.parametrize(
    "schema",
    [
        {"if": {"$ref": "#"}, "properties": {"a": {}}},
        {"dependentSchemas": {"a": {"if": {"$ref": "#"}}}, "properties": {"a": {}}},
        {"oneOf": [{"required": ["a"], "$ref": "#"}, {"properties": {"a": {}}}]},
        {"anyOf": [{"properties": {"x": {"anyOf": [], "$ref": "#"}}}]},
        {"anyOf": [{"additionalProperties": {"$ref": "#", "if": {}}}]},
        {**A, "anyOf": [{"$ref": "#"}, B], "allOf": [{"$ref": "#"}]},
        {
            "$defs": {
                "a": {"allOf": [{"$ref": "#/$defs/b"}, {"$ref": "#/$defs/c"}]},
                "b": {"allOf": [{"$ref": "#/$defs/a"}, A]},
                "c": {"anyOf": [B, C]},
            },
            "$ref": "#/$defs/a",
        },
        {
            "$defs": {"d": {"anyOf": [an_object(x={"$ref": "#/$defs/d", "required": ["y"]})]}},
            "$ref": "#/$defs/d",
        },
    ],
)
def test_cycles_through_every_keyword_end(schema: dict[str, Any]) -> None:
    json.dumps(closed_schema(schema))


def test_a_schema_of_too_many_compositions_is_refused() -> None:
    """3,000 properties that each join a union of 1,000 objects with another, and an object of
    9,000 properties with a union of 2,000 branches."""
    union = {"anyOf": [{"properties": {f"p{n}": {}}} for n in range(1_000)]}
    joined = {"allOf": [{"$ref": "#/$defs/U"}, {}]}
    wide = {**an_object(**{f"x{n}": joined for n in range(3_000)}), "$defs": {"U": union}}
    names = an_object(**{f"y{n}": {} for n in range(9_000)}) | {
        "anyOf": [{"properties": {}}] * 2_000
    }
    for schema in (wide, names):
        begun = time.thread_time()
        with pytest.raises(ValueError, match="additionalProperties"):
            closed_schema(schema)
        assert time.thread_time() - begun < 2


@pytest.mark.parametrize("keyword", ["allOf", "anyOf", "$ref", "properties"])
def test_the_longest_path_that_is_allowed_is_closed(keyword: str) -> None:
    """In a thread, as gateways do it, and also where each schema is met closed and not closed."""
    definitions: dict[str, Any] = {"d0": A}
    for number in range(1, MAX_PATH // 2):
        reference = {"$ref": f"#/$defs/d{number - 1}"}
        inner: Any = {"allOf": [reference, B], "anyOf": [reference, C], "$ref": reference["$ref"]}
        own = an_object(x=reference) if keyword == "properties" else {keyword: inner[keyword]}
        definitions[f"d{number}"] = own | ({"allOf": [reference]} if keyword != "allOf" else {})
    schema = {"$ref": f"#/$defs/d{MAX_PATH // 2 - 1}", "$defs": definitions}
    with ThreadPoolExecutor() as threads:
        try:
            threads.submit(closed_schema, schema).result()
        except ValueError as error:
            assert "too many" in str(error)


@pytest.mark.parametrize("schema", [True, False, *ODD_SCHEMAS])
def test_odd_schemas_stay_json(schema: Any) -> None:
    json.dumps(closed_schema(schema))


@st.composite
def compositions(draw: Any, depth: int = 0) -> dict[str, Any]:
    """A schema of objects with properties a to d, joined in every way."""
    names = draw(st.sets(st.sampled_from("abcd"), max_size=2))
    node: dict[str, Any] = {}
    if names:
        node["properties"] = {name: {"type": "integer"} for name in sorted(names)}
    if draw(st.booleans()):
        node["required"] = sorted(draw(st.sets(st.sampled_from("abcd"), max_size=1)))
    if depth < 2:
        for keyword in draw(st.sets(st.sampled_from(["allOf", "anyOf"]))):
            node[keyword] = draw(st.lists(compositions(depth + 1), min_size=1, max_size=2))
        if draw(st.integers(0, 3)) == 0:
            node["$ref"] = f"#/$defs/{draw(st.sampled_from('xy'))}"
    if draw(st.integers(0, 7)) == 0:
        node["additionalProperties"] = draw(st.sampled_from([True, {"type": "null"}]))
    return node


@st.composite
def declared(draw: Any, depth: int = 0, join: str = "anyOf") -> dict[str, Any]:
    """A schema whose every part declares properties, with at most one union for a value."""
    names = sorted(draw(st.sets(st.sampled_from("abcd"), min_size=1, max_size=2)))
    node = an_object(*names[: draw(st.integers(0, 1))], **dict.fromkeys(names, INTEGER))
    if depth < 2:
        inner = declared(depth + 1, join)
        node[join] = draw(st.lists(inner, min_size=1, max_size=2))
        if join == "anyOf":
            node["allOf"] = draw(st.lists(declared(depth + 1, "allOf"), min_size=1, max_size=2))
    return node


OBJECTS = [
    {name: 1 for name, bit in zip("abcdz", bits, strict=True) if bit == "1"}
    for bits in (f"{number:05b}" for number in range(32))
]


@settings(max_examples=300, deadline=None)
@given(data=st.data())
def test_closing_only_refuses_what_is_not_declared(data: Any) -> None:
    """A closed composition accepts no object that the schema refuses, and stays satisfiable if it
    is with `unevaluatedProperties` of false."""
    definitions = {name: data.draw(compositions(1)) for name in "xy"}
    for each in definitions.values():
        each.pop("$ref", None)
    whole = {**data.draw(compositions()), "$defs": definitions}
    before = jsonschema_rs.Draft202012Validator(whole)
    after = jsonschema_rs.Draft202012Validator(closed_schema(whole))
    sealed = jsonschema_rs.Draft202012Validator(whole | SEAL)
    for each in OBJECTS:
        assert before.is_valid(each) or not after.is_valid(each), each
    assert any(map(after.is_valid, OBJECTS)) or not any(map(sealed.is_valid, OBJECTS))


@settings(max_examples=200, deadline=None)
@given(schema=declared())
def test_closing_refuses_all_that_is_not_declared(schema: Any) -> None:
    """What a closed composition accepts is also accepted with `unevaluatedProperties` of false."""
    after = jsonschema_rs.Draft202012Validator(closed_schema(schema))
    sealed = jsonschema_rs.Draft202012Validator(schema | SEAL)
    for each in OBJECTS:
        assert sealed.is_valid(each) or not after.is_valid(each), each


def test_a_long_chain_of_references_is_refused() -> None:
    """Each group of definitions is a cycle that leads on to the next group. Visited from `items`,
    each group ends soon, so that `check_schema` finds no long path; from `z`, all are one path."""
    num_groups, size = 20, 25
    definitions: dict[str, Any] = {}
    for group in range(num_groups):
        for number in range(size):
            ends = [f"{group}_{(number + 1) % size}"]
            if number == size - 2 and group:
                ends.append(f"{group - 1}_{size - 1}")
            named = {end: {"$ref": f"#/$defs/{end}"} for end in ends}
            definitions[f"{group}_{number}"] = {"properties": named}
    begins = {f"p{group}": {"$ref": f"#/$defs/{group}_0"} for group in range(num_groups)}
    last = {"$ref": f"#/$defs/{num_groups - 1}_{size - 1}"}
    schema = {"items": {"properties": begins}, "properties": {"z": last}, "$defs": definitions}
    check_schema(schema, param="response_format")
    with pytest.raises(ValueError, match="too many '\\$ref' lead from one to the next"):
        closed_schema(schema)
