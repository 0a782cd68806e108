"""History never refuses: what can be rendered is, the rest is replaced or left out, and named.
What a person has just typed is refused. Through the official clients."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any, NamedTuple

import anthropic
import httpx
import msgspec
import openai
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import BaseModel

from gateway.dialects.chat_completions import ChatCompletionRequest, ChatCompletions
from gateway.dialects.dropped import WITHOUT_EFFECT
from gateway.dialects.messages import Messages
from gateway.dialects.messages_fields import MessagesRequest
from gateway.dialects.responses import Responses
from gateway.dialects.responses_fields import ResponsesRequest
from tests.gateway.dialects.test_all_dialects import CALL, THOUGHT, ask
from tests.gateway.scripted import ScriptedWorker
from tests.gateway.scripts import say, spelled
from tests.gateway.service import Service
from tests.gateway.templated import templated_service

ASKED: dict[str, Any] = {"role": "user", "content": "And now?"}
EMPTY_CALL = '{"name": "run", "arguments": {}}'
PNG = "data:image/png;base64,iVBORw0KGgo="


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    """Its model has the chat template of Qwen 3."""
    with templated_service(tmp_path_factory.mktemp("history")) as service:
        yield service


@pytest.fixture
def messages(service: Service) -> Iterator[anthropic.Anthropic]:
    options: dict[str, Any] = {"base_url": service.url, "max_retries": 0, "timeout": 20}
    with anthropic.Anthropic(api_key=service.keys.acme, **options) as client:
        yield client


class Asked(NamedTuple):
    prompt: str
    dropped: set[str]


class Clients(NamedTuple):
    """The official clients of the three dialects."""

    openai: openai.OpenAI
    anthropic: anthropic.Anthropic
    worker: ScriptedWorker

    def send(self, dialect: str, turns: list[Any], **fields: Any) -> Asked:
        """Sends a conversation and tells what became of it."""
        self.worker.script = say("ok")
        options: dict[str, Any] = {"model": "tiny", **fields}
        match dialect:
            case "chat":
                create: Any = self.openai.chat.completions.with_raw_response.create
                raw = create(messages=turns, max_tokens=8, **options)
            case "messages":
                create = self.anthropic.messages.with_raw_response.create
                raw = create(messages=turns, max_tokens=8, **options)
            case _:
                create = self.openai.responses.with_raw_response.create
                raw = create(input=turns, max_output_tokens=8, **options)
        names = raw.headers.get("loraplex-dropped", "")
        return Asked(spelled(self.worker.requests[-1].tokens), set(names.split(", ")) - {""})


@pytest.fixture
def clients(
    client: openai.OpenAI, messages: anthropic.Anthropic, worker: ScriptedWorker
) -> Clients:
    return Clients(client, messages, worker)


def called(arguments: Any) -> dict[str, list[Any]]:
    """A call with these arguments and its result, in each dialect."""
    function = {"name": "run", "arguments": arguments}
    return {
        "chat": [
            {
                "role": "assistant",
                "tool_calls": [{"id": "c", "type": "function", "function": function}],
            },
            {"role": "tool", "tool_call_id": "c", "content": "done"},
        ],
        "messages": [
            {
                "role": "assistant",
                "content": [{"type": "tool_use", "id": "c", "name": "run", "input": arguments}],
            },
            {
                "role": "user",
                "content": [{"type": "tool_result", "tool_use_id": "c", "content": "done"}],
            },
        ],
        "responses": [
            {"type": "function_call", "call_id": "c", **function},
            {"type": "function_call_output", "call_id": "c", "output": "done"},
        ],
    }


DIALECTS = ("chat", "messages", "responses")


@pytest.mark.parametrize("dialect", DIALECTS)
@pytest.mark.parametrize(
    ("arguments", "is_lost"),
    [
        ('{"text": "he said ', True),
        ("null", True),
        ("[1]", True),
        ('"text"', True),
        ("7", True),
        ("no JSON", True),
        ([1, 2], True),
        (7, True),
        ('{"a": ' * 200 + "1" + "}" * 200, True),
        ("", False),
        ("  ", False),
        (None, False),
        ({}, False),
    ],
)
def test_arguments_that_are_no_object(
    clients: Clients, dialect: str, arguments: Any, is_lost: bool
) -> None:
    prompt, dropped = clients.send(dialect, [ASKED, *called(arguments)[dialect]])
    assert EMPTY_CALL in prompt and "<tool_response>\ndone\n</tool_response>" in prompt
    assert dropped == ({"arguments"} if is_lost else set())


@pytest.mark.parametrize("dialect", DIALECTS)
@pytest.mark.parametrize("arguments", ['{"city": "Bern"}', {"city": "Bern"}])
def test_arguments_as_an_object_and_as_its_text(
    clients: Clients, dialect: str, arguments: Any
) -> None:
    prompt, dropped = clients.send(dialect, [ASKED, *called(arguments)[dialect]])
    assert '{"name": "run", "arguments": {"city": "Bern"}}' in prompt and not dropped


def test_a_call_that_was_cut_off_is_sent_back(clients: Clients) -> None:
    """A chat's, as the answer had it."""
    clients.worker.script = say(CALL)
    chat = ask("chat", max_tokens=len(CALL) - 18)
    answer = clients.openai.chat.completions.create(**chat)
    message = answer.choices[0].message
    assert answer.choices[0].finish_reason == "length" and message.tool_calls
    result = {"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": "not JSON"}
    prompt, dropped = clients.send("chat", [*chat["messages"], message, result])
    assert '{"name": "get_weather", "arguments": {}}' in prompt and dropped == {"arguments"}


