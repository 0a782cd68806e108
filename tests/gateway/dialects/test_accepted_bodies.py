"""Bodies that clients of other servers send: they are accepted, and what has no effect is named."""

from __future__ import annotations

from typing import Any

import httpx
import msgspec
import openai
import pytest

from gateway.dialects.chat_completions import ChatCompletionRequest, ChatCompletions
from gateway.dialects.completions import CompletionRequest, Completions
from gateway.dialects.messages import Messages
from gateway.dialects.messages_fields import MessagesRequest
from gateway.dialects.relevance_scores import Reranking, RerankRequest
from gateway.dialects.responses import Responses
from gateway.dialects.responses_fields import ResponsesRequest
from gateway.exceptions import InvalidRequest
from gateway.http.request import decode_request
from gateway.request import AllowedTools, NamedTool, Request, ThoughtBudget
from tests.gateway.scripts import say, spelled
from tests.gateway.service import Service
from tests.scripted_worker import ScriptedWorker
from web.decoding import decoder_of

HI: list[Any] = [{"role": "user", "content": "Hi"}]
CHAT: dict[str, Any] = {"model": "tiny", "messages": HI}
SCHEMA: dict[str, Any] = {"type": "object", "properties": {"a": {"type": "integer"}}}
ROUTES: dict[str, tuple[Any, Any, dict[str, Any]]] = {
    "chat": (ChatCompletionRequest, ChatCompletions(), CHAT),
    "text": (CompletionRequest, Completions(), {"model": "tiny", "prompt": "Hi"}),
    "responses": (ResponsesRequest, Responses(), {"model": "tiny", "input": "Hi"}),
    "messages": (MessagesRequest, Messages(), {**CHAT, "max_tokens": 9}),
    "rerank": (RerankRequest, Reranking(), {"model": "m", "query": "q", "documents": ["d"]}),
}
STOPS = {"chat": "stop", "text": "stop", "responses": "stop", "messages": "stop_sequences"}


def read(route: str, **fields: Any) -> Request:
    schema, dialect, base = ROUTES[route]
    body = msgspec.json.encode({**base, **fields})
    return dialect.read(decode_request(decoder_of(schema), body))


@pytest.mark.parametrize(
    ("route", "field"),
    [
        ("chat", "max_tokens"),
        ("chat", "max_completion_tokens"),
        ("text", "max_tokens"),
        ("responses", "max_output_tokens"),
    ],
)
def test_minus_one_is_no_maximum_and_zero_is_refused(route: str, field: str) -> None:
    request = read(route, **{field: -1})
    assert request.max_tokens is None and not request.dropped
    assert read(route, **{field: 5}).max_tokens == 5
    for wrong in (0, -2, {}, [], "5", True):
        with pytest.raises(InvalidRequest) as refused:
            read(route, **{field: wrong})
        assert refused.value.param == field
    assert read("chat", max_completion_tokens=-1, max_tokens=7).max_tokens == 7
    assert read("text", max_tokens=0, echo=True).max_tokens == 0


@pytest.mark.parametrize("route", STOPS)
def test_many_stop_strings_of_which_some_are_empty(route: str) -> None:
    given = [f"s{number}" for number in range(62)]
    request = read(route, **{STOPS[route]: ["", *given, ""]})
    assert request.stop == given and request.dropped == ("stop.empty",)
    if route != "messages":
        assert read(route, stop="").stop == []


THINKS = {"enable_thinking": True, "thinking": True}
SILENT = dict.fromkeys(THINKS, False)


@pytest.mark.parametrize(
    ("fields", "variables"),
    [
        ({"enable_thinking": False}, SILENT),
        ({"thinking": True}, THINKS),
        ({"thinking": {"type": "disabled"}}, SILENT),
        ({"thinking": {"type": "adaptive"}}, THINKS),
        ({"reasoning": {"enabled": False}}, SILENT),
        ({"reasoning": {"effort": "high"}}, {"reasoning_effort": "high"}),
        ({"reasoning": {"effort": "none"}}, SILENT),
        ({"reasoning_effort": "none", "thinking": False}, SILENT),
        ({"thinking": True, "chat_template_kwargs": {"thinking": False}}, {"thinking": False}),
        ({"reasoning": {}, "thinking": {}, "enable_thinking": None}, {}),
    ],
)
def test_switches_of_thinking(fields: dict[str, Any], variables: dict[str, Any]) -> None:
    request = read("chat", **fields)
    assert request.template_arguments == variables and not request.dropped


