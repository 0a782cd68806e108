"""Tools and thoughts through the official client, on a model with the template of Qwen 3."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
from pydantic import BaseModel

from examples import agent
from tests.gateway.dialects.test_tool_prompts import WEATHER
from tests.gateway.scripted import ScriptedWorker
from tests.gateway.scripts import say, spelled
from tests.gateway.service import Service
from tests.gateway.templated import templated_service
from workers.wire.protocol import Generate, SequenceOutput

QWEN3 = Path(__file__).parents[1] / "text/templates/qwen3.jinja"
LENGTH = 4096
TIME: dict[str, Any] = {"type": "function", "function": {"name": "get_time"}}
TOOLS = [WEATHER, TIME]
ASK: list[Any] = [{"role": "user", "content": "Weather in Bern?"}]
CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Bern"}}\n</tool_call>'
OTHER_CALL = '<tool_call>\n{"name": "get_time", "arguments": {}}\n</tool_call>'
THOUGHT = "<think>\nLook it up.\n</think>\n\n"


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    with templated_service(tmp_path_factory.mktemp("qwen3")) as service:
        yield service


def test_a_call(client: openai.OpenAI, worker: ScriptedWorker) -> None:
    worker.script = say(f"{THOUGHT}One moment.\n{CALL}")
    answer = client.chat.completions.create(model="tiny", messages=ASK, tools=TOOLS)
    choice = answer.choices[0]
    assert choice.finish_reason == "tool_calls"
    assert choice.message.content == "One moment."
    names = ("reasoning", "reasoning_content")
    assert choice.message.model_extra == dict.fromkeys(names, "Look it up.")
    assert choice.message.tool_calls
    (call,) = choice.message.tool_calls
    assert call.type == "function" and call.id.startswith("call_")
    assert call.function.name == "get_weather"
    assert json.loads(call.function.arguments) == {"city": "Bern"}
    assert '"name": "get_weather"' in spelled(worker.requests[-1].tokens)


def test_allowed_tools_are_held_to_and_all_are_shown(
    client: openai.OpenAI, worker: ScriptedWorker
) -> None:
    worker.script = say("Rain.")
    named: list[Any] = [{"type": "function", "function": {"name": "get_time"}}]

    def ask(mode: str, tools: list[Any]) -> Any:
        allowed: Any = {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": tools}}
        return client.chat.completions.with_raw_response.create(
            model="tiny", messages=ASK, tools=TOOLS, tool_choice=allowed
        )

    def respond(mode: Any, tools: list[Any]) -> Any:
        flat: list[Any] = [{"type": "function", **tool["function"]} for tool in TOOLS]
        return client.responses.with_raw_response.create(
            model="tiny",
            input="Hi",
            tools=flat,
            tool_choice={"type": "allowed_tools", "mode": mode, "tools": tools},
        )

    flat = [{"type": "function", "name": "get_time"}]
    for send, choice in ((ask, named), (respond, flat)):
        for mode in ("auto", "required"):
            send(mode, choice)
            request = worker.requests[-1]
            assert '"name": "get_weather"' in spelled(request.tokens)
            assert "get_time" in request.grammar and "get_weather" not in request.grammar
        answer = send("auto", [*choice, {"type": "web_search"}])
        assert answer.headers["loraplex-dropped"] == "tools.web_search"
        unknown = json.loads(json.dumps(choice).replace("get_time", "get_tide"))
        with pytest.raises(openai.BadRequestError, match="no function 'get_tide'") as raised:
            send("auto", unknown)
        assert raised.value.param == "tool_choice"
        with pytest.raises(openai.BadRequestError, match=r"allows no function.*web_search"):
            send("required", [{"type": "web_search"}])
        with pytest.raises(openai.BadRequestError, match="a name"):
            send("auto", [{"type": "function"}])
        send("auto", [{"type": "web_search"}])
        assert not worker.requests[-1].grammar


def test_an_answer_of_calls_alone_has_no_content(
    client: openai.OpenAI, worker: ScriptedWorker
) -> None:
    worker.script = say(f"{CALL}\n{OTHER_CALL}", per_step=7)
    answer = client.chat.completions.create(model="tiny", messages=ASK, tools=TOOLS)
    message = answer.choices[0].message
    assert message.content is None and message.tool_calls
    assert [call.function.name for call in message.tool_calls] == ["get_weather", "get_time"]
    assert len({call.id for call in message.tool_calls}) == 2


@pytest.mark.parametrize("per_step", [1, 4, 1000])
def test_a_stream_of_calls(client: openai.OpenAI, worker: ScriptedWorker, per_step: int) -> None:
    """A call's name comes once and whole, its arguments in pieces."""
    worker.script = say(f"{THOUGHT}Well.\n{CALL}\n{OTHER_CALL}", per_step=per_step)
    calls: dict[int, list[Any]] = {}
    text, thought, reasons = "", "", list[str | None]()
    for chunk in client.chat.completions.create(
        model="tiny", messages=ASK, tools=TOOLS, stream=True
    ):
        (choice,) = chunk.choices
        text += choice.delta.content or ""
        thought += choice.delta.model_extra["reasoning_content"] or ""
        reasons.append(choice.finish_reason)
        for call in choice.delta.tool_calls or ():
            calls.setdefault(call.index, []).append(call)
    assert (text, thought, reasons[-1]) == ("Well.", "Look it up.", "tool_calls")
    assert not any(reasons[:-1])
    names = [
        [call.function.name for call in pieces if call.function.name] for pieces in calls.values()
    ]
    assert names == [["get_weather"], ["get_time"]]
    assert all(
        pieces[0].id and not any(call.id for call in pieces[1:]) for pieces in calls.values()
    )
    arguments = ["".join(call.function.arguments for call in pieces) for pieces in calls.values()]
    assert list(map(json.loads, arguments)) == [{"city": "Bern"}, {}]
    assert len(calls[0]) > 3 or per_step == 1000


