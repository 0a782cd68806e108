"""Fields that hold an answer to a schema or a grammar: what a worker gets, and what is refused."""

from __future__ import annotations

import json
import time
from typing import Any, Literal

import httpx
import openai
import pytest
from pydantic import BaseModel

from tests.gateway.scripted import ScriptedWorker
from tests.gateway.scripts import say
from tests.hostile_grammars import DOUBLES, RULES, chain, pattern, properties, rules


class Parcel(BaseModel):
    """An answer as the official client parses it."""

    number: int
    state: Literal["lost", "found"]


SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}
HI: Any = [{"role": "user", "content": "Hi"}]


@pytest.mark.parametrize(
    ("fields", "shown"),
    [
        ({"response_format": {"type": "json_object"}}, '"type":"object"'),
        ({"response_format": {"type": "json_object", "schema": None}}, '"type":"object"'),
        ({"response_format": {"type": "json_object", "schema": SCHEMA}}, '"a"'),
        (
            {
                "response_format": {
                    "type": "json_schema",
                    "json_schema": {"name": "x", "schema": SCHEMA, "strict": True},
                }
            },
            '"a"',
        ),
        ({"extra_body": {"guided_json": SCHEMA}}, '"a"'),
        ({"extra_body": {"guided_json": '{"enum": [77]}'}}, "77"),
        ({"extra_body": {"guided_regex": "[0-9]+"}}, "[0-9]+"),
        ({"extra_body": {"guided_choice": ["red", 'gr"een']}}, "red"),
        ({"extra_body": {"guided_grammar": 'start: "x"'}}, "start"),
        ({"extra_body": {"structured_outputs": {"regex": "[a-f]"}}}, "[a-f]"),
        ({"extra_body": {"structured_outputs": {"choice": ["red"]}}}, "red"),
    ],
)
def test_a_worker_gets_the_grammar(
    client: openai.OpenAI, worker: ScriptedWorker, fields: dict[str, Any], shown: str
) -> None:
    worker.script = say("{}")
    client.chat.completions.create(model="tiny", messages=HI, **fields)
    assert shown in worker.requests[-1].grammar
    fields.pop("response_format", None)
    if fields:
        client.completions.create(model="tiny", prompt="Hi", **fields)
        assert shown in worker.requests[-1].grammar


@pytest.mark.parametrize("fields", [{}, {"response_format": {"type": "text"}}])
def test_no_constraint(
    client: openai.OpenAI, worker: ScriptedWorker, fields: dict[str, Any]
) -> None:
    client.chat.completions.create(model="tiny", messages=HI, **fields)
    assert worker.requests[-1].grammar == ""


def test_the_official_client_parses_an_answer(
    client: openai.OpenAI, worker: ScriptedWorker
) -> None:
    worker.script = say('{"number": 7, "state": "lost"}')
    answer = client.chat.completions.parse(model="tiny", messages=HI, response_format=Parcel)
    assert answer.choices[0].message.parsed == Parcel(number=7, state="lost")
    assert '"lost"' in worker.requests[-1].grammar


def schema_format(schema: dict[str, Any], strict: bool | None = None) -> dict[str, Any]:
    named = {"name": "x", "schema": schema} | ({} if strict is None else {"strict": strict})
    return {"type": "json_schema", "json_schema": named}


UNENFORCED: dict[str, Any] = {
    "type": "object",
    "properties": {
        "tags": {"type": "array", "items": {"type": "string"}, "uniqueItems": True},
        "path": {"type": "string", "format": "file-path"},
        "kept": {"const": 77},
    },
}


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"response_format": schema_format(UNENFORCED)}, "response_format"),
        ({"response_format": schema_format(UNENFORCED, False)}, "response_format"),
        ({"response_format": {"type": "json_object", "schema": UNENFORCED}}, "response_format"),
        ({"extra_body": {"guided_json": UNENFORCED}}, "guided_json"),
        ({"extra_body": {"structured_outputs": {"json": UNENFORCED}}}, "structured_outputs"),
    ],
)
def test_what_cannot_be_enforced_is_dropped_and_named(
    client: openai.OpenAI, worker: ScriptedWorker, fields: dict[str, Any], param: str
) -> None:
    """Also where the grammar is kept from a request before."""
    worker.script = say("{}")
    for _ in range(2):
        raw = client.chat.completions.with_raw_response.create(model="tiny", messages=HI, **fields)
        assert raw.headers["loraplex-dropped"] == f"{param}.format, {param}.uniqueItems"
    assert "77" in worker.requests[-1].grammar


JSON_SCHEMA = {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}
OPENED = {"structured_outputs": {"disable_additional_properties": False}}
CLOSED = {"disable_additional_properties": True}


