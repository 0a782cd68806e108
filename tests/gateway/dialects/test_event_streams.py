"""Any stream of events that a format can write is accepted by the official client's own
accumulator, and comes to the same as the whole body."""

from __future__ import annotations

import asyncio
import json
from typing import Any

from anthropic._streaming import SSEDecoder as AnthropicDecoder
from anthropic.lib.streaming._messages import accumulate_event
from anthropic.types import RawMessageStreamEvent
from hypothesis import given, settings
from hypothesis import strategies as st
from openai import omit
from openai._streaming import SSEDecoder as OpenAIDecoder
from openai.lib.streaming.responses._responses import ResponseStreamState
from pydantic import TypeAdapter

from gateway.dialects.dialect import Answer, AnswerContext, AnswerFormat
from gateway.dialects.messages_format import MessagesFormat
from gateway.dialects.responses import Responses
from gateway.dialects.responses_fields import ResponsesRequest
from gateway.dispatch.sequence import Delta
from gateway.limits.admission import Usage
from gateway.text.parsers.parser import Part, Reasoning, Text, ToolCall
from tests.gateway.dialects.response_schema import check_event, check_response
from workers.wire.protocol import SamplingParams, TokenLogprobs

MESSAGE_EVENT: TypeAdapter[Any] = TypeAdapter(RawMessageStreamEvent)
texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=6)
scored = st.builds(TokenLogprobs, st.integers(0, 9), st.floats(-9, 0), st.just([(1, -0.5)]))
SPELLED: Any = [b"%d" % token for token in range(10)]
arguments = st.dictionaries(texts, texts | st.integers(-9, 9) | st.lists(st.booleans()), max_size=3)


@st.composite
def answers(draw: st.DrawFn) -> list[Delta]:
    """Deltas of one choice: parts in any order, cut anywhere, some deltas without any."""
    parts: list[Part] = []
    num_calls = 0
    for kind in draw(st.lists(st.sampled_from([Text, Reasoning, ToolCall]), max_size=5)):
        if kind is ToolCall:
            written = json.dumps(draw(arguments), ensure_ascii=draw(st.booleans()))
            cut = draw(st.integers(0, len(written)))
            parts.append(ToolCall(num_calls, "f", written[:cut]))
            parts.append(ToolCall(num_calls, "", written[cut:]))
            num_calls += 1
        elif kind is Text:
            text = draw(texts)
            parts.append(Text(text, draw(st.lists(scored, max_size=2)) if text else []))
        else:
            parts.append(Reasoning(draw(texts)))
    deltas: list[Delta] = []
    while parts:
        size = draw(st.integers(0, len(parts)))
        deltas.append(Delta(0, parts[:size], [], None))
        parts = parts[size:]
    stop = draw(st.sampled_from([None, "END", "own"]))
    reason = draw(st.sampled_from(["stop", "length", "tool_calls"]))
    return [*deltas, Delta(0, [], [], reason, [], stop if reason == "stop" else None)]


def stream_of(format: AnswerFormat, deltas: list[Delta], usage: Usage) -> bytes:
    written = [format.start(Usage(usage.prompt_tokens, 1, usage.cached_tokens))]
    for delta in deltas:
        written += [format.ping, format.chunk(delta)]
    return b"".join([*written, format.end(usage)])


def body_of(format: AnswerFormat, deltas: list[Delta], usage: Usage) -> Any:
    answer = Answer(0)
    for delta in deltas:
        answer.add(delta)
    return json.loads(b"".join(asyncio.run(format.body([answer], usage))))


USAGE = Usage(prompt_tokens=9, completion_tokens=5, cached_tokens=4)


@settings(max_examples=20, deadline=None)
@given(answers())
def test_messages(deltas: list[Delta]) -> None:
    def format() -> MessagesFormat:
        return MessagesFormat("msg_1", "req_1", "tiny", ["END"])

    message: Any = None
    buffers: dict[int, bytes] = {}
    open_index = None
    for sse in AnthropicDecoder().iter_bytes(iter([stream_of(format(), deltas, USAGE)])):
        assert sse.event == sse.json()["type"]
        if sse.event == "ping":
            continue
        event = MESSAGE_EVENT.validate_python(sse.json())
        if event.type == "content_block_start":
            assert open_index is None and event.index == len(message.content)
            open_index = event.index
        elif event.type in ("content_block_delta", "content_block_stop"):
            assert event.index == open_index
            open_index = None if event.type == "content_block_stop" else open_index
        message = accumulate_event(event=event, current_snapshot=message, json_bufs=buffers)
    assert open_index is None and sse.event == "message_stop"
    body = body_of(format(), deltas, USAGE)
    shown = json.loads(message.to_json())
    assert list(map(_without_null, shown["content"])) == list(map(_without_null, body["content"]))
    for name in ("id", "role", "model", "stop_reason", "stop_sequence"):
        assert shown[name] == body[name]
    assert shown["usage"] == body["usage"]


def _without_null(block: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in block.items() if value is not None}


@settings(max_examples=20, deadline=None)
@given(answers(), st.sampled_from([None, ["reasoning.encrypted_content"]]))
def test_responses(deltas: list[Delta], include: Any) -> None:
    request = ResponsesRequest(model="tiny", input="Hi", include=include)

    def format() -> AnswerFormat:
        return Responses().answer_format(
            request, AnswerContext("req_1", SPELLED, SamplingParams(5, 1))
        )

    state: ResponseStreamState[Any] = ResponseStreamState(input_tools=omit, text_format=omit)
    last: Any = None
    numbers: list[int] = []
    for sse in OpenAIDecoder().iter_bytes(iter([stream_of(format(), deltas, USAGE)])):
        if not sse.data:
            continue
        event = check_event(sse.json())
        assert sse.event == event.type
        numbers.append(event.sequence_number)
        last = state.handle_event(event)[-1]
    assert numbers == list(range(len(numbers)))
    body = body_of(format(), deltas, USAGE)
    check_response(body)
    shown = json.loads(last.response.to_json())
    assert last.type == f"response.{body['status']}"
    for item, expected in zip(shown["output"], body["output"], strict=True):
        item.pop("parsed_arguments", None)
        for part in item.get("content", ()):
            part.pop("parsed", None)
        assert item == expected
    for name in ("id", "model", "status", "incomplete_details", "usage"):
        assert shown[name] == body[name]
