"""History never refuses: what can be rendered is, the rest is replaced or left out, and named.
What a person has just typed is refused. Through the official clients."""

from __future__ import annotations

import re
from typing import Any, NamedTuple

import anthropic
import msgspec
import openai
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import BaseModel

from gateway.dialects.chat_completions import ChatCompletionRequest, ChatCompletions
from gateway.dialects.messages import Messages
from gateway.dialects.messages_fields import MessagesRequest
from gateway.dialects.responses import Responses
from gateway.dialects.responses_fields import ResponsesRequest
from tests.gateway.dialects.test_all_dialects import CALL, THOUGHT, ask
from tests.gateway.scripts import say, spelled
from tests.gateway.service import Service
from tests.scripted_worker import ScriptedWorker

ASKED: dict[str, Any] = {"role": "user", "content": "And now?"}


@pytest.fixture(scope="module")
def service(qwen3: Service) -> Service:
    return qwen3


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


DIALECTS = ("chat", "messages", "responses")


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
    answer = service.post(path.get(dialect, "/v1/responses"), body)
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