IMAGES: dict[str, Any] = {
    "chat": {"type": "image_url", "image_url": {"url": PNG}},
    "messages": {
        "type": "image",
        "source": {"type": "base64", "media_type": "image/png", "data": "iVBORw0KGgo="},
    },
    "responses": {"type": "input_image", "image_url": PNG, "detail": "high"},
}
FILES: dict[str, Any] = {
    "chat": {"type": "file", "file": {"file_data": "JVBERi0=", "filename": "a.pdf"}},
    "messages": {
        "type": "document",
        "source": {"type": "base64", "media_type": "application/pdf", "data": "JVBERi0="},
    },
    "responses": {"type": "input_file", "file_data": "JVBERi0=", "filename": "a.pdf"},
}
TEXT_KIND = {"chat": "text", "messages": "text", "responses": "input_text"}


def with_result(dialect: str, content: Any) -> list[Any]:
    """A call whose result has this content."""
    call, result = called("{}")[dialect]
    match dialect:
        case "chat":
            return [call, result | {"content": content}]
        case "messages":
            (block,) = result["content"]
            return [call, result | {"content": [block | {"content": content}]}]
        case _:
            return [call, result | {"output": content}]


@pytest.mark.parametrize("dialect", DIALECTS)
def test_pictures_and_files_in_results(clients: Clients, dialect: str) -> None:
    """Text beside them stays, and what they hold is in no prompt."""
    file = "document" if dialect == "messages" else "file"
    content = [
        {"type": TEXT_KIND[dialect], "text": "A picture:"},
        IMAGES[dialect],
        FILES[dialect],
        {"type": "hologram", "data": "iVBORw0KGgo="},
        "bare",
        {"temperature": 3},
    ]
    prompt, dropped = clients.send(dialect, [ASKED, *with_result(dialect, content)])
    lines = f"A picture:\n[image omitted]\n[{file} omitted]\n[hologram omitted]\nbare"
    assert f'<tool_response>\n{lines}\n{{"temperature":3}}\n</tool_response>' in prompt
    assert "iVBOR" not in prompt and "JVBER" not in prompt
    assert dropped == {"content.image", f"content.{file}", "content.hologram"}


@pytest.mark.parametrize("dialect", DIALECTS)
@pytest.mark.parametrize("kind", ["image", "file", "hologram"])
def test_what_a_person_has_just_typed_is_refused(clients: Clients, dialect: str, kind: str) -> None:
    """With one code and sentence. A turn later it is history, whatever it was."""
    parts = {"image": IMAGES, "file": FILES, "hologram": {dialect: {"type": "hologram"}}}
    text = {"type": TEXT_KIND[dialect], "text": "See:"}
    turn = {"role": "user", "content": [text, parts[kind][dialect]]}
    errors = (openai.BadRequestError, anthropic.BadRequestError)
    for before in ([], [ASKED, {"role": "assistant", "content": "Yes?"}]):
        with pytest.raises(errors) as refusal:
            clients.send(dialect, [*before, turn])
        assert "Only text is read." in str(refusal.value)
        assert "unsupported_content" in str(refusal.value.body)
    answered = {"role": "assistant", "content": "No."}
    prompt, dropped = clients.send(dialect, [turn, answered, ASKED])
    assert "See:\n[" in prompt and len(dropped) == 1