def test_budgets_and_contradictions_of_thinking() -> None:
    for fields, param in (
        ({"thinking": {"type": "enabled", "budget_tokens": 9}}, "thinking"),
        ({"reasoning": {"max_tokens": 9}}, "reasoning"),
    ):
        name = f"{param}.{'budget_tokens' if param == 'thinking' else 'max_tokens'}"
        assert read("chat", **fields).thought_budget == ThoughtBudget(9, param, dropped_as=name)
    wrong: list[tuple[dict[str, Any], str]] = [
        ({"enable_thinking": True, "thinking": False}, "thinking"),
        ({"reasoning_effort": "none", "enable_thinking": True}, "reasoning_effort"),
        ({"reasoning_effort": "low", "reasoning": {"effort": "high"}}, "reasoning"),
        ({"thinking_budget": 5, "reasoning": {"max_tokens": 6}}, "reasoning"),
        ({"thinking": {"type": "enabled", "keep": "all"}}, "thinking"),
    ]
    for fields, param in wrong:
        with pytest.raises(InvalidRequest) as refused:
            read("chat", **fields)
        assert refused.value.param == param


def test_excluded_reasoning_is_not_shown() -> None:
    body = decode_request(
        decoder_of(ChatCompletionRequest),
        msgspec.json.encode({**CHAT, "reasoning": {"exclude": True}}),
    )
    assert not body.shows_thoughts


@pytest.mark.parametrize("route", ["chat", "text"])
def test_stream_options_of_a_whole_answer(route: str) -> None:
    options = {"include_usage": True}
    assert read(route, stream_options=options).dropped == ("stream_options",)
    assert read(route, stream_options={}).dropped == ()
    assert read(route, stream_options=options, stream=True).dropped == ()


@pytest.mark.parametrize("route", ["chat", "text", "responses", "messages"])
def test_cache_marks_at_the_top_of_a_body(route: str) -> None:
    assert read(route, cache_control={"type": "ephemeral"}).dropped == ("cache_control",)


PHP = {"type": "object", "properties": [], "$defs": [], "patternProperties": {"^x": []}}
MAPS = {"type": "object", "properties": {}, "$defs": {}, "patternProperties": {"^x": {}}}


@pytest.mark.parametrize("inner", [False, True])
def test_empty_lists_in_place_of_empty_objects(inner: bool) -> None:
    """Accepts the empty lists that PHP writes, in the schemas of tools of all dialects."""
    given: Any = {"type": "object", "properties": {"o": PHP}} if inner else PHP
    shown = {"type": "object", "properties": {"o": MAPS}} if inner else MAPS
    function = {"name": "f", "parameters": given}
    for route, tool in (
        ("chat", {"type": "function", "function": function}),
        ("responses", {"type": "function", **function}),
        ("messages", {"name": "f", "input_schema": given}),
    ):
        (found,) = read(route, tools=[tool]).tools
        assert found.parameters == shown
    for route, tool in (
        ("chat", {"type": "function", "function": {"name": "f", "parameters": []}}),
        ("responses", {"type": "function", "name": "f", "parameters": []}),
        ("messages", {"name": "f", "input_schema": []}),
    ):
        assert read(route, tools=[tool]).tools[0].parameters == {"type": "object", "properties": {}}


