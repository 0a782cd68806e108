"""Schemas as pydantic, zod and OpenAPI write them: an answer is held to them, what cannot be
enforced is named, and what is held to accepts nothing that the schema does not.

`zod_schemas.json` has what zod 4.6.7 writes (`z.toJSONSchema`), by kind of schema and draft.
"""

from __future__ import annotations

import json
from datetime import date, datetime, time, timedelta
from decimal import Decimal
from enum import Enum
from ipaddress import IPv4Address
from pathlib import Path
from typing import Annotated, Any, Literal
from uuid import UUID

import jsonschema_rs
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from llguidance import LLMatcher, LLTokenizer
from pydantic import (
    AnyUrl,
    Base64Bytes,
    BaseModel,
    Field,
    PositiveInt,
    SecretStr,
    TypeAdapter,
)

from gateway.text.json_schemas import MAX_STEPS, NOTHING, SchemaReader, held_schema
from tests.doubles import make_tokenizer
from tests.workers.constraints.test_json_schemas import Walk
from workers.wire import grammars

ZOD: dict[str, Any] = json.loads((Path(__file__).parent / "zod_schemas.json").read_text())
ZOD_DROPS = {
    "formats draft-2020-12": {"format", "pattern"},
    "records draft-2020-12": {"propertyNames"},
    "records draft-7": {"propertyNames"},
    "never draft-2020-12": {"format", "pattern"},
}


class Cat(BaseModel):
    kind: Literal["cat"] = "cat"
    lives: Annotated[int, Field(ge=0, le=9)]


class Dog(BaseModel):
    kind: Literal["dog", "hound"] = "dog"
    barks: bool


class Trout(BaseModel):
    kind: Literal["fish"]
    water: Literal["fresh"] = "fresh"


class Cod(BaseModel):
    kind: Literal["fish"]
    water: Literal["salt"] = "salt"


Fish = Annotated[Trout | Cod, Field(discriminator="water")]
Pet = Annotated[Cat | Dog | Fish, Field(discriminator="kind")]


class Kennel(BaseModel):
    pet: Pet | None


class Colour(Enum):
    RED = "red"
    BLUE = "blue"


class Tree(BaseModel):
    name: Annotated[str, Field(max_length=3)]
    colour: Colour | None = None
    parent: Tree | None = None
    children: Annotated[list[Tree], Field(max_length=2)] = []


class Order(BaseModel):
    """What is held to as it stands."""

    id: UUID
    at: datetime
    day: date
    number: PositiveInt
    price: Decimal
    link: AnyUrl
    address: IPv4Address
    code: Annotated[str, Field(pattern=r"^[A-Z]{2}\d$")]
    sizes: Annotated[dict[str, int], Field(min_length=1, max_length=2)]
    pair: tuple[int, bool]
    state: Literal["new", 1, None]
    part: Annotated[float, Field(multiple_of=0.5, ge=0, lt=8)]


class Loose(BaseModel):
    """What cannot be enforced as a whole."""

    tags: set[str]
    names: Annotated[list[str], Field(json_schema_extra={"contains": {"const": "x"}})]
    by_colour: dict[Colour, int]
    secret: SecretStr
    path: Path
    data: Base64Bytes
    when: time
    long: timedelta


CAT = '{"kind":"cat","lives":7}'
COD = '{"kind":"fish","water":"salt"}'
LEAF = '{"name":"b","colour":null,"parent":null,"children":[]}'
TREE = LEAF.replace("[]", f"[{LEAF},{LEAF}]").replace("null", '"red"', 1)
ORDER = (
    '{"id":"123e4567-e89b-12d3-a456-426614174000","at":"2026-01-02T03:04:05Z","day":"2026-01-02",'
    '"number":1,"price":"1.50","link":"https://example.com/a","address":"10.0.0.1","code":"AB1",'
    '"sizes":{"a":1},"pair":[1,true],"state":null,"part":1.5}'
)
PYDANTIC: dict[str, tuple[Any, list[str], list[str]]] = {
    "a union with a tag": (Pet, [CAT, COD], [CAT.replace("cat", "dog"), "null"]),
    "perhaps a union": (Kennel, [f'{{"pet":{CAT}}}', '{"pet":null}'], ['{"pet":1}']),
    "a list of unions": (list[Pet], [f"[{CAT},{COD}]"], [CAT]),
    "a tree": (Tree, [LEAF, TREE], [TREE.replace("red", "green")]),
    "an order": (Order, [ORDER], [ORDER.replace("AB1", "A1"), ORDER.replace("1.5}", "1.4}")]),
    "scalars": (int | str | None, ["1", '"a"', "null"], ["1.5"]),
}
"""A type, answers that it takes and answers that it does not take."""