@pytest.mark.parametrize("dialect", DIALECTS)
def test_what_a_client_adds_to_a_result_is_history(clients: Clients, dialect: str) -> None:
    """Agents send the picture that a tool has read as a user's, beside the result."""
    shown = {"role": "user", "content": [{"type": TEXT_KIND[dialect], "text": "From the tool:"}]}
    shown["content"].append(IMAGES[dialect])
    prompt, dropped = clients.send(dialect, [ASKED, *called("{}")[dialect], shown])
    assert "From the tool:\n[image omitted]" in prompt and dropped == {"content.image"}
    once = [shown, *called("{}")[dialect]]
    assert "[image omitted]" in clients.send(dialect, once).prompt


def test_blocks_of_other_kinds_in_messages(clients: Clients) -> None:
    blocks = [
        {"type": "thinking", "thinking": "Search.", "signature": "s"},
        {"type": "redacted_thinking", "data": "x"},
        {"type": "server_tool_use", "id": "s1", "name": "web_search", "input": {"query": "Bern"}},
        {
            "type": "web_search_tool_result",
            "tool_use_id": "s1",
            "content": [{"type": "web_search_result", "url": "u", "encrypted_content": "zzz"}],
        },
        {"type": "mcp_tool_use", "id": "m1", "name": "find", "server_name": "x", "input": {}},
        {
            "type": "mcp_tool_result",
            "tool_use_id": "m1",
            "is_error": False,
            "content": [{"type": "text", "text": "in Bern"}],
        },
        {"type": "container_upload", "file_id": "f"},
        {"type": "text", "text": "It rains.", "citations": [{"type": "page_location"}]},
        {"type": "tool_use", "id": "t1", "name": "ToolSearch", "input": {}},
    ]
    result = [{"type": "tool_reference", "tool_name": "WebSearch"}]
    turns = [
        ASKED,
        {"role": "assistant", "content": blocks},
        {
            "role": "user",
            "content": [{"type": "tool_result", "tool_use_id": "t1", "content": result}],
        },
    ]
    prompt, dropped = clients.send("messages", turns)
    for text in (
        '<tool_call>\n{"name": "web_search", "arguments": {"query": "Bern"}}\n</tool_call>',
        "<tool_response>\n[web_search_result omitted]\n</tool_response>",
        '{"name": "find", "arguments": {}}',
        "<tool_response>\nin Bern\n</tool_response>",
        "[container_upload omitted]\nIt rains.",
        "<tool_response>\nWebSearch\n</tool_response>",
    ):
        assert text in prompt, text
    assert dropped == {
        *("citations", "content.container_upload", "content.web_search_result"),
        *("fields.server_name", "redacted_thinking"),
    }


def test_documents_and_search_results_of_text(clients: Clients) -> None:
    """Also those that a person has just typed have a text, after their titles and sources."""
    source = {"type": "text", "media_type": "text/plain", "data": "Plain."}
    found = {
        "type": "search_result",
        "source": "s",
        "title": "t",
        "content": [{"type": "text", "text": "Found."}],
    }
    document = {"type": "document", "source": source}
    nested = {"type": "document", "source": {"type": "content", "content": [found]}}
    turns = [ASKED, *with_result("messages", [document, found, nested])]
    prompt, dropped = clients.send("messages", turns)
    assert (
        "<tool_response>\nPlain.\nt\ns\nFound.\nt\ns\nFound.\n</tool_response>" in prompt
        and not dropped
    )
    typed = {"role": "user", "content": [document, found, {"type": "text", "text": "And?"}]}
    prompt, dropped = clients.send("messages", [typed])
    assert "user\nPlain.\nt\ns\nFound.\nAnd?" in prompt and not dropped


def answered(kind: str, **fields: Any) -> dict[str, Any]:
    return {"type": kind, "id": f"{kind}_1", "status": "completed", **fields}


