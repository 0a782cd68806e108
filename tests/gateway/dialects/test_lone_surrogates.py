"""Halves of surrogate pairs, which clients leave where they cut an emoji, refuse no history."""

from __future__ import annotations

import json
import time
from typing import Any

import httpx
import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.gateway.scripts import say, spelled
from tests.gateway.service import Service
from tests.scripted_worker import ScriptedWorker
from web.lone_surrogates import replace_lone_surrogates

HALF = "cut \ud83d"
CALL = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
USER = {"role": "user", "content": "Hi"}
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}


def chat(*messages: Any, **fields: Any) -> tuple[str, dict[str, Any]]:
    return "/v1/chat/completions", {"messages": [USER, *messages, USER], **fields}


def call_with(arguments: Any) -> dict[str, Any]:
    function = {"name": "f", "arguments": arguments}
    return {"role": "assistant", "tool_calls": [{**CALL, "function": function}]}


def messages(*blocks: Any) -> tuple[str, dict[str, Any]]:
    return "/v1/messages", {"messages": [USER, *blocks], "max_tokens": 5}


def responses(*items: Any) -> tuple[str, dict[str, Any]]:
    return "/v1/responses", {"input": [{"role": "user", "content": "Hi"}, *items]}


USE = {
    "role": "assistant",
    "content": [{"type": "tool_use", "id": "c1", "name": "f", "input": {"a": HALF}}],
}
RESULT = {
    "role": "user",
    "content": [{"type": "tool_result", "tool_use_id": "c1", "content": HALF}],
}
RESPONSES_CALL = {"type": "function_call", "call_id": "c1", "name": "f"}
REQUESTS: dict[str, tuple[str, dict[str, Any]]] = {
    "chat text": chat({"role": "assistant", "content": HALF}),
    "chat result": chat(
        call_with("{}"),
        {"role": "tool", "tool_call_id": "c1", "content": [{"type": "text", "text": HALF}]},
    ),
    "chat arguments": chat(call_with('{"a": "cut \ud83d"}')),
    "chat escaped arguments": chat(call_with('{"a": "cut \\ud83d"}')),
    "chat argument's key": chat(call_with('{"cut \\ude00": 1}')),
    "chat name of a call": chat(
        {"role": "assistant", "tool_calls": [{**CALL, "function": {"name": HALF, "arguments": ""}}]}
    ),
    "chat unknown key": chat({"role": "assistant", "content": "a", HALF: 1}),
    "chat stop": chat(stop=[HALF]),
    "messages text": messages({"role": "assistant", "content": HALF}, USER),
    "messages use and result": messages(USE, RESULT),
    "responses output": responses(
        {**RESPONSES_CALL, "arguments": "{}"},
        {"type": "function_call_output", "call_id": "c1", "output": HALF},
    ),
    "responses arguments": responses(
        {**RESPONSES_CALL, "arguments": '{"a": "\\ud83d"}'},
        {"type": "function_call_output", "call_id": "c1", "output": "b"},
    ),
    "prompt": ("/v1/completions", {"prompt": HALF}),
    "prompts": ("/v1/embeddings", {"input": ["a", HALF]}),
    "texts": ("/v2/embed", {"texts": [HALF]}),
    "tokenize": ("/tokenize", {"prompt": HALF}),
    "count": ("/v1/messages/count_tokens", {"messages": [{"role": "user", "content": HALF}]}),
}


@pytest.fixture(scope="module")
def service(qwen3: Service) -> Service:
    return qwen3


def post(service: Service, path: str, body: dict[str, Any]) -> httpx.Response:
    return httpx.post(
        f"{service.url}{path}",
        content=json.dumps({"model": "tiny", **body}),
        headers={"authorization": f"Bearer {service.keys.acme}"},
    )


@pytest.mark.parametrize("name", REQUESTS)
def test_half_a_pair_is_replaced_and_named(
    service: Service, worker: ScriptedWorker, name: str
) -> None:
    worker.script = say("ok")
    answer = post(service, *REQUESTS[name])
    assert answer.status_code == 200, answer.text
    assert "lone_surrogates" in answer.headers["loraplex-dropped"].split(", ")


def test_the_model_reads_a_replacement_character(service: Service, worker: ScriptedWorker) -> None:
    worker.script = say("ok")
    assert post(service, *REQUESTS["prompt"]).status_code == 200
    assert spelled(worker.requests[-1].tokens) == "cut \ufffd"


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/tokenize", "/v1/messages"])
def test_half_a_pair_in_the_models_name_is_refused_by_name(service: Service, path: str) -> None:
    answer = post(
        service,
        path,
        {"model": HALF, "messages": [USER], **({"max_tokens": 1} if "messages" in path else {})},
    )
    error = answer.json()["error"]
    assert answer.status_code == 400
    assert "'model'" in error["message"] and "surrogate" in error["message"]


def test_other_faults_are_still_named(service: Service) -> None:
    path, body = REQUESTS["chat text"]
    answer = post(service, path, {**body, "other": 1})
    assert answer.json()["error"]["message"] == "Unsupported parameter: 'other'."
    answer = httpx.post(
        f"{service.url}{path}",
        content=b'{"a": "\\ud83d", ',
        headers={"authorization": f"Bearer {service.keys.acme}"},
    )
    assert "not valid JSON" in answer.json()["error"]["message"]


TEXTS = st.text(st.sampled_from('\\u"dD8a0\n\ud83d\ude00\udc00\U0001f600é'), max_size=30)


@given(text=TEXTS)
def test_only_halves_are_replaced(text: str) -> None:
    """Python's own decoder joins what is a pair."""
    written = json.dumps({"a": text}).encode()
    joined = json.loads(written)["a"]
    expected = "".join("\ufffd" if 0xD800 <= ord(each) < 0xE000 else each for each in joined)
    replaced = replace_lone_surrogates(written)
    assert msgspec.json.decode(replaced) == {"a": expected}
    assert (replaced is written) == (expected == joined)


@pytest.mark.parametrize("part", [b"\\ud83d", b"\\\\", b"\\ud83d\\ude00", b"\\\\ud83d", b"a"])
def test_a_large_body_is_searched_in_bounded_time(part: bytes) -> None:
    body = b'"%s\\ud83d"' % (part * ((10 << 20) // len(part)))
    began = time.process_time()
    replace_lone_surrogates(body)
    assert time.process_time() - began < 2
