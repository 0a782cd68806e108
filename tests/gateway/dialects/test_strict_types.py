"""Whole answers and each event of a stream are what the official clients' types say, in pydantic's
strict mode: no key is unknown, and a key is null only where the published schemas allow null."""

from __future__ import annotations

import json
from functools import cache
from typing import Any, cast

import pydantic
import pytest
from anthropic.types import Message, MessageTokensCount, RawMessageStreamEvent
from openai.types import Completion, CreateEmbeddingResponse, Model
from openai.types.chat import ChatCompletion, ChatCompletionChunk
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import TypeAdapter

from tests.gateway import recorded
from tests.gateway.dialects.cases import cases
from tests.gateway.dialects.response_schema import NOT_IN_CLIENT, check_event, check_response

EXTRA: dict[str, set[str]] = {
    **NOT_IN_CLIENT,
    "ChatCompletion": {"prompt_logprobs", "prompt_token_ids"},
    "ChatCompletionChunk": {"prompt_token_ids"},
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
    # As OpenAI's API answers, though the schema does not say so.
    "ResponseFormatTextJSONSchemaConfig": {"description", "strict"},
    "ToolFunction": {"description", "parameters", "strict"},
}
"""Keys that the published schemas allow to be null, by the name of the type."""


def check(kind: Any, data: Any) -> None:
    """Raises an error unless the data is strictly of the type."""
    written = json.dumps(data)
    check_keys(_adapter(kind).validate_json(written, strict=True))


@cache
def _adapter(kind: Any) -> TypeAdapter[Any]:
    return TypeAdapter(kind)


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


KINDS: dict[str, tuple[Any, Any]] = {
    "/v1/chat/completions": (ChatCompletion, ChatCompletionChunk),
    "/v1/completions": (Completion, Completion),
    "/v1/messages": (Message, RawMessageStreamEvent),
    "/v1/responses": (Response, ResponseStreamEvent),
    "/v1/messages/count_tokens": (MessageTokensCount, None),
    "/v1/embeddings": (CreateEmbeddingResponse, None),
}
"""Types of a whole answer and of an event, by path."""


def events(text: str) -> list[Any]:
    lines = [line[6:] for line in text.splitlines() if line.startswith("data: ")]
    return [json.loads(line) for line in lines if line != "[DONE]"]


@pytest.mark.parametrize("path", KINDS)
def test_recorded_answers_and_events_are_strictly_of_their_types(path: str) -> None:
    """Of an error in a stream the clients make an exception."""
    whole, event = KINDS[path]
    exchanges = recorded.read().exchanges
    found = [exchanges[name] for name, of, body, _ in cases() if of == path and is_plain(body)]
    answers = [exchange for exchange in found if exchange.status == 200]
    assert answers
    for answer in answers:
        if not answer.headers["content-type"].startswith("text/event-stream"):
            check(whole, json.loads(answer.body))
            if whole is Response:
                check_response(json.loads(answer.body))
            continue
        for each in [each for each in events(answer.body) if "error" not in each]:
            for choice in each["choices"] if event is Completion else ():
                # The client has no type for chunks, whose reason OpenAI's API leaves null, too.
                choice["finish_reason"] = choice["finish_reason"] or "stop"
            check(event, each)
            if event is ResponseStreamEvent:
                check_event(each)


def is_plain(body: dict[str, Any]) -> bool:
    """Returns whether the clients have a type for the answer: they have none for vectors in base64
    and for the first token of an echoed prompt, which has no log-probability."""
    return body.get("encoding_format") != "base64" and not body.get("echo")


def test_the_list_of_models_is_strictly_of_its_type() -> None:
    listed = recorded.read().exchanges["GET /v1/models"]
    check(list[Model], json.loads(listed.body)["data"])