REF = {"$ref": "#/components/schemas/Pet"}
OPENAPI = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "nullable": True, "example": "Rex"},
        "age": {"type": "integer", "format": "int64", "minimum": 0, "exclusiveMinimum": True},
        "size": {"type": "string", "enum": ["s", "m"], "nullable": True},
        "mate": {"allOf": [REF], "nullable": True, "description": "Another one"},
        "pet": {**REF, "nullable": True},
        "any": {
            "oneOf": [REF, {"$ref": "#/components/schemas/Toy"}],
            "discriminator": {"propertyName": "kind", "mapping": {"pet": REF["$ref"]}},
            "nullable": True,
            "xml": {"name": "any"},
        },
    },
    "required": ["name", "age", "size", "mate", "pet", "any"],
    "additionalProperties": False,
    "components": {
        "schemas": {
            "Pet": {
                "type": "object",
                "properties": {
                    "kind": {"type": "string", "enum": ["pet"]},
                    "password": {"type": "string", "format": "password", "maxLength": 3},
                },
                "additionalProperties": False,
            },
            "Toy": {
                "type": "object",
                "properties": {"kind": {"type": "string", "enum": ["toy"]}},
                "additionalProperties": False,
            },
        }
    },
}


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> LLTokenizer:
    folder = tmp_path_factory.mktemp("tokenizer")
    make_tokenizer(folder)
    return LLTokenizer(str(folder / "tokenizer.json"), eos_token=[257])


def answers(tokenizer: LLTokenizer, schema: Any, dropped: set[str]) -> list[str]:
    """Random answers that are held to a schema, of which these keywords are dropped."""
    held = held_schema(json.dumps(schema), is_strict=False)
    assert held.dropped == dropped
    grammar = grammars.of_json_schema(held.text)
    assert grammars.refusal(grammar) is None
    walks = [Walk(tokenizer, grammar, seed) for seed in range(12)]
    return [walk.text for walk in walks if walk.text is not None]


def is_accepted(tokenizer: LLTokenizer, schema: Any, text: str) -> bool:
    """Whether an answer that is held to the schema may be this one."""
    grammar = grammars.of_json_schema(held_schema(json.dumps(schema), is_strict=False).text)
    matcher = LLMatcher(tokenizer, grammar, log_level=0, limits=grammars.limits())
    tokens = tokenizer.tokenize_str(text)
    return matcher.try_consume_tokens(tokens) == len(tokens) and matcher.is_accepting()


@pytest.mark.parametrize("name", PYDANTIC)
def test_schemas_of_pydantic(tokenizer: LLTokenizer, name: str) -> None:
    """Nothing of them is dropped, and pydantic takes what is held to them."""
    kind, accepted, refused = PYDANTIC[name]
    adapter = TypeAdapter(kind)
    schema = adapter.json_schema()
    for text in [*accepted, *answers(tokenizer, schema, set())]:
        adapter.validate_json(text)
    assert all(is_accepted(tokenizer, schema, text) for text in accepted)
    assert not any(is_accepted(tokenizer, schema, text) for text in refused)


@pytest.mark.parametrize("mode", ["validation", "serialization"])
def test_what_pydantic_asks_for_in_vain_is_named(tokenizer: LLTokenizer, mode: Any) -> None:
    schema = TypeAdapter(Loose).json_schema(mode=mode)
    answers(tokenizer, schema, {"contains", "format", "propertyNames", "uniqueItems"})


@pytest.mark.parametrize("name", ZOD)
def test_schemas_of_zod(tokenizer: LLTokenizer, name: str) -> None:
    dropped = ZOD_DROPS.get(name, set())
    for text in answers(tokenizer, ZOD[name], dropped):
        if not dropped and "openapi" not in name:
            jsonschema_rs.validator_for(ZOD[name]).validate(json.loads(text))


def test_schemas_of_openapi(tokenizer: LLTokenizer) -> None:
    """`nullable` and exclusive bounds mean what they mean in OpenAPI 3.0, and a discriminator's
    property is always written."""
    pet, toy = {"kind": "pet", "password": "abc"}, {"kind": "toy"}
    whole = {"name": "Rex", "age": 1, "size": "s", "mate": pet, "pet": pet, "any": toy}
    nulls = dict.fromkeys(("name", "size", "mate", "pet", "any"))
    wrong: list[dict[str, Any]] = [{"age": 0}, {"age": None}, {"size": "l"}, {"any": {}}]
    assert held_schema(json.dumps(OPENAPI), is_strict=False).dropped == {"format"}

    def accepts(**changed: Any) -> bool:
        return is_accepted(tokenizer, OPENAPI, json.dumps({**whole, **changed}))

    assert accepts() and accepts(**nulls) and accepts(any={"kind": "pet"})
    assert not any(accepts(**changed) for changed in wrong)


@pytest.mark.parametrize("keyword", sorted(NOTHING))
def test_what_cannot_be_enforced_is_named(keyword: str) -> None:
    asks: Any = {"uniqueItems": True, "minContains": 1, "maxContains": 1}.get(keyword, {"a": []})
    schema = {"$defs": {"x": {"items": {keyword: asks}}}, "$ref": "#/$defs/x"}
    held = held_schema(json.dumps(schema), is_strict=False)
    assert held.dropped == {keyword} and keyword not in held.text
    with pytest.raises(ValueError, match=f"'{keyword}' cannot be enforced"):
        held_schema(json.dumps(schema), is_strict=True)
    for value in NOTHING[keyword]:
        schema = {"properties": {"a": {keyword: value}}}
        assert not held_schema(json.dumps(schema), is_strict=True).dropped


