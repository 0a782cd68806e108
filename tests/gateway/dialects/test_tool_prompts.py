"""What a request with tools becomes before a model sees it."""

from __future__ import annotations

from typing import Any

import httpx
import openai
import pytest

from tests.gateway.dialects.test_chat import HELLO
from tests.gateway.scripted import ScriptedWorker
from tests.gateway.scripts import say, spelled
from tests.gateway.service import Service

WEATHER: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Weather of a place.",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
    },
}
CALL = {
    "id": "call_1",
    "type": "function",
    "function": {"name": "get_weather", "arguments": '{"city": "Bern"}'},
}
TURNS: list[Any] = [
    {"role": "user", "content": "Weather?"},
    {"role": "assistant", "content": None, "tool_calls": [CALL]},
    {"role": "tool", "tool_call_id": "call_1", "content": [{"type": "text", "text": "rain"}]},
]


@pytest.fixture
def prompt(client: openai.OpenAI, worker: ScriptedWorker):
    """The prompt that the worker was given for a chat."""
    worker.script = say("ok")

    def ask(messages: list[Any], **fields: Any) -> str:
        client.chat.completions.create(model="tiny", messages=messages, max_tokens=1, **fields)
        return spelled(worker.requests[-1].tokens)

    return ask


def test_a_template_without_tools_shows_them_in_plain_messages(service: Service, worker) -> None:
    """The tiny model's context is too short for them: /tokenize and /detokenize show the same."""
    headers = {"authorization": f"Bearer {service.keys.acme}"}
    with httpx.Client(base_url=service.url, headers=headers) as client:
        body = {"model": "tiny", "messages": TURNS, "tools": [WEATHER]}
        tokens = client.post("/tokenize", json=body).json()["tokens"]
        text = client.post("/detokenize", json={"model": "tiny", "tokens": tokens}).json()["prompt"]
    system, *turns = text.split("<|im_start|>")[1:]
    assert system.startswith("system\n# Tools")
    assert '{"type": "function", "function": {"name": "get_weather", "description": ' in system
    assert turns == [
        "user\nWeather?<|im_end|>\n",
        'assistant\n<tool_call>\n{"name": "get_weather", "arguments": {"city": "Bern"}}\n'
        "</tool_call><|im_end|>\n",
        "user\n<tool_response>\nrain\n</tool_response><|im_end|>\n",
        "assistant\n",
    ]


def test_tools_that_must_not_be_called_are_not_shown(prompt) -> None:
    assert prompt(HELLO, tools=[WEATHER], tool_choice="none") == prompt(HELLO)


@pytest.mark.parametrize(
    "fields",
    [
        {"tools": []},
        {"tools": None},
        {"tool_choice": "none", "parallel_tool_calls": False},
        {"reasoning_effort": "none"},
        {"extra_body": {"chat_template_kwargs": {}, "add_generation_prompt": True}},
    ],
)
def test_what_asks_for_nothing_changes_nothing(prompt, fields: dict[str, Any]) -> None:
    assert prompt(HELLO, **fields) == prompt(HELLO)


def test_an_answer_goes_on_with_the_last_message(prompt) -> None:
    turns = [*HELLO, {"role": "assistant", "content": "Well, "}]
    assert prompt(turns, extra_body={"continue_final_message": True}) == (
        "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\nWell, "
    )
    assert prompt(HELLO, extra_body={"add_generation_prompt": False}) == (
        "<|im_start|>user\nHi<|im_end|>\n"
    )


def named(name: str) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name}}


def nested(depth: int) -> dict[str, Any]:
    value: dict[str, Any] = {}
    for _ in range(depth):
        value = {"a": value}
    return value


REFUSED: list[tuple[str, dict[str, Any]]] = [
    ("tools", {"tools": [named(f"f{i}") for i in range(257)]}),
    ("tools", {"tools": [named("f"), named("f")]}),
    ("tools", {"tools": [named("a b")]}),
    ("tools", {"tools": [{"type": "function", "function": {"name": "f", "returns": "x"}}]}),
    ("tools", {"tools": [{"type": "function"}]}),
    ("tools", {"tools": [{**named("f"), "function": {"name": "f", "parameters": nested(70)}}]}),
    (
        "tools",
        {"tools": [{**named("f"), "function": {"name": "f", "description": "x" * (256 << 10)}}]},
    ),
    ("tool_choice", {"tool_choice": "required"}),
    ("tool_choice", {"tools": [WEATHER], "tool_choice": named("other")}),
    ("tool_choice", {"tools": [WEATHER], "tool_choice": "any"}),
    ("reasoning_effort", {"reasoning_effort": "huge"}),
    ("chat_template_kwargs", {"chat_template_kwargs": {"messages": []}}),
    ("chat_template_kwargs", {"chat_template_kwargs": {"a": nested(70)}}),
    ("chat_template_kwargs", {"chat_template_kwargs": {"a": "x" * (64 << 10)}}),
    ("continue_final_message", {"continue_final_message": True, "add_generation_prompt": True}),
    ("messages", {"messages": [{"role": "critic", "content": "x"}]}),
    ("messages", {"messages": [{"role": "user"}]}),
    ("messages", {"messages": [{"role": "user", "content": "", "tool_calls": [CALL]}]}),
]


@pytest.mark.parametrize(("param", "fields"), REFUSED)
def test_what_is_refused(client: openai.OpenAI, param: str, fields: dict[str, Any]) -> None:
    with pytest.raises(openai.BadRequestError) as refusal:
        client.post(
            "/chat/completions",
            body={"model": "tiny", "messages": HELLO, "max_tokens": 1, **fields},
            cast_to=object,
        )
    assert refusal.value.param == param
