"""What is the same whatever dialect a client speaks: tokens, calls and failures."""

from __future__ import annotations

from typing import Any

import httpx
import openai
import pytest

from tests.gateway.scripts import say, spelled
from tests.gateway.service import Service
from tests.scripted_worker import ScriptedWorker

SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {"city": {"type": "string"}},
    "required": ["city"],
}
CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Bern"}}\n</tool_call>'
THOUGHT = "<think>\nLook it up.\n</think>\n\n"

PATHS = {
    "chat": "/v1/chat/completions",
    "messages": "/v1/messages",
    "responses": "/v1/responses",
}
LENGTH_FIELD = {"chat": "max_tokens", "messages": "max_tokens", "responses": "max_output_tokens"}
DIALECTS = sorted(PATHS)
CONVERSATIONS: dict[str, dict[str, Any]] = {
    "chat": {
        "tools": [{"type": "function", "function": {"name": "get_weather", "parameters": SCHEMA}}],
        "messages": [
            {"role": "system", "content": "Be brief."},
            {"role": "user", "content": [{"type": "text", "text": "Weather"}]},
            {
                "role": "assistant",
                "content": "One moment.",
                "reasoning_content": "Look it up.",
                "tool_calls": [
                    {
                        "id": "call_1",
                        "type": "function",
                        "function": {"name": "get_weather", "arguments": '{"city": "Bern"}'},
                    }
                ],
            },
            {"role": "tool", "tool_call_id": "call_1", "content": "Rain"},
            {"role": "user", "content": "And now?"},
        ],
    },
    "messages": {
        "tools": [{"name": "get_weather", "input_schema": SCHEMA}],
        "system": [{"type": "text", "text": "Be brief."}],
        "messages": [
            {"role": "user", "content": "Weather"},
            {
                "role": "assistant",
                "content": [
                    {"type": "thinking", "thinking": "Look it up.", "signature": ""},
                    {"type": "text", "text": "One moment."},
                    {
                        "type": "tool_use",
                        "id": "call_1",
                        "name": "get_weather",
                        "input": {"city": "Bern"},
                    },
                ],
            },
            {
                "role": "user",
                "content": [
                    {
                        "type": "tool_result",
                        "tool_use_id": "call_1",
                        "content": [{"type": "text", "text": "Rain"}],
                    },
                    {"type": "text", "text": "And now?"},
                ],
            },
        ],
    },
    "responses": {
        "tools": [
            {"type": "function", "name": "get_weather", "parameters": SCHEMA, "strict": False}
        ],
        "instructions": "Be brief.",
        "input": [
            {"role": "user", "content": "Weather"},
            {
                "type": "reasoning",
                "id": "rs_1",
                "summary": [],
                "content": [{"type": "reasoning_text", "text": "Look it up."}],
            },
            {
                "type": "message",
                "role": "assistant",
                "content": [{"type": "output_text", "text": "One moment.", "annotations": []}],
            },
            {
                "type": "function_call",
                "call_id": "call_1",
                "name": "get_weather",
                "arguments": '{"city": "Bern"}',
            },
            {"type": "function_call_output", "call_id": "call_1", "output": "Rain"},
            {"role": "user", "content": "And now?"},
        ],
    },
}


@pytest.fixture(scope="module")
def service(qwen3: Service) -> Service:
    return qwen3


def ask(dialect: str, **options: Any) -> dict[str, Any]:
    """A body that says the same in each dialect."""
    return CONVERSATIONS[dialect] | {"model": "tiny", LENGTH_FIELD[dialect]: 400} | options


def post(service: Service, dialect: str, **options: Any) -> httpx.Response:
    headers = {"authorization": f"Bearer {service.keys.acme}"}
    url = service.url + PATHS[dialect]
    return httpx.post(url, json=ask(dialect, **options), headers=headers, timeout=20)


def test_the_same_conversation_is_the_same_tokens(service: Service, worker: ScriptedWorker) -> None:
    worker.script = say("ok")
    before = len(worker.requests)
    for dialect in DIALECTS:
        assert post(service, dialect).status_code == 200
    asked = worker.requests[before:]
    assert len(asked) == len(DIALECTS)
    assert "Rain" in spelled(asked[0].tokens) and "get_weather" in spelled(asked[0].tokens)
    assert asked[0].tokens == asked[1].tokens == asked[2].tokens
    counted = httpx.post(
        f"{service.url}/v1/messages/count_tokens",
        json=CONVERSATIONS["messages"] | {"model": "tiny"},
        headers={"x-api-key": service.keys.acme},
        timeout=20,
    )
    assert counted.json() == {"input_tokens": len(asked[0].tokens)}


@pytest.mark.parametrize("stream", [False, True])
def test_reasoning_is_carried_by_clients_that_send_no_text_of_it_back(
    client: openai.OpenAI, worker: ScriptedWorker, stream: bool
) -> None:
    worker.script = say(f"{THOUGHT}{CALL}", per_step=3)
    asked = ask("responses", include=["reasoning.encrypted_content"])
    if stream:
        *_, last = client.responses.create(**asked, stream=True)
        answer: Any = last.response
    else:
        answer = client.responses.create(**asked)
    thought, call = [item.to_dict() for item in answer.output]
    output = {"type": "function_call_output", "call_id": call["call_id"], "output": "7"}
    for sent in (thought, {**thought, "content": None}):
        client.responses.create(**ask("responses", input=[*asked["input"], sent, call, output]))
    shown, carried = worker.requests[-2:]
    assert shown.tokens == carried.tokens and "Look it up." in spelled(shown.tokens)
    foreign = {"type": "reasoning", "id": "r", "summary": [], "encrypted_content": "gAAAA"}
    raw = client.responses.with_raw_response.create(**ask("responses", input=[foreign, call]))
    assert raw.headers["loraplex-dropped"] == "reasoning_items"