@pytest.mark.parametrize(
    ("pattern", "is_dropped"),
    [
        (r"^(?!a)b", True),
        (r"(?<=a)b", True),
        (r"^(a)\1$", True),
        (r"\bword", True),
        (r"\\b", False),
        (r"^[(?=a]$", False),
        (r"[\]\\](?:a)", False),
        (r"(?<name>a)", False),
        ("[" * 1000, False),
    ],
)
def test_patterns_that_cannot_be_enforced(pattern: str, is_dropped: bool) -> None:
    held = held_schema(json.dumps({"pattern": pattern}), is_strict=False)
    assert held.dropped == ({"pattern"} if is_dropped else set())


TAGS: list[dict[str, Any]] = [
    {"const": "a"},
    {"const": "b"},
    {"enum": ["b", "c"]},
    {"const": 1},
    {"const": 1.0},
    {"type": "string"},
    {"anyOf": [{"const": "c"}, {"const": "d"}]},
]
VALUES = ["a", "b", "c", "d", 1, None, True]


@st.composite
def branches(draw: Any) -> dict[str, Any]:
    """A branch of a union: an object with tags, or something else."""
    kind = draw(st.sampled_from(["object"] * 4 + ["null", "scalar", "union", "joined"]))
    match kind:
        case "null":
            return {"type": "null"}
        case "scalar":
            return draw(st.sampled_from([*TAGS, {"type": "integer"}, {"type": "number"}]))
        case "union":
            return {draw(st.sampled_from(["anyOf", "oneOf"])): [draw(branches()), draw(branches())]}
        case "joined":
            return {"allOf": [draw(branches()), draw(branches())]}
        case _:
            names = draw(st.sets(st.sampled_from("tu"), min_size=1))
            return {
                "type": "object",
                "properties": {name: draw(st.sampled_from(TAGS)) for name in sorted(names)},
                "required": draw(st.lists(st.sampled_from("tu"), unique=True)),
            }


@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_a_union_accepts_no_more_than_before(data: Any) -> None:
    """Of references to objects that may fit together, with tags that may be left out."""
    found = data.draw(st.lists(branches(), min_size=1, max_size=4))
    names = [f"b{number}" for number in range(len(found))]
    refs = [{"$ref": f"#/$defs/{name}"} for name in names]
    union: dict[str, Any] = {"oneOf": [*refs, *data.draw(st.lists(branches(), max_size=1))]}
    if data.draw(st.booleans()):
        union["discriminator"] = {"propertyName": "t"}
    schema = {
        "type": "array",
        "items": union,
        "$defs": dict(zip(names, found, strict=True)),
    }
    held = held_schema(json.dumps(schema), is_strict=True)
    before = jsonschema_rs.Draft202012Validator(schema)
    after = jsonschema_rs.Draft202012Validator(json.loads(held.text))
    objects = [{"t": t, "u": u} for t in VALUES for u in VALUES]
    values: list[Any] = [*VALUES, {}, *({"t": t} for t in VALUES), *objects]
    for value in values:
        assert before.is_valid([value]) or not after.is_valid([value]), value


def test_work_for_unions_is_bounded() -> None:
    """Of references to unions of references, 40 deep, and of a branch that is the union."""
    levels = {f"a{n}": {"anyOf": [{"$ref": f"#/$defs/a{n + 1}"}] * 2} for n in range(40)}
    joined = {f"j{n}": {"allOf": [{"$ref": f"#/$defs/j{n + 1}"}] * 2} for n in range(30)}
    for first in ("#/$defs/a0", "#/$defs/j0", "#"):
        schema = {"oneOf": [{"$ref": first}] * 2, "$defs": {**levels, **joined}}
        reader = SchemaReader(json.loads(json.dumps(schema)))
        assert "oneOf" in reader.schema and reader._num_steps < 2 * MAX_STEPS


@given(
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.text("#/$defs0", max_size=8),
        lambda inner: (
            st.lists(inner, max_size=3)
            | st.dictionaries(
                st.sampled_from(
                    [
                        *(
                            *NOTHING,
                            "oneOf",
                            "anyOf",
                            "allOf",
                            "$ref",
                            "items",
                            "properties",
                            "$defs",
                        ),
                        *("nullable", "type", "enum", "required", "discriminator", "propertyName"),
                        *("format", "pattern", "exclusiveMinimum", "minProperties", "0"),
                        *("additionalProperties", "patternProperties", "prefixItems"),
                    ]
                ),
                inner,
                max_size=4,
            )
        ),
        max_leaves=20,
    ),
    st.booleans(),
)
def test_whatever_is_sent_is_a_schema_or_is_refused(schema: Any, is_closed: bool) -> None:
    try:
        json.loads(held_schema(json.dumps(schema), is_strict=False, is_closed=is_closed).text)
    except ValueError:
        pytest.fail("only a strict schema is refused here")
