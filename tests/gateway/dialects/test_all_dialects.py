"""What is the same whatever dialect a client speaks: tokens, calls and failures."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import anthropic
import httpx
import openai
import pytest

from tests.gateway.scripted import ScriptedWorker
from tests.gateway.scripts import ids, say, spelled
from tests.gateway.service import Service
from tests.gateway.templated import templated_service
from workers.wire.client import WorkerFailed
from workers.wire.protocol import ErrorCode, Generate, SequenceOutput

QWEN3 = Path(__file__).parents[1] / "text/templates/qwen3.jinja"
LENGTH = 4096
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
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    """Its model has the chat template of Qwen 3."""
    with templated_service(tmp_path_factory.mktemp("qwen3")) as service:
        yield service


@pytest.fixture
def messages(service: Service) -> Iterator[anthropic.Anthropic]:
    options: dict[str, Any] = {"base_url": service.url, "max_retries": 0, "timeout": 20}
    with anthropic.Anthropic(api_key=service.keys.acme, **options) as client:
        yield client


def ask(dialect: str, **options: Any) -> dict[str, Any]:
    """A body that says the same in each dialect."""
    return CONVERSATIONS[dialect] | {"model": "tiny", LENGTH_FIELD[dialect]: 400} | options


def post(service: Service, dialect: str, **options: Any) -> httpx.Response:
    headers = {"authorization": f"Bearer {service.keys.acme}"}
    url = service.url + PATHS[dialect]
    return httpx.post(url, json=ask(dialect, **options), headers=headers, timeout=20)


def test_an_answer_is_cut_to_the_room_that_is_left(
    service: Service, worker: ScriptedWorker
) -> None:
    """Agents ask for as many tokens as the context has, or more."""
    worker.script = say("ok")
    for dialect in DIALECTS:
        field = LENGTH_FIELD[dialect]
        answer = post(service, dialect, **{field: LENGTH})
        assert answer.status_code == 200, answer.text
        assert field in answer.headers["loraplex-dropped"].split(", ")
        request = worker.requests[-1]
        assert request.params.max_tokens == LENGTH - len(request.tokens)
        fits = post(service, dialect, **{field: LENGTH - len(request.tokens)})
        assert field not in fits.headers.get("loraplex-dropped", "").split(", ")
        for asked in (LENGTH + 1, 64_000):
            beyond = post(service, dialect, **{field: asked})
            assert field in beyond.headers["loraplex-dropped"].split(", ")
            assert worker.requests[-1].params.max_tokens == request.params.max_tokens
    answer = post(service, "chat", max_tokens=LENGTH, max_completion_tokens=LENGTH)
    assert answer.headers["loraplex-dropped"] == "max_completion_tokens"


def test_each_answer_of_a_completion_is_cut_to_its_room(
    service: Service, worker: ScriptedWorker
) -> None:
    worker.script = say("ok")
    headers = {"authorization": f"Bearer {service.keys.acme}"}
    url, body = f"{service.url}/v1/completions", {"model": "tiny", "prompt": ["a", "bcd"]}

    def complete(**fields: Any) -> httpx.Response:
        return httpx.post(url, json=body | fields, headers=headers, timeout=20)

    answer = complete(max_tokens=LENGTH - 2)
    assert answer.headers["loraplex-dropped"] == "max_tokens"
    allowed = {len(each.tokens): each.params.max_tokens for each in worker.requests[-2:]}
    assert allowed == {1: LENGTH - 2, 3: LENGTH - 3}
    assert "loraplex-dropped" not in complete(max_tokens=LENGTH - 3).headers
    full = complete(prompt=[[65] * LENGTH], max_tokens=1)
    assert full.json()["error"]["code"] == "context_length_exceeded"
    none = complete(truncate_prompt_tokens=-1, max_tokens=LENGTH)
    assert none.status_code == 400 and "no room for a prompt" in none.text


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
def test_blocks_of_messages(
    messages: anthropic.Anthropic, worker: ScriptedWorker, stream: bool
) -> None:
    worker.script = say(f"{THOUGHT}One moment.\n{CALL}", per_step=3)
    if stream:
        with messages.messages.stream(**ask("messages")) as events:
            answer: Any = events.get_final_message()
    else:
        answer = messages.messages.create(**ask("messages"))
    thought, text, call = answer.content
    assert (thought.type, thought.thinking.strip()) == ("thinking", "Look it up.")
    assert (text.type, text.text.strip()) == ("text", "One moment.")
    assert (call.type, call.name, call.input) == ("tool_use", "get_weather", {"city": "Bern"})
    assert call.id.startswith("toolu_") and answer.stop_reason == "tool_use"
    assert thought.signature, "clients send a thought without one back as text"


@pytest.mark.parametrize("stream", [False, True])
def test_items_of_responses(client: openai.OpenAI, worker: ScriptedWorker, stream: bool) -> None:
    worker.script = say(f"{THOUGHT}One moment.\n{CALL}", per_step=3)
    if stream:
        with client.responses.stream(**ask("responses")) as events:
            answer: Any = events.get_final_response()
    else:
        answer = client.responses.create(**ask("responses"))
    thought, text, call = answer.output
    assert (thought.type, thought.content[0].text.strip()) == ("reasoning", "Look it up.")
    assert (text.type, text.content[0].text.strip()) == ("message", "One moment.")
    assert (call.type, call.name) == ("function_call", "get_weather")
    assert json.loads(call.arguments) == {"city": "Bern"} and call.call_id.startswith("call_")
    assert answer.usage and answer.usage.output_tokens_details.reasoning_tokens > 0
    again = [*ask("responses")["input"], *[item.to_dict() for item in answer.output]]
    output = {"type": "function_call_output", "call_id": call.call_id, "output": "7"}
    worker.script = say("Dry")
    done = client.responses.create(**ask("responses", input=[*again, output]))
    assert done.output_text == "Dry"


@pytest.mark.parametrize("per_step", [1, 3, 400])
@pytest.mark.parametrize("stream", [False, True])
def test_log_probabilities_stand_with_the_text_they_are_of(
    client: openai.OpenAI, worker: ScriptedWorker, stream: bool, per_step: int
) -> None:
    """Not with thoughts, calls or the markers around them."""
    worker.script = say(f"{THOUGHT}Héé moment.\n{CALL}", per_step=per_step)
    asked = ask("responses", include=["message.output_text.logprobs"], top_logprobs=2)
    pieces: list[Any] = []
    if stream:
        *events, last = client.responses.create(**asked, stream=True)
        pieces = [event for event in events if event.type == "response.output_text.delta"]
        (done,) = [event for event in events if event.type == "response.output_text.done"]
        answer: Any = last.response
    else:
        answer = client.responses.create(**asked)
    _, message, _ = answer.output
    (part,) = message.content
    assert (
        "".join(map(chr, [byte for each in part.logprobs for byte in each.bytes]))
        .encode("latin-1")
        .decode()
        == "Héé moment."
    )
    first = part.logprobs[0]
    assert (first.token, first.logprob, len(first.top_logprobs)) == ("H", -0.5, 2)
    assert worker.requests[-1].params.logprobs == 2
    if stream:
        told = [entry.to_dict() for piece in pieces for entry in piece.logprobs]
        assert told == [entry.to_dict() for entry in part.logprobs]
        assert told == [entry.to_dict() for entry in done.logprobs]


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


@pytest.mark.parametrize(
    ("choice", "is_held"),
    [
        ({"type": "any"}, True),
        ({"type": "tool", "name": "get_weather"}, True),
        ({"type": "auto"}, False),
    ],
)
def test_choices_of_tools(
    messages: anthropic.Anthropic, worker: ScriptedWorker, choice: Any, is_held: bool
) -> None:
    worker.script = say(CALL)
    answer = messages.messages.create(**ask("messages", tool_choice=choice))
    assert answer.stop_reason == "tool_use"
    assert bool(worker.requests[-1].grammar) is is_held


def test_tools_that_may_not_be_called(
    messages: anthropic.Anthropic, worker: ScriptedWorker
) -> None:
    worker.script = say("ok")
    plain = {key: value for key, value in ask("messages").items() if key != "tools"}
    messages.messages.create(**plain)
    messages.messages.create(**ask("messages", tool_choice={"type": "none"}))
    without, refused = worker.requests[-2:]
    assert without.tokens == refused.tokens


@pytest.mark.parametrize("dialect", DIALECTS)
@pytest.mark.parametrize("stream", [False, True])
def test_a_call_that_is_cut_off_leaves_no_markup(
    service: Service, worker: ScriptedWorker, dialect: str, stream: bool
) -> None:
    """Wherever the length cuts it, though nothing holds the answer to calls."""
    said = "One moment."
    worker.script = say(f"{said}{CALL}")
    reason = {"chat": "length", "messages": "max_tokens", "responses": "incomplete"}[dialect]
    for end in (6, len("<tool_call>"), 22, CALL.index("Bern") + 2):
        fields = {LENGTH_FIELD[dialect]: len(said) + end}
        answer = post(service, dialect, stream=stream, **fields).text
        assert stream or said in answer
        assert "tool_call>" not in answer and "<tool" not in answer and '\\"name' not in answer
        assert reason in answer


@pytest.mark.parametrize("dialect", DIALECTS)
@pytest.mark.parametrize("stream", [False, True])
def test_an_answer_that_fails_ends_in_an_error(
    service: Service, worker: ScriptedWorker, dialect: str, stream: bool
) -> None:
    async def script(request: Generate) -> AsyncIterator[SequenceOutput]:
        yield SequenceOutput(id=request.id, tokens=ids("abc"))
        raise WorkerFailed(ErrorCode.LOGITS_NAN, "no numbers")

    worker.script = script
    answer = post(service, dialect, stream=stream)
    assert answer.status_code == (200 if stream else 500)
    assert "logits_nan" in answer.text.strip().split("\n\n")[-1]
    assert "[DONE]" not in answer.text and "message_stop" not in answer.text