ITEMS: list[tuple[list[dict[str, Any]], str, set[str]]] = [
    (
        [
            answered("custom_tool_call", call_id="c", name="patch", input="*** Begin"),
            answered("custom_tool_call_output", call_id="c", output="Done"),
        ],
        '{"name": "patch", "arguments": {"input": "*** Begin"}}',
        set(),
    ),
    (
        [
            answered("local_shell_call", call_id="c", action={"type": "exec", "command": ["ls"]}),
            {"type": "local_shell_call_output", "id": "c", "output": "a.txt"},
        ],
        '{"name": "local_shell", "arguments": {"type": "exec", "command": ["ls"]}}',
        set(),
    ),
    (
        [
            answered("shell_call", call_id="c", action={"commands": ["ls"]}),
            answered("shell_call_output", call_id="c", output=[{"stdout": "a", "stderr": ""}]),
        ],
        '<tool_response>\n{"stdout":"a","stderr":""}\n</tool_response>',
        set(),
    ),
    (
        [
            answered("apply_patch_call", call_id="c", operation={"type": "delete_file"}),
            {"type": "apply_patch_call_output", "call_id": "c", "status": "failed"},
        ],
        '{"name": "apply_patch", "arguments": {"type": "delete_file"}}',
        set(),
    ),
    (
        [answered("mcp_call", name="find", server_label="x", arguments="{}", output="in Bern")],
        "<tool_response>\nin Bern\n</tool_response>",
        {"fields.server_label"},
    ),
    (
        [answered("mcp_call", name="find", server_label="x", arguments="{}", error="away")],
        "<tool_response>\naway\n</tool_response>",
        {"fields.server_label"},
    ),
    (
        [
            answered("computer_call", call_id="c", action={"type": "screenshot"}),
            answered(
                "computer_call_output",
                call_id="c",
                output={"type": "computer_screenshot", "image_url": PNG},
            ),
        ],
        "<tool_response>\n[computer_screenshot omitted]\n</tool_response>",
        {"content.computer_screenshot"},
    ),
    (
        [answered("web_search_call", action={"type": "search", "query": "q"})],
        "",
        {"items.web_search_call"},
    ),
    ([answered("file_search_call", queries=["q"])], "", {"items.file_search_call"}),
    ([answered("image_generation_call", result="iVBOR")], "", {"items.image_generation_call"}),
    ([answered("mcp_list_tools", tools=[{"name": "f"}])], "", {"items.mcp_list_tools"}),
    (
        [answered("mcp_approval_request", name="f", arguments="{}")],
        "",
        {"items.mcp_approval_request"},
    ),
    ([answered("compaction", encrypted_content="zzz")], "", {"items.compaction"}),
    ([answered("code_interpreter_call", code="1")], "", {"items.code_interpreter_call"}),
    ([{"type": "teleport_call", "call_id": "c", "arguments": "{}"}], '{"name": "teleport"', set()),
    ([answered("hologram")], "", {"items.hologram"}),
    (
        [
            answered(
                "message",
                role="assistant",
                content=[{"type": "refusal", "refusal": "I may not."}],
                phase="final_answer",
            )
        ],
        "I may not.",
        {"phase"},
    ),
    ([answered("function_call", call_id="c", name="f", arguments="{}") | {"status": "failed"}],
     '{"name": "f"', set()),
    ([answered("reasoning", encrypted_content="loraplex:!")], "", {"reasoning_items"}),
    (
        [answered("agent_message", role="assistant", content=[{"type": "text", "text": "Hm."}])],
        "Hm.",
        set(),
    ),
]  # fmt: skip


@pytest.mark.parametrize(
    ("items", "text", "dropped"), ITEMS, ids=[items[0]["type"] for items, _, _ in ITEMS]
)
def test_items_of_other_kinds_in_responses(
    clients: Clients, items: list[Any], text: str, dropped: set[str]
) -> None:
    prompt, found = clients.send("responses", [ASKED, *items, ASKED])
    assert text in prompt and found == dropped
    assert "iVBOR" not in prompt and "zzz" not in prompt


def test_tools_that_items_offer(clients: Clients) -> None:
    tool = {"type": "function", "name": "later", "description": "Later.", "parameters": {}}
    space = {"type": "namespace", "name": "mcp__x", "tools": [tool | {"name": "find"}]}
    items = [
        {"type": "additional_tools", "role": "developer", "tools": [tool, tool, {"type": "x"}]},
        ASKED,
        answered("tool_search_call", call_id="c", arguments={"query": "find"}),
        answered(
            "tool_search_output", call_id="c", tools=[space, {"type": "function", "name": "a b"}]
        ),
    ]
    now = {"type": "function", "name": "now"}
    prompt, dropped = clients.send("responses", items, tools=[now])
    for name in ("now", "later", "mcp__x__find"):
        assert prompt.count(f'{{"name": "{name}", ') == 1, name
    assert "<tool_response>\nmcp__x, a b\n</tool_response>" in prompt
    assert dropped == {"tools.x", "tools.function"}


