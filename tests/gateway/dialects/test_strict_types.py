"""Whole answers and each event of a stream are what the official clients' types say, in pydantic's
strict mode: no key is unknown, and a key is null only where the published schemas allow null."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any, cast

import httpx
import pydantic
import pytest
from anthropic.types import Message, MessageTokensCount, RawMessageStreamEvent
from openai.types import Completion, CreateEmbeddingResponse, Model
from openai.types.chat import ChatCompletion, ChatCompletionChunk
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import TypeAdapter

from tests.gateway.dialects.response_schema import NOT_IN_CLIENT
from tests.gateway.dialects.test_all_dialects import ask
from tests.gateway.dialects.test_answers import CALL, THOUGHT
from tests.gateway.scripted import ScriptedWorker
from tests.gateway.scripts import say
from tests.gateway.service import Service
from tests.gateway.templated import templated_service

EXTRA: dict[str, set[str]] = {
    **NOT_IN_CLIENT,
    "ChatCompletion": {"prompt_logprobs", "prompt_token_ids"},
    "Choice": {"stop_reason", "token_ids"},
    "ChatCompletionMessage": {"reasoning", "reasoning_content"},
    "ChoiceDelta": {"reasoning", "reasoning_content"},
    "CompletionChoice": {"stop_reason", "token_ids", "prompt_logprobs", "prompt_token_ids"},
    "CreateEmbeddingResponse": {"id", "created"},
    "Usage": {"completion_tokens"},
    "Model": {"root", "parent", "max_model_len", "adapter"},
}
"""Keys of vLLM's answers, which the official clients' types lack, by the name of the type."""
NULL: dict[str, set[str]] = {
    "ChatCompletionMessage": {"content", "refusal"},
    "Choice": {"logprobs", "finish_reason"},
    "ChoiceLogprobs": {"refusal"},
    "ChatCompletionChunk": {"usage"},
    "CompletionChoice": {"logprobs", "finish_reason"},
    "Completion": {"usage"},
    "Message": {"container", "diagnostics", "stop_details", "stop_reason", "stop_sequence"},
    "Usage": {
        *("cache_creation", "inference_geo", "server_tool_use", "service_tier", "speed"),
    },
    "TextBlock": {"citations"},
    "ToolUseBlock": {"toolset_name"},
    "Delta": {"container", "stop_details", "stop_sequence"},
    "MessageDeltaUsage": {"server_tool_use"},
    "Response": {
        *("completed_at", "error", "incomplete_details", "instructions", "max_output_tokens"),
        *("max_tool_calls", "previous_response_id", "prompt_cache_key", "safety_identifier"),
        *("usage", "user"),
    },
    "Reasoning": {"effort", "summary"},
    "FunctionTool": {"description", "parameters", "strict"},
}
"""Keys that the published schemas allow to be null, by the name of the type."""


def check(kind: Any, data: Any) -> None:
    """Raises an error unless the data is strictly of the type."""
    written = json.dumps(data)
    check_keys(TypeAdapter(kind).validate_json(written, strict=True))


def check_keys(value: Any) -> None:
    if isinstance(value, list):
        for each in cast(list[Any], value):
            check_keys(each)
    if not isinstance(value, pydantic.BaseModel):
        return
    name, extra = type(value).__name__, value.model_extra or {}
    unknown = extra.keys() - EXTRA.get(name, set())
    assert not unknown, f"{name} has no {unknown}"
    for key in value.model_fields_set - extra.keys():
        inner = getattr(value, key)
        assert inner is not None or key in NULL.get(name, ()), f"{name}.{key} is null"
        check_keys(inner)


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    """Its model has the chat template of Qwen 3."""
    with templated_service(tmp_path_factory.mktemp("qwen3")) as service:
        yield service


def post(service: Service, path: str, body: dict[str, Any]) -> httpx.Response:
    headers = {"authorization": f"Bearer {service.keys.acme}"}
    answer = httpx.post(f"{service.url}/v1/{path}", json=body, headers=headers, timeout=20)
    assert answer.status_code == 200, answer.text
    return answer


def events(answer: httpx.Response) -> list[Any]:
    lines = [line[6:] for line in answer.text.splitlines() if line.startswith("data: ")]
    return [json.loads(line) for line in lines if line != "[DONE]"]


WRITTEN = {
    "text": "Well.",
    "thought and call": f"{THOUGHT}Well.\n{CALL}",
    "cut in a thought": THOUGHT[:20],
    "nothing": "",
}
TEXT = {"model": "tiny", "prompt": "Hi", "max_tokens": 20}
USAGE = {"stream": True, "stream_options": {"include_usage": True}}
ASKED: dict[str, tuple[str, dict[str, Any], Any, Any]] = {
    "chat": ("chat/completions", ask("chat"), ChatCompletion, ChatCompletionChunk),
    "scored chat": (
        "chat/completions",
        ask("chat", logprobs=True, top_logprobs=2, n=2),
        ChatCompletion,
        ChatCompletionChunk,
    ),
    "completion": ("completions", TEXT, Completion, Completion),
    "scored completion": ("completions", TEXT | {"logprobs": 2, "n": 2}, Completion, Completion),
    "message": ("messages", ask("messages"), Message, RawMessageStreamEvent),
    "response": ("responses", ask("responses"), Response, ResponseStreamEvent),
    "scored response": (
        "responses",
        ask("responses", top_logprobs=2, reasoning={"summary": "auto"}),
        Response,
        ResponseStreamEvent,
    ),
}


@pytest.mark.parametrize("written", WRITTEN)
@pytest.mark.parametrize("name", ASKED)
def test_answers_and_events_are_strictly_of_their_types(
    service: Service, worker: ScriptedWorker, name: str, written: str
) -> None:
    path, body, whole, event = ASKED[name]
    worker.script = say(WRITTEN[written], per_step=3)
    check(whole, post(service, path, body).json())
    streamed = body | (USAGE if event in (ChatCompletionChunk, Completion) else {"stream": True})
    told = events(post(service, path, streamed))
    assert told
    for each in told:
        if event is Completion:
            # The client has no type for chunks, whose reason OpenAI's API leaves null, too.
            for choice in each["choices"]:
                choice["finish_reason"] = choice["finish_reason"] or "stop"
        check(event, each)


@pytest.mark.parametrize("path", ["messages", "responses", "chat/completions"])
def test_a_forced_call_that_is_cut_is_strictly_of_its_type(
    service: Service, worker: ScriptedWorker, path: str
) -> None:
    """And a response has an item, which is incomplete."""
    dialect = {"chat/completions": "chat"}.get(path, path)
    worker.script = say(THOUGHT + CALL)
    field = "max_output_tokens" if dialect == "responses" else "max_tokens"
    choice = {"type": "any"} if dialect == "messages" else "required"
    body = ask(dialect, **{"tool_choice": choice, field: 4})
    kind = {"messages": Message, "responses": Response, "chat": ChatCompletion}[dialect]
    whole = post(service, path, body).json()
    check(kind, whole)
    worker.script = say(CALL[:8])
    body = ask(dialect, **{"tool_choice": choice, field: 8})
    whole = post(service, path, body).json()
    check(kind, whole)
    if dialect == "responses":
        told = events(post(service, path, body | {"stream": True}))
        for each in told:
            check(ResponseStreamEvent, each)
        for response in (whole, told[-1]["response"]):
            (item,) = response["output"]
            assert (item["type"], item["status"]) == ("message", "incomplete")
            assert [part["text"] for part in item["content"]] == [""]


def test_other_answers_are_strictly_of_their_types(
    service: Service, worker: ScriptedWorker
) -> None:
    worker.script = say("ok")
    for form in ("float", "base64"):
        body = {"model": "tiny", "input": ["a", "b"], "encoding_format": form}
        found = post(service, "embeddings", body).json()
        assert found["usage"]["completion_tokens"] == 0 and found["id"].startswith("embd-")
        if form == "float":
            check(CreateEmbeddingResponse, found)
    counted = {key: value for key, value in ask("messages").items() if key != "max_tokens"}
    check(MessageTokensCount, post(service, "messages/count_tokens", counted).json())
    headers = {"authorization": f"Bearer {service.keys.acme}"}
    models = httpx.get(f"{service.url}/v1/models", headers=headers).json()["data"]
    assert models
    check(list[Model], models)