@pytest.mark.parametrize(
    ("path", "fields", "is_closed"),
    [
        ("chat/completions", {"response_format": JSON_SCHEMA}, True),
        ("completions", {"response_format": JSON_SCHEMA}, True),
        ("chat/completions", {"response_format": {"type": "json_object", "schema": SCHEMA}}, True),
        ("chat/completions", {"response_format": JSON_SCHEMA, **OPENED}, False),
        ("completions", {"guided_json": SCHEMA}, False),
        ("completions", {"guided_json": SCHEMA, "structured_outputs": CLOSED}, True),
        ("completions", {"structured_outputs": {"json": SCHEMA}}, False),
        ("completions", {"structured_outputs": {"json": json.dumps(SCHEMA), **CLOSED}}, True),
        (
            "responses",
            {"text": {"format": {"type": "json_schema", "name": "x", "schema": SCHEMA}}},
            True,
        ),
        (
            "messages",
            {"output_config": {"format": {"type": "json_schema", "schema": SCHEMA}}},
            True,
        ),
    ],
)
def test_where_objects_have_only_declared_properties(
    client: openai.OpenAI, worker: ScriptedWorker, path: str, fields: Any, is_closed: bool
) -> None:
    """`strict` of an answer's schema changes nothing."""
    worker.script = say("{}")
    body = {"model": "tiny", "messages": HI, "max_tokens": 9}
    if path in ("completions", "responses"):
        del body["messages"]
        body |= {"prompt": "Hi"} if path == "completions" else {"input": "Hi"}
    if path == "responses":
        body["max_output_tokens"] = body.pop("max_tokens")
    client.post(f"/{path}", body={**body, **fields}, cast_to=httpx.Response)
    (grammar,) = json.loads(worker.requests[-1].grammar)["grammars"]
    assert (grammar["json_schema"].get("additionalProperties") is False) is is_closed


def test_a_format_is_an_annotation(client: openai.OpenAI, worker: ScriptedWorker) -> None:
    """Also where the schema is strict."""
    worker.script = say("{}")
    schema = {"type": "object", "properties": {"a": {"type": "string", "format": "phone"}}}
    raw = client.chat.completions.with_raw_response.create(
        model="tiny",
        messages=HI,
        response_format=schema_format(schema, True),  # pyright: ignore[reportArgumentType]
    )
    assert raw.headers["loraplex-dropped"] == "response_format.format"


def nested(depth: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "integer"}
    for _ in range(depth):
        schema = {"items": schema}
    return schema


@pytest.mark.parametrize(
    ("fields", "param", "words"),
    [
        ({"response_format": schema_format({"not": {"type": "null"}}, True)}, "response_format",
         "'not' cannot be enforced"),
        ({"response_format": schema_format({"uniqueItems": True}, True)}, "response_format",
         "uniqueItems"),
        ({"guided_json": {"oneOf": [{"type": "object"}, {}]}}, "guided_json", "oneOf"),
        ({"guided_json": {"$ref": "http://x/y"}}, "guided_json", "http://x/y"),
        ({"guided_json": "{"}, "guided_json", "JSON Schema"),
        ({"guided_json": nested(70)}, "guided_json", "64"),
        ({"guided_json": '{"a":' * 5000 + "0" + "}" * 5000}, "guided_json", "64"),
        ({"guided_json": {"enum": ["x" * 300_000]}}, "guided_json", "262144"),
        ({"guided_json": chain("%s", 2_500)}, "guided_json", "128"),
        ({"guided_json": chain(DOUBLES["allOf"], 30, pattern("a"))}, "guided_json", "MiB"),
        ({"guided_json": properties(8_000)}, "guided_json", "compiler"),
        ({"guided_json": pattern("a?" * 8_000)}, "guided_json", "4096"),
        ({"guided_regex": "a?" * 20_000}, "guided_regex", "16384 bytes"),
        ({"structured_outputs": {"regex": "a?" * 20_000}}, "structured_outputs", "40000"),
        ({"guided_grammar": rules(RULES["rules"], 2_700)}, "guided_grammar", "2702"),
        ({"guided_regex": "(?<=x)a"}, "guided_regex", "look"),
        ({"guided_grammar": "start: missing"}, "guided_grammar", "missing"),
        ({"guided_regex": "a", "guided_choice": ["b"]}, "guided_choice", "one schema or grammar"),
        ({"guided_choice": [""]}, "guided_choice", "length"),
        ({"response_format": {"type": "grammar"}}, "response_format", "grammar"),
    ],
)  # fmt: skip
def test_what_cannot_be_followed_is_refused_by_name(
    client: openai.OpenAI, worker: ScriptedWorker, fields: dict[str, Any], param: str, words: str
) -> None:
    num_before = len(worker.requests)
    with pytest.raises(openai.BadRequestError) as refused:
        client.chat.completions.create(model="tiny", messages=HI, extra_body=fields)
    assert refused.value.param == param
    assert words in refused.value.message
    assert len(worker.requests) == num_before


def deep_choice(depth: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "integer"}
    for _ in range(depth):
        schema = {"anyOf": [schema, {"type": "array", "items": schema}]}
    return schema


@pytest.mark.parametrize(
    "fields",
    [
        {"guided_json": deep_choice(11)},
        {"guided_json": {"enum": [f"{n}" for n in range(20_000)]}},
        {"guided_regex": "(a+)+(b{900}c{900}){900}"},
        {"guided_regex": "(x|y|xy)*" * 200},
        {"guided_grammar": "start: " + " ".join(['("a"|"b")*'] * 3000)},
    ],
    ids=["deep", "enum", "counted", "ambiguous", "long"],
)
def test_a_bomb_is_refused_or_bounded(client: openai.OpenAI, fields: dict[str, Any]) -> None:
    """While it is compiled the event loop goes on: others are answered."""
    begun = time.monotonic()
    try:
        client.chat.completions.create(model="tiny", messages=HI, max_tokens=4, extra_body=fields)
    except openai.BadRequestError as refused:
        assert refused.code in ("unsupported_constraint", "request_too_large", None)
    assert time.monotonic() - begun < 20