OTHER_TOOLS: dict[str, list[Any]] = {
    "chat": [
        {"type": "custom", "custom": {"name": "patch"}},
        {"type": "web_search"},
        {"type": "mcp", "server_url": "x"},
        {"type": "teleport"},
    ],
    "messages": [
        {"type": "web_search_20250305", "name": "web_search"},
        {"type": "mcp_toolset", "mcp_server_name": "x"},
        {"type": "teleport", "name": "t"},
    ],
    "responses": [
        {"type": "custom", "name": "patch"},
        {"type": "web_search"},
        {"type": "mcp", "server_label": "x"},
        {"type": "teleport"},
    ],
}
REQUIRED = {"chat": "required", "messages": {"type": "any"}, "responses": "required"}
FUNCTIONS: dict[str, dict[str, Any]] = {
    "chat": {"type": "function", "function": {"name": "run"}},
    "messages": {"name": "run", "input_schema": {}},
    "responses": {"type": "function", "name": "run"},
}


@pytest.mark.parametrize("dialect", DIALECTS)
def test_tools_of_other_types(clients: Clients, dialect: str) -> None:
    others, named = OTHER_TOOLS[dialect], {f"tools.{t['type']}" for t in OTHER_TOOLS[dialect]}
    prompt, dropped = clients.send(dialect, [ASKED], tools=[*others, FUNCTIONS[dialect]])
    assert '"name": "run"' in prompt and dropped == named
    assert clients.send(dialect, [ASKED], tools=others).dropped == named
    errors = (openai.BadRequestError, anthropic.BadRequestError)
    with pytest.raises(errors) as refusal:
        clients.send(dialect, [ASKED], tools=others, tool_choice=REQUIRED[dialect])
    assert "were dropped" in str(refusal.value) and "tools.teleport" in str(refusal.value)


@pytest.mark.parametrize("dialect", DIALECTS)
def test_a_callers_words_cannot_break_the_header(service: Service, dialect: str) -> None:
    """Kinds and names of fields are a caller's own words."""
    hostile = ["a\r\nset-cookie: a=b", "x, y", "é", "k" * 65, "", " ", "\x00", "name\n"]
    tools = [{"type": kind} for kind in hostile]
    turns = [{"role": "assistant", "content": "A", **dict.fromkeys(hostile, 1)}, ASKED]
    turns[0]["content"] = [{"type": kind} for kind in hostile]
    path = {"chat": "/v1/chat/completions", "messages": "/v1/messages"}
    body: dict[str, Any] = {"model": "tiny", "tools": tools}
    body |= {"input": turns} if dialect == "responses" else {"messages": turns, "max_tokens": 8}
    service.worker.script = say("ok")
    answer = httpx.post(
        service.url + path.get(dialect, "/v1/responses"),
        json=body,
        headers={"authorization": f"Bearer {service.keys.acme}"},
        timeout=20,
    )
    assert answer.status_code == 200 and "set-cookie" not in answer.headers
    names = answer.headers["loraplex-dropped"].split(", ")
    assert names == ["content.part", "fields.unnamed", "tools.unnamed"]


class Weather(BaseModel):
    city: str


@pytest.mark.filterwarnings("ignore:Pydantic serializer warnings")
@pytest.mark.parametrize("how", ["create", "parse", "stream"])
@pytest.mark.parametrize("dump", [True, False], ids=["dumped", "as it is"])
def test_what_the_clients_return_is_sent_back_in_chats(
    clients: Clients, how: str, dump: bool
) -> None:
    """With thoughts, a text and a call; parsed, with what the client made of them."""
    chat = ask("chat")
    if how == "parse":
        chat["tools"] = [openai.pydantic_function_tool(Weather, name="get_weather")]
    for said in (f'{THOUGHT}{{"city": "Bern"}}', f"{THOUGHT}{CALL}"):
        clients.worker.script = say(said, per_step=3)
        if how == "create":
            answer: Any = clients.openai.chat.completions.create(**chat)
        elif how == "parse":
            answer = clients.openai.chat.completions.parse(**chat, response_format=Weather)
        else:
            with clients.openai.chat.completions.stream(**chat) as events:
                answer = events.get_final_completion()
        message = answer.choices[0].message
        turns = [*chat["messages"], message.model_dump() if dump else message]
        for call in message.tool_calls or ():
            turns.append({"role": "tool", "tool_call_id": call.id, "content": "rain"})
        prompt, dropped = clients.send("chat", [*turns, ASKED])
        assert said.removeprefix(THOUGHT) in prompt
        assert dropped <= {"index"}