def test_the_clients_own_stream(client: openai.OpenAI, worker: ScriptedWorker) -> None:
    worker.script = say(f"{CALL}", per_step=3)
    with client.chat.completions.stream(model="tiny", messages=ASK, tools=TOOLS) as stream:
        done = [event for event in stream if event.type == "tool_calls.function.arguments.done"]
    assert [(event.name, json.loads(event.arguments)) for event in done] == [
        ("get_weather", {"city": "Bern"})
    ]
    assert stream.get_final_completion().choices[0].finish_reason == "tool_calls"


async def test_a_loop_of_tools(service: Service, worker: ScriptedWorker) -> None:
    """With the asynchronous client, which sends its own messages back as they came."""
    worker.script = say(f"{THOUGHT}{CALL}")
    messages: list[Any] = list(ASK)
    async with openai.AsyncOpenAI(
        base_url=f"{service.url}/v1", api_key=service.keys.acme, max_retries=0
    ) as client:
        ask: Callable[..., Any] = client.chat.completions.create
        answer = await ask(model="tiny", messages=messages, tools=TOOLS)
        message = answer.choices[0].message
        messages.append(message)
        for call in message.tool_calls:
            result = {"role": "tool", "tool_call_id": call.id, "content": "rain"}
            messages.append(result)
        worker.script = say("It rains.")
        answer = await ask(model="tiny", messages=messages, tools=TOOLS)
    assert answer.choices[0].finish_reason == "stop"
    assert answer.choices[0].message.content == "It rains."
    prompt = spelled(worker.requests[-1].tokens)
    assert CALL in prompt and "<tool_response>\nrain\n</tool_response>" in prompt


def test_one_call_where_no_more_are_wanted(client: openai.OpenAI, worker: ScriptedWorker) -> None:
    """What follows it is not waited for."""
    worker.script = say(f"{CALL}\n{OTHER_CALL}" + "x" * 1000, pause_s=0.001)
    answer = client.chat.completions.create(
        model="tiny", messages=ASK, tools=TOOLS, parallel_tool_calls=False
    )
    choice = answer.choices[0]
    assert choice.message.tool_calls and len(choice.message.tool_calls) == 1
    assert choice.finish_reason == "tool_calls"
    Service.wait_for(lambda: worker.requests[-1] in worker.aborted)


def test_a_call_that_is_cut_off(client: openai.OpenAI, worker: ScriptedWorker) -> None:
    worker.script = say(CALL)
    answer = client.chat.completions.create(
        model="tiny", messages=ASK, tools=TOOLS, max_tokens=len(CALL) - 18
    )
    choice = answer.choices[0]
    assert choice.finish_reason == "length" and choice.message.tool_calls
    assert choice.message.tool_calls[0].function.arguments == '{"city": "Be'


def test_without_tools_nothing_is_a_call(client: openai.OpenAI, worker: ScriptedWorker) -> None:
    worker.script = say(CALL)
    for fields in ({}, {"tools": TOOLS, "tool_choice": "none"}):
        answer = client.chat.completions.create(model="tiny", messages=ASK, **fields)
        assert answer.choices[0].message.content == CALL
        assert answer.choices[0].message.tool_calls is None
        assert answer.choices[0].finish_reason == "stop"


