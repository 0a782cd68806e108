"""OpenAI's Responses through the official client."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from typing import Any

import httpx
import msgspec
import openai
import pytest
from openai._streaming import SSEDecoder
from pydantic import BaseModel

from gateway.dialects.responses import Responses, echoed
from gateway.dialects.responses_fields import ResponsesRequest
from gateway.request import Message
from tests.gateway.dialects.response_schema import check_event, check_response
from tests.gateway.scripted import ScriptedWorker
from tests.gateway.scripts import ids, say, spelled
from tests.gateway.service import Service
from workers.wire.client import WorkerFailed
from workers.wire.protocol import ErrorCode, Generate, SamplingParams, SequenceOutput

RENDERED = "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
ASK: dict[str, Any] = {"model": "tiny", "input": "Hi", "max_output_tokens": 64}


def test_one_response(client: openai.OpenAI, worker: ScriptedWorker) -> None:
    worker.script = say("Grüße 🏴", cached=16)
    raw = client.responses.with_raw_response.create(
        **ASK, metadata={"k": "v"}, temperature=0.5, top_p=0.9, store=False
    )
    answer = raw.parse()
    assert answer.id.startswith("resp_") and answer.object == "response"
    assert answer.status == "completed" and answer.output_text == "Grüße 🏴"
    assert (answer.metadata, answer.max_output_tokens) == ({"k": "v"}, 64)
    assert json.loads(raw.text)["store"] is False
    asked = worker.requests[-1]
    assert spelled(asked.tokens) == RENDERED
    assert (asked.params.temperature, asked.params.top_p) == (0.5, 0.9)
    assert asked.params.max_tokens == 64
    check_response(json.loads(raw.text))
    usage = answer.usage
    assert usage and usage.input_tokens == len(asked.tokens)
    assert usage.input_tokens_details.cached_tokens == 16
    assert usage.output_tokens == len("Grüße 🏴".encode()) + 1
    assert usage.output_tokens_details.reasoning_tokens == 0
    assert usage.total_tokens == usage.input_tokens + usage.output_tokens
    assert "loraplex-dropped" not in raw.headers


def test_every_event_in_order(client: openai.OpenAI, worker: ScriptedWorker) -> None:
    worker.script = say("ab")
    events = list(client.responses.create(**ASK, stream=True))
    assert [event.type for event in events] == [
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        "response.content_part.added",
        "response.output_text.delta",
        "response.output_text.delta",
        "response.output_text.done",
        "response.content_part.done",
        "response.output_item.done",
        "response.completed",
    ]
    assert [event.sequence_number for event in events] == list(range(10))
    assert events[-1].type == "response.completed"
    assert events[-1].response.output_text == "ab" and events[-1].response.usage


ASKED: dict[str, Any] = {
    "frequency_penalty": 0.5,
    "max_tool_calls": 3,
    "presence_penalty": -1,
    "prompt_cache_key": "key",
    "safety_identifier": "user-7",
    "temperature": 0,
    "tool_choice": "none",
    "top_p": 0.5,
    "user": "u",
}
FUNCTIONS: list[dict[str, Any]] = [
    {"type": "function", "name": "f", "cache_control": {"type": "ephemeral"}},
    {"type": "function", "name": "g", "description": "G", "parameters": {}, "strict": False},
    {"type": "namespace", "name": "files", "tools": [{"type": "function", "name": "read"}]},
    {"type": "web_search"},
]


@pytest.mark.parametrize("is_cut", [False, True])
@pytest.mark.parametrize("format", [None, {"type": "text"}, {"type": "json_object"}])
def test_every_body_and_event_has_the_keys_of_the_schema(
    client: openai.OpenAI, worker: ScriptedWorker, is_cut: bool, format: Any
) -> None:
    worker.script = say('{"n": 1}')
    asked = {**ASK, **ASKED, "tools": FUNCTIONS, "text": {"format": format}}
    asked |= {"tool_choice": "none", "max_output_tokens": 3 if is_cut else 64}
    whole = client.post("/responses", body=asked, cast_to=httpx.Response)
    streamed = client.post("/responses", body=asked | {"stream": True}, cast_to=httpx.Response)
    events = [check_event(sse.json()) for sse in SSEDecoder().iter_bytes(iter([streamed.content]))]
    status = "incomplete" if is_cut else "completed"
    last = f"response.{status}"
    assert (events[0].type, events[1].type) == ("response.created", "response.in_progress")
    assert events[-1].type == last and whole.json()["status"] == status
    check_response(whole.json())


def test_a_response_tells_what_was_asked_for(client: openai.OpenAI, worker: ScriptedWorker) -> None:
    worker.script = say("ok")
    asked = {**ASK, **ASKED, "tools": FUNCTIONS, "store": True, "service_tier": "flex"}
    named: dict[str, Any] = {"type": "function", "name": "f"}
    for choice in (named, {"type": "allowed_tools", "mode": "auto", "tools": [named]}):
        body = msgspec.convert(asked | {"tool_choice": choice}, ResponsesRequest)
        told = echoed(body, SamplingParams(5, 1))
        assert msgspec.to_builtins(told["tool_choice"]) == choice
    whole = client.post("/responses", body=asked, cast_to=httpx.Response)
    body = whole.json()
    assert {name: body[name] for name in ASKED} == ASKED
    assert (body["store"], body["service_tier"], body["background"]) == (False, "default", False)
    bare = {"type": "function", "name": "f"}
    nothing = {"description": None, "parameters": None, "strict": None}
    nested = {"type": "namespace", "name": "files", "description": ""}
    assert body["tools"] == [
        bare | nothing,
        FUNCTIONS[1],
        nested | {"tools": [bare | nothing | {"name": "read"}]},
    ]
    dropped = whole.headers["loraplex-dropped"].split(", ")
    assert {"store", "service_tier", "max_tool_calls", "prompt_cache_key"} <= set(dropped)


def test_variables_of_the_template(client: openai.OpenAI, worker: ScriptedWorker) -> None:
    """What they say comes before what the effort means."""
    fields = {"reasoning": {"effort": "none"}, "chat_template_kwargs": {"enable_thinking": True}}
    asked = Responses().read(msgspec.convert(ASK | fields, ResponsesRequest))
    assert asked.template_arguments == {"enable_thinking": True}
    with pytest.raises(openai.BadRequestError, match="messages") as raised:
        client.responses.create(**ASK, extra_body={"chat_template_kwargs": {"messages": []}})
    assert raised.value.param == "chat_template_kwargs"


WORDS: list[tuple[str, dict[str, Any], str, str]] = [
    ("/responses", {"input": "Hi"}, "model", "Missing required parameter: 'model'. GET /v1/models"),
    ("/chat/completions", {"messages": []}, "model", "Missing required parameter: 'model'."),
    ("/completions", {"model": "tiny"}, "prompt", "Missing required parameter: 'prompt'."),
    ("/responses", ASK | {"background": True}, "background", "'background' may only be false or"),
    (
        "/responses",
        {"model": "tiny", "input": [{"role": "narrator", "content": "x"}]},
        "input",
        "Expected one of",
    ),
    (
        "/chat/completions",
        {"model": "tiny", "messages": [{"role": "narrator", "content": "x"}]},
        "messages",
        "or a role that the model's chat template names; got 'narrator'.",
    ),
]


@pytest.mark.parametrize(("path", "body", "param", "words"), WORDS)
def test_refusals_are_in_words(
    client: openai.OpenAI, path: str, body: dict[str, Any], param: str, words: str
) -> None:
    with pytest.raises(openai.BadRequestError) as raised:
        client.post(path, body=body, cast_to=object)
    assert raised.value.param == param and words in raised.value.message


def test_streaming_helper(client: openai.OpenAI, worker: ScriptedWorker) -> None:
    worker.script = say("naïve 🏴")
    with client.responses.stream(**ASK) as stream:
        text = "".join([e.delta for e in stream if e.type == "response.output_text.delta"])
        answer = stream.get_final_response()
    assert text == answer.output_text == "naïve 🏴"


async def test_the_async_client(service: Service, worker: ScriptedWorker) -> None:
    worker.script = say("hello")
    options: dict[str, Any] = {"base_url": f"{service.url}/v1", "max_retries": 0, "timeout": 20}
    async with openai.AsyncOpenAI(api_key=service.keys.acme, **options) as client:
        answer = await client.responses.create(**ASK)
        async with client.responses.stream(**ASK) as stream:
            streamed = await stream.get_final_response()
    assert answer.output_text == streamed.output_text == "hello"


def test_an_answer_that_is_cut_off(client: openai.OpenAI, worker: ScriptedWorker) -> None:
    worker.script = say("hello")
    options = ASK | {"max_output_tokens": 3}
    answer = client.responses.create(**options)
    *_, last = client.responses.create(**options, stream=True)
    assert last.type == "response.incomplete"
    for each in (answer, last.response):
        assert each.status == "incomplete" and each.output_text == "hel"
        assert each.incomplete_details and each.incomplete_details.reason == "max_output_tokens"
        assert each.output[0].status == "incomplete"


class Parcel(BaseModel):
    n: int


def test_an_answer_by_a_schema(client: openai.OpenAI, worker: ScriptedWorker) -> None:
    worker.script = say('{"n":1}')
    answer = client.responses.parse(**ASK, text_format=Parcel)
    assert answer.output_parsed == Parcel(n=1)
    assert '"n"' in worker.requests[-1].grammar
    with client.responses.stream(**ASK, text_format=Parcel) as stream:
        assert stream.get_final_response().output_parsed == Parcel(n=1)


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"previous_response_id": "resp_1"}, "previous_response_id"),
    ({"background": True}, "background"),
    ({"conversation": "c"}, "conversation"),
    ({"include": ["file_search_call.results"]}, "include"),
    ({"n": 2}, "n"),
    ({"stop": ["s"] * 65}, "stop"),
    ({"top_logprobs": 21}, "top_logprobs"),
    ({"min_tokens": 65}, "min_tokens"),
    ({"max_tool_calls": 0}, "max_tool_calls"),
    ({"input": []}, "input"),
    ({"input": [{"type": "item_reference", "id": "x"}]}, "input"),
    ({"input": [{"type": "reasoning", "id": "r", "encrypted_content": "loraplex:!"}]}, "input"),
    ({"input": [{"type": "web_search_call", "id": "w", "status": "completed"}]}, "input"),
    (
        {"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]},
        "input",
    ),
    ({"tools": [{"type": "function", "name": 7}]}, "tools"),
    ({"tools": [{"type": "teleport"}], "tool_choice": "required"}, "tool_choice"),
    ({"max_output_tokens": 0}, "max_output_tokens"),
]


@pytest.mark.parametrize(("options", "param"), REFUSED)
def test_wrong_requests_name_the_field(
    client: openai.OpenAI, options: dict[str, Any], param: str
) -> None:
    with pytest.raises(openai.BadRequestError) as raised:
        client.post("/responses", body=ASK | options, cast_to=object)
    assert (raised.value.param or "") == param
    assert param in str(raised.value)


def test_what_agents_send_beyond_the_page(client: openai.OpenAI, worker: ScriptedWorker) -> None:
    worker.script = say("ok")
    raw = client.responses.with_raw_response.create(
        model="tiny",
        max_output_tokens=8,
        instructions="You code.",
        input=[
            {"type": "message", "role": "developer", "content": "Mind."},
            {
                "type": "message",
                "role": "user",
                "content": [{"type": "input_text", "text": "Hi"}],
            },
        ],
        include=["reasoning.encrypted_content"],
        prompt_cache_key="p",
        reasoning={"effort": "medium", "summary": "auto"},
        text={"verbosity": "low"},
        tools=[{"type": "web_search"}, {"type": "custom", "name": "apply_patch"}],
        tool_choice="auto",
        parallel_tool_calls=False,
        store=False,
    )
    assert raw.headers["loraplex-dropped"].split(", ") == [
        "prompt_cache_key",
        "text.verbosity",
        "tools.custom",
        "tools.web_search",
    ]
    assert spelled(worker.requests[-1].tokens) == (
        "<|im_start|>system\nYou code.<|im_end|>\n<|im_start|>system\nMind.<|im_end|>\n" + RENDERED
    )


def test_sampling_as_in_the_other_dialects(client: openai.OpenAI, worker: ScriptedWorker) -> None:
    worker.script = say("one STOP two")
    fields = {"stop": "STOP", "top_k": 7, "min_p": 0.1, "presence_penalty": 0.5, "seed": 3}
    answer = client.responses.create(**ASK, extra_body=fields | {"logit_bias": {"5": -1}})
    assert (answer.status, answer.output_text) == ("completed", "one ")
    params = worker.requests[-1].params
    assert (params.top_k, params.min_p, params.presence_penalty) == (7, 0.1, 0.5)
    assert (params.seed, params.logit_bias, params.logprobs) == (3, {5: -1}, None)


def test_an_error_in_the_middle_of_a_stream(client: openai.OpenAI, worker: ScriptedWorker) -> None:
    async def script(request: Generate) -> AsyncIterator[SequenceOutput]:
        yield SequenceOutput(id=request.id, tokens=ids("abc"))
        raise WorkerFailed(ErrorCode.LOGITS_NAN, "no numbers")

    worker.script = script
    stream = client.responses.create(**ASK, stream=True)
    events: list[Any] = []
    with pytest.raises(openai.APIError) as raised:
        for event in stream:
            check_event(event.to_dict())
            events.append(event)
    assert raised.value.code == "logits_nan"
    failed = events[-1]
    assert failed.type == "response.failed" and failed.response.status == "failed"
    assert failed.response.id == events[0].response.id
    assert (failed.response.error.code, failed.response.error.message) == (
        "server_error",
        raised.value.message,
    )
    assert failed.response.output_text == "abc"
    assert failed.response.output[0].status == "incomplete"
    with pytest.raises(openai.APIError), client.responses.stream(**ASK) as helper:
        for event in helper:
            events.append(event)
    assert events[-1].type == "response.failed"


def test_all_that_was_reasoned_in_a_turn_is_kept() -> None:
    """Items of one turn are one message, however many; a text after a text begins another."""
    thoughts = [
        {
            "type": "reasoning",
            "id": "r",
            "summary": [],
            "content": [{"type": "reasoning_text", "text": text}],
        }
        for text in ("First.", "Then.")
    ]
    said = [{"type": "message", "role": "assistant", "content": text} for text in ("A", "B")]
    asked = Responses().read(
        msgspec.convert({"model": "tiny", "input": [*thoughts, *said]}, ResponsesRequest)
    )
    assert asked.messages == [
        Message("assistant", "A", reasoning="First.\nThen."),
        Message("assistant", "B"),
    ]