@pytest.mark.filterwarnings("ignore:Pydantic serializer warnings")
@pytest.mark.parametrize("how", ["create", "parse", "stream"])
@pytest.mark.parametrize("dump", [True, False], ids=["dumped", "as it is"])
def test_what_the_clients_return_is_sent_back_in_messages(
    clients: Clients, how: str, dump: bool
) -> None:
    asked = ask("messages")
    for said in (f'{THOUGHT}{{"city": "Bern"}}', f"{THOUGHT}One.\n{CALL}"):
        clients.worker.script = say(said, per_step=3)
        if how == "create":
            answer: Any = clients.anthropic.messages.create(**asked)
        elif how == "parse":
            if CALL in said:
                continue
            answer = clients.anthropic.messages.parse(**asked, output_format=Weather)
        else:
            with clients.anthropic.messages.stream(**asked) as events:
                answer = events.get_final_message()
        whole = answer.model_dump() if dump else {"role": "assistant", "content": answer.content}
        results = [
            {"type": "tool_result", "tool_use_id": block.id, "content": "rain"}
            for block in answer.content
            if block.type == "tool_use"
        ]
        following = [{"role": "user", "content": results}] if results else [ASKED]
        prompt, dropped = clients.send("messages", [*asked["messages"], whole, *following])
        assert '"city": "Bern"' in prompt and not dropped


@pytest.mark.filterwarnings("ignore:Pydantic serializer warnings")
@pytest.mark.parametrize("how", ["create", "parse", "stream"])
@pytest.mark.parametrize("dump", [True, False], ids=["dumped", "as it is"])
def test_what_the_clients_return_is_sent_back_in_responses(
    clients: Clients, how: str, dump: bool
) -> None:
    asked = ask("responses", include=["message.output_text.logprobs"])
    for said in (f'{THOUGHT}{{"city": "Bern"}}', f"{THOUGHT}{CALL}"):
        clients.worker.script = say(said, per_step=3)
        if how == "create":
            answer: Any = clients.openai.responses.create(**asked)
        elif how == "parse":
            tools = [openai.pydantic_function_tool(Weather, name="get_weather")["function"]]
            tools = [{"type": "function", **tool} for tool in tools]
            given = asked | {"tools": tools}
            answer = clients.openai.responses.parse(**given, text_format=Weather)
        else:
            with clients.openai.responses.stream(**asked) as events:
                answer = events.get_final_response()
        output = [item.model_dump() for item in answer.output] if dump else answer.output
        results = [
            {"type": "function_call_output", "call_id": item.call_id, "output": "rain"}
            for item in answer.output
            if item.type == "function_call"
        ]
        prompt, dropped = clients.send("responses", [*asked["input"], *output, *results, ASKED])
        assert '"city": "Bern"' in prompt and dropped <= {"reasoning_items"}


NOTHING: list[Any] = [None, [], {}]


@pytest.mark.parametrize("nothing", NOTHING, ids=["null", "[]", "{}"])
@pytest.mark.parametrize("dialect", DIALECTS)
def test_fields_that_ask_for_nothing_are_absent_everywhere(
    clients: Clients, dialect: str, nothing: Any
) -> None:
    """In the message that a person has just typed, in parts, calls, items, tools and bodies."""
    empty = dict.fromkeys(("async_", "toolset_name", "provider_specific_fields", "zz"), nothing)
    plain_call, plain_result = called('{"city": "Bern"}')[dialect]
    call, result = json.loads(json.dumps([plain_call, plain_result]))
    for each in (call, result):
        each.update(empty)
    match dialect:
        case "chat":
            call["tool_calls"][0].update(empty)
            call["tool_calls"][0]["function"].update(empty)
        case "messages":
            call["content"][0].update(empty)
            result["content"][0].update(empty)
        case _:
            pass
    part = {"type": TEXT_KIND[dialect], "text": "And now?", **empty}
    tool = json.loads(json.dumps(FUNCTIONS[dialect])) | empty
    if dialect == "chat":
        tool["function"] |= {**empty, "description": nothing, "parameters": nothing}
    plain = clients.send(
        dialect, [ASKED, plain_call, plain_result, ASKED], tools=[FUNCTIONS[dialect]]
    )
    asked = clients.send(
        dialect,
        [
            {**ASKED, "content": [part], **empty},
            call,
            result,
            {**ASKED, "content": [part], **empty},
        ],
        tools=[tool],
        extra_body={"metadata": nothing, "zz": nothing, "tool_choice": nothing, "seed_": nothing},
    )
    assert asked == plain and not plain.dropped