def test_no_effort_is_no_thought(client: openai.OpenAI, worker: ScriptedWorker) -> None:
    """The template then ends the thought itself."""
    worker.script = say("ok")
    answer = client.chat.completions.create(model="tiny", messages=ASK, reasoning_effort="none")
    assert answer.choices[0].message.content == "ok"
    assert spelled(worker.requests[-1].tokens).endswith("<think>\n\n</think>\n\n")


@pytest.mark.parametrize(
    "choice", ["required", {"type": "function", "function": {"name": "get_weather"}}]
)
def test_a_call_that_is_required(client: openai.OpenAI, worker: ScriptedWorker, choice) -> None:
    """A worker is given the grammar of the calls, and the thought before them."""
    worker.script = say(THOUGHT + CALL)
    answer = client.chat.completions.create(
        model="tiny", messages=ASK, tools=TOOLS, tool_choice=choice
    )
    assert answer.choices[0].message.tool_calls
    grammar = worker.requests[-1].grammar
    assert "get_weather" in grammar and "thought" in grammar
    assert ("get_time" in grammar) == (choice == "required")


def test_strict_tools_of_the_clients_own_helpers(
    client: openai.OpenAI, worker: ScriptedWorker
) -> None:
    class GetWeather(BaseModel):
        city: str

    worker.script = say(CALL.replace("get_weather", "GetWeather"))
    completion = client.chat.completions.parse(
        model="tiny", messages=ASK, tools=[openai.pydantic_function_tool(GetWeather)]
    )
    calls = completion.choices[0].message.tool_calls
    assert calls and calls[0].function.parsed_arguments == GetWeather(city="Bern")
    assert "GetWeather" in worker.requests[-1].grammar


def test_a_schema_that_cannot_be_held_to(client: openai.OpenAI) -> None:
    function = {"name": "f", "strict": True, "parameters": {"type": "object", "not": {}}}
    with pytest.raises(openai.BadRequestError, match="schemas of the tools") as refusal:
        client.chat.completions.create(
            model="tiny", messages=ASK, tools=[{"type": "function", "function": function}]
        )
    assert refusal.value.param == "tools"


UNENFORCED: dict[str, Any] = {
    "type": "object",
    "properties": {
        "tags": {"type": "array", "items": {"type": "string"}, "uniqueItems": True},
        "path": {"type": "string", "format": "file-path"},
    },
}


@pytest.mark.parametrize(
    ("strict", "choice", "dropped"),
    [
        (False, "auto", None),
        (False, "required", "tools.format, tools.uniqueItems"),
        (True, "auto", None),
    ],
)
def test_schemas_of_tools(
    client: openai.OpenAI, worker: ScriptedWorker, strict: bool, choice: Any, dropped: str | None
) -> None:
    """A strict one is refused, and of another only what a call is held to is named. The prompt
    has the schema as it was sent."""
    function = {"name": "f", "parameters": UNENFORCED, "strict": strict}
    asked: dict[str, Any] = {"tools": [{"type": "function", "function": function}]}
    worker.script = say("ok")
    create = client.chat.completions.with_raw_response.create
    if strict:
        with pytest.raises(openai.BadRequestError, match="'uniqueItems' cannot be enforced"):
            create(model="tiny", messages=ASK, tool_choice=choice, **asked)
        return
    raw = create(model="tiny", messages=ASK, tool_choice=choice, **asked)
    assert raw.headers.get("loraplex-dropped") == dropped


def test_the_example_of_an_agent(
    client: openai.OpenAI, worker: ScriptedWorker, capsys: pytest.CaptureFixture[str]
) -> None:
    """It calls two functions, is told of a wrong call, and answers."""
    calls = [("find_parcel", {"number": "7"}), ("add", {"a": 1, "b": 2.5}), ("add", {})]
    written = [json.dumps({"name": name, "arguments": given}) for name, given in calls]
    answers = iter([*(f"<tool_call>\n{call}\n</tool_call>" for call in written), "In Bern."])

    def script(request: Generate) -> AsyncIterator[SequenceOutput]:
        return say(next(answers))(request)

    worker.script = script
    assert agent.answer(client, "tiny", "Where is parcel 7?") == "In Bern."
    told = capsys.readouterr().out
    assert "found in Bern" in told and "-> 3.5" in told and "error: " in told
    assert "found in Bern" in spelled(worker.requests[-1].tokens)