@pytest.mark.parametrize(
    "format",
    [
        {"json_schema": {"name": "Answer[int]", "schema": SCHEMA}},
        {"json_schema": {"name": "n" * 80, "schema": SCHEMA, "strict": "true"}},
        {"json_schema": {"schema": SCHEMA, "strict": True}},
        {"json_schema": {"schema": SCHEMA}, "strict": True},
        {"schema": SCHEMA},
        {"schema": SCHEMA, "name": "x", "strict": True, "description": "d"},
    ],
)
def test_names_and_places_of_a_schema(format: dict[str, Any]) -> None:
    format = {"type": "json_schema", **format}
    for route in ("chat", "text"):
        constraint = read(route, response_format=format).constraint
        assert constraint is not None and '"a"' in constraint.text and constraint.is_closed
        assert constraint.strict == ("strict" in str(format))
    inner = {"type": "json_schema", **format.get("json_schema", format)}
    assert read("responses", text={"format": inner}).constraint is not None
    for wrong in ({}, {"schema": SCHEMA, "json_schema": {"schema": SCHEMA}}):
        with pytest.raises(InvalidRequest, match="schema") as refused:
            read("chat", response_format={"type": "json_schema", **wrong})
        assert refused.value.param == "response_format"


def test_null_beside_the_fields_of_another_type() -> None:
    assert read("chat", response_format={"type": "text", "schema": None}).constraint is None
    text = {"format": {"type": "text", "schema": None, "name": None}}
    assert read("responses", text=text).constraint is None
    choice = {"type": "auto", "name": None, "disable_parallel_tool_use": None}
    assert read("messages", tool_choice=choice).tool_choice == "auto"
    with pytest.raises(InvalidRequest, match="schema"):
        read("chat", response_format={"type": "text", "schema": SCHEMA})


SPACE = {"type": "namespace", "name": "files", "tools": [{"type": "function", "name": "read"}]}


def test_a_choice_of_a_tool_inside_a_namespace() -> None:
    """Finds a tool in a namespace by its bare name, unless several tools have that name."""
    choice = {"type": "function", "name": "read"}
    other, bare = SPACE | {"name": "mails"}, {"type": "function", "name": "read"}
    assert read("responses", tools=[SPACE], tool_choice=choice).tool_choice == NamedTool(
        "files__read"
    )
    assert read("responses", tools=[SPACE, bare], tool_choice=choice).tool_choice == NamedTool(
        "read"
    )
    assert read("responses", tools=[SPACE, other], tool_choice=choice).tool_choice == NamedTool(
        "read"
    )
    within = choice | {"namespace": "mails"}
    assert read("responses", tools=[SPACE, other], tool_choice=within).tool_choice == NamedTool(
        "mails__read"
    )
    allowed = {"type": "allowed_tools", "mode": "auto", "tools": [choice]}
    assert read("responses", tools=[SPACE], tool_choice=allowed).tool_choice == AllowedTools(
        ("files__read",), must_call=False
    )


def test_zero_tokens_of_each_document_are_no_limit() -> None:
    assert read("rerank", max_tokens_per_doc=0).max_document_tokens is None


@pytest.mark.parametrize("role", ["system", "user"])
def test_a_number_as_content_is_read_by_one_rule(
    client: openai.OpenAI, worker: ScriptedWorker, role: str
) -> None:
    worker.script = say("ok")
    messages: Any = [{"role": role, "content": 7}, *(HI if role == "system" else [])]
    client.chat.completions.create(model="tiny", messages=messages)
    assert f"{role}\n7" in spelled(worker.requests[-1].tokens)


def test_a_key_of_another_server_beside_a_valid_one(service: Service) -> None:
    bearer = f"Bearer {service.keys.acme}"
    for headers, status in (
        ({"authorization": bearer, "x-api-key": "sk-other"}, 200),
        ({"authorization": bearer, "x-api-key": ""}, 200),
        ({"x-api-key": service.keys.acme}, 200),
        ({"authorization": bearer, "x-api-key": service.keys.globex}, 400),
        ({"authorization": "Bearer sk-other", "x-api-key": service.keys.acme}, 400),
        ({"x-api-key": ""}, 401),
    ):
        assert httpx.get(f"{service.url}/v1/models", headers=headers).status_code == status, headers