@pytest.mark.parametrize("dialect", DIALECTS)
def test_fields_without_effect_are_dropped_and_named(clients: Clients, dialect: str) -> None:
    """Also in what a person has just typed, and in tools; other fields are refused there."""
    extra = {name: {"a": 1} for name in WITHOUT_EFFECT}
    known = {"responses": {"status", "id"}, "messages": {"id"}}.get(dialect, set[str]())
    part = {"type": TEXT_KIND[dialect], "text": "Hi", "cache_control": {"type": "ephemeral"}}
    turn = {"role": "user", "content": [part], **extra}
    assert clients.send(dialect, [turn]).dropped == WITHOUT_EFFECT - known
    tool = {**FUNCTIONS[dialect], "cache_control": {"a": 1}, "metadata": {"a": 1}}
    if dialect != "chat":
        tool |= {"defer_loading": True}
    named = {"cache_control", "metadata"} | ({"tools.options"} if dialect != "chat" else set())
    assert clients.send(dialect, [ASKED], tools=[tool]).dropped == named
    errors = (openai.BadRequestError, anthropic.BadRequestError)
    for fields in (
        {"turns": [{**ASKED, "frobnicate": 1}]},
        {"turns": [{"role": "user", "content": [{**part, "frobnicate": 1}]}]},
        {"turns": [ASKED], "tools": [{**FUNCTIONS[dialect], "frobnicate": 1}]},
    ):
        with pytest.raises(errors, match="frobnicate"):
            clients.send(dialect, **fields)
    history = [{**ASKED, "frobnicate": 1}, {"role": "assistant", "content": "A", "zz": 1}, ASKED]
    assert clients.send(dialect, history).dropped == {"fields.frobnicate", "fields.zz"}


def test_older_and_odd_messages_of_chats(clients: Clients) -> None:
    turns: list[Any] = [
        {"role": "user", "content": "a", "tool_calls": [{"id": "x"}], "tool_call_id": "y"},
        {"role": "assistant", "content": None, "refusal": "I may not."},
        {"role": "assistant", "content": None, "audio": {"id": "audio_1"}},
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": [{"type": "text", "text": "Hm."}]},
                {"type": "text", "text": "So."},
            ],
            "reasoning_details": [{"type": "reasoning.text", "text": "Hm."}],
            "thinking_blocks": [{"type": "thinking", "thinking": "Hm."}],
        },
        {"role": "assistant", "content": None, "function_call": {"name": "f", "arguments": "{}"}},
        {"role": "function", "name": "f", "content": "old"},
        {"role": "assistant", "tool_calls": [{"id": "c", "type": "function"}, 7]},
        {
            "role": "assistant",
            "tool_calls": [
                {"id": "p", "type": "custom", "custom": {"name": "patch", "input": "***"}}
            ],
        },
        {"role": "tool", "content": {"temperature": 3}},
        {"role": "assistant", "content": 7},
    ]
    prompt, dropped = clients.send("chat", [*turns, ASKED])
    for text in (
        "assistant\nI may not.",
        "assistant\nSo.",
        '{"name": "f", "arguments": {}}',
        "<tool_response>\nold\n</tool_response>",
        '{"name": "patch", "arguments": {"input": "***"}}',
        '<tool_response>\n{"temperature":3}\n</tool_response>',
    ):
        assert text in prompt, text
    assert dropped == {
        *("audio", "calls", "reasoning_details", "thinking_blocks", "tool_calls"),
        "tool_call_id",
    }


