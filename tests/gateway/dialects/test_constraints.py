"""Fields that hold an answer to a schema or a grammar: what a worker gets, and what is refused."""

from __future__ import annotations

import time
from typing import Any

import openai
import pytest

from tests.gateway.scripts import say
from tests.scripted_worker import ScriptedWorker

HI: Any = [{"role": "user", "content": "Hi"}]


UNENFORCED: dict[str, Any] = {
    "type": "object",
    "properties": {
        "tags": {"type": "array", "items": {"type": "string"}, "uniqueItems": True},
        "path": {"type": "string", "format": "file-path"},
        "kept": {"const": 77},
    },
}


def test_what_cannot_be_enforced_is_named_where_the_grammar_is_kept_from_before(
    client: openai.OpenAI, worker: ScriptedWorker
) -> None:
    worker.script = say("{}")
    for _ in range(2):
        raw = client.chat.completions.with_raw_response.create(
            model="tiny", messages=HI, extra_body={"guided_json": UNENFORCED}
        )
        assert raw.headers["loraplex-dropped"] == "guided_json.format, guided_json.uniqueItems"
    assert "77" in worker.requests[-1].grammar


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
