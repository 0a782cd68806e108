"""Every field of the official client's requests, and of vLLM's, and what becomes of it."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from openai.types.chat.completion_create_params import CompletionCreateParamsBase as ChatParams
from openai.types.completion_create_params import CompletionCreateParamsBase as TextParams
from openai.types.responses.response_create_params import (
    ResponseCreateParamsBase as ResponseParams,
)

from gateway.dialects.chat_completions import ChatCompletionRequest
from gateway.dialects.completions import CompletionRequest
from gateway.dialects.responses_fields import ResponsesRequest
from tests.gateway.scripted import ScriptedWorker
from tests.gateway.scripts import say

PAGE = Path(__file__).parents[3] / "docs/use/api-responses.md"
NOTHING: dict[str, list[Any]] = {
    "frequency_penalty": [0],
    "function_call": ["none", "auto"],
    "functions": [[]],
    "logit_bias": [{}],
    "logprobs": [False],
    "metadata": [{}],
    "modalities": [["text"]],
    "n": [1],
    "parallel_tool_calls": [True, False],
    "presence_penalty": [0],
    "prompt_cache_retention": ["in_memory"],
    "reasoning_effort": ["none"],
    "response_format": [{"type": "text"}],
    "service_tier": ["auto", "default"],
    "stop": [[]],
    "store": [False],
    "tool_choice": ["none", "auto"],
    "tools": [[]],
    "top_logprobs": [0],
    "verbosity": ["medium"],
    "best_of": [1],
    "suffix": [""],
    "echo": [False],
    "allowed_token_ids": [[]],
    "bad_words": [[]],
    "thinking_token_budget": [-1],
    "use_beam_search": [False],
    "length_penalty": [1.0],
    "spaces_between_special_tokens": [True],
    "skip_special_tokens": [True],
    "include_reasoning": [True],
}
"""Values beside null that ask for nothing."""
REFUSED: dict[str, Any] = {
    "audio": {"voice": "a", "format": "wav"},
    "best_of": 2,
    "function_call": {"name": "f"},
    "functions": [{"name": "f"}],
    "modalities": ["text", "audio"],
    "moderation": {"model": "m"},
    "suffix": "x",
    "web_search_options": {},
}
DROPPED: dict[str, Any] = {
    "prediction": {"type": "content", "content": "x"},
    "prompt_cache_options": {"mode": "implicit"},
    "prompt_cache_retention": "24h",
    "service_tier": "flex",
    "store": True,
    "verbosity": "low",
}
CHAT: dict[str, Any] = {"messages": [{"role": "user", "content": "Hi"}]}
TEXT: dict[str, Any] = {"prompt": "Hi"}
ROUTES: dict[str, tuple[str, Any, dict[str, Any], Any]] = {
    "chat": ("/chat/completions", ChatParams, CHAT, ChatCompletionRequest),
    "text": ("/completions", TextParams, TEXT, CompletionRequest),
}
NEEDED = {"model", "messages", "prompt"}


def send(client: openai.OpenAI, route: str, **fields: Any) -> httpx.Response:
    path, _, body, _ = ROUTES[route]
    body = {"model": "support-bot", "max_tokens": 2, **body, **fields}
    return client.post(path, body=body, cast_to=httpx.Response)


@pytest.mark.parametrize("route", ROUTES)
def test_every_field_of_the_client_may_ask_for_nothing(
    client: openai.OpenAI, worker: ScriptedWorker, route: str
) -> None:
    """Each alone, and null in all of them at once."""
    worker.script = say("ok")
    _, params, _, schema = ROUTES[route]
    names = set(params.__annotations__) - NEEDED
    assert names <= set(schema.__struct_fields__)
    for name in {*names, *NOTHING} & set(schema.__struct_fields__):
        for value in NOTHING.get(name, []):
            if (route, name) != ("text", "logprobs"):
                assert "loraplex-dropped" not in send(client, route, **{name: value}).headers, name
    others = set(schema.__struct_fields__) - NEEDED
    assert "loraplex-dropped" not in send(client, route, **dict.fromkeys(others)).headers


@pytest.mark.parametrize("route", ROUTES)
def test_what_changes_the_answer_and_is_not_supported_is_refused(
    client: openai.OpenAI, route: str
) -> None:
    schema = ROUTES[route][3]
    for name in set(REFUSED) & set(schema.__struct_fields__):
        with pytest.raises(openai.BadRequestError) as refusal:
            send(client, route, **{name: REFUSED[name]})
        assert (refusal.value.param, refusal.value.code) == (name, "unsupported_parameter")
        assert "null" in refusal.value.message
    assert set(DROPPED) | set(REFUSED) <= {
        *ChatCompletionRequest.__struct_fields__,
        *CompletionRequest.__struct_fields__,
    }


def test_wishes_are_dropped_and_named(client: openai.OpenAI, worker: ScriptedWorker) -> None:
    worker.script = say("ok")
    for name, value in DROPPED.items():
        assert send(client, "chat", **{name: value}).headers["loraplex-dropped"] == name
    named = send(client, "chat", **DROPPED, stream=True).headers["loraplex-dropped"]
    assert named.split(", ") == sorted(DROPPED)


def test_every_field_of_a_response_has_its_place_on_the_page() -> None:
    """Effective, dropped, or refused by name."""
    section = PAGE.read_text().split("## Refused and additional fields\n")[1].split("\n## ")[0]
    taken, schema = set(ResponseParams.__annotations__), set(ResponsesRequest.__struct_fields__)
    refused = names_in(section.split("these are refused:")[1].split(", and values of")[0])
    assert refused == taken - schema
    further = names_in(section.split("the route accepts")[1])
    assert schema - taken == {"stream", "client_metadata"} | further
    assert further <= set(ChatCompletionRequest.__struct_fields__)


def names_in(text: str) -> set[str]:
    return set(re.findall(r"`([a-z_]+)`", text))


def test_special_tokens_and_the_stop_string_in_the_text(
    client: openai.OpenAI, worker: ScriptedWorker
) -> None:
    worker.script = say("one STOP two")
    shown = {"include_stop_str_in_output": True}
    for stop, text in (("STOP", "one STOP"), ("never", "one STOP two")):
        answer = client.chat.completions.create(
            model="tiny", stop=stop, extra_body=shown, messages=CHAT["messages"]
        )
        assert answer.choices[0].message.content == text