BEYOND: list[tuple[str, list[Any]]] = [
    ("chat", [{"role": "assistant", "content": [{"type": "text", "text": ""}] * 4097}]),
    ("chat", [{"role": "assistant", "tool_calls": called("{}")["chat"][0]["tool_calls"] * 257}]),
    (
        "chat",
        [
            {
                "role": "assistant",
                "tool_calls": [{"id": "c" * 257, "function": {"name": "f", "arguments": ""}}],
            }
        ],
    ),
    ("chat", [{"role": "assistant", "tool_calls": [{"function": {"name": "f" * 129}}]}]),
    ("chat", [{"role": "tool", "tool_call_id": "c" * 257, "content": ""}]),
    (
        "messages",
        [
            {
                "role": "assistant",
                "content": [{"type": "tool_use", "id": "c", "name": "f" * 129, "input": {}}],
            }
        ],
    ),
    ("messages", [{"role": "assistant", "content": [{"type": "text", "text": ""}] * 4097}]),
    ("responses", [{"type": "function_call", "call_id": "c" * 257, "name": "f"}]),
    ("responses", [{"type": "function_call_output", "call_id": "c", "output": [{}] * 4097}]),
    ("responses", [{"type": "teleport_call", "call_id": "c", "name": "f" * 129, "action": {}}]),
]


@pytest.mark.parametrize(("dialect", "turns"), BEYOND)
def test_bounds_on_sizes_hold_in_history(clients: Clients, dialect: str, turns: list[Any]) -> None:
    errors = (openai.BadRequestError, anthropic.BadRequestError)
    with pytest.raises(errors, match="at most"):
        clients.send(dialect, [*turns, ASKED])


def test_contents_inside_each_other_are_bounded(clients: Clients) -> None:
    content: Any = "deep"
    for _ in range(400):
        content = [{"type": "search_result", "content": content}]
    prompt, dropped = clients.send("messages", [ASKED, *with_result("messages", content)])
    assert "[search_result omitted]" in prompt and dropped == {"content.search_result"}


WORDS = (
    *("type", "text", "content", "role", "id", "call_id", "name", "arguments", "function", "input"),
    *("output", "tools", "tool_calls", "tool_use_id", "source", "thinking", "zz"),
)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=3),
    lambda inner: (
        st.lists(inner, max_size=2) | st.dictionaries(st.sampled_from(WORDS), inner, max_size=4)
    ),
    max_leaves=8,
)
KINDS = ("text", "image", "thinking", "tool_use", "tool_result", "function_call", "mcp_call")
KINDS += ("function_call_output", "reasoning", "additional_tools", "x_output", "x")
OBJECTS = st.dictionaries(st.sampled_from(("content", "tool_calls", "refusal", "zz")), JSON)
PARTS = st.lists(
    st.tuples(
        st.sampled_from(KINDS), st.dictionaries(st.text(max_size=3), JSON, max_size=2), JSON
    ).map(
        lambda each: {**each[1], **(each[2] if isinstance(each[2], dict) else {}), "type": each[0]}
    ),
    max_size=4,
)
READERS: dict[str, tuple[Any, Any]] = {
    "chat": (ChatCompletions(), ChatCompletionRequest),
    "messages": (Messages(), MessagesRequest),
    "responses": (Responses(), ResponsesRequest),
}


@pytest.mark.parametrize("dialect", DIALECTS)
@settings(derandomize=True, database=None, deadline=None, max_examples=120)
@given(role=st.sampled_from(("user", "assistant", "system")), fields=OBJECTS, parts=PARTS | JSON)
def test_no_json_in_history_is_refused(dialect: str, role: str, fields: Any, parts: Any) -> None:
    """Whatever its shape, and its names may stand in a header."""
    turns = [ASKED, {**fields, "content": parts, "role": role}, DONE_TURN, ASKED]
    if dialect == "responses" and isinstance(parts, list):
        turns[2:2] = [item for item in parts if isinstance(item, dict) and "role" not in item]
    body: dict[str, Any] = {"model": "m", "input": turns}
    if dialect != "responses":
        body = {"model": "m", "messages": turns, "max_tokens": 1}
    reader, kind = READERS[dialect]
    asked = reader.read(msgspec.convert(body, kind))
    assert asked.messages[-1].content == "And now?"
    assert all(re.fullmatch(r"[\w.:-]{1,80}", name, re.ASCII) for name in asked.dropped)


DONE_TURN = {"role": "assistant", "content": "Done."}
