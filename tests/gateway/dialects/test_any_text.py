"""No text of a model and no schema of a tool is an error of ours, whatever the format."""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.dialects.chat_completions import ChatCompletionRequest, ChatCompletions
from gateway.dialects.completions import CompletionRequest, Completions
from gateway.dialects.dialect import Answer, AnswerContext, AnswerFormat, Dialect
from gateway.dialects.messages import Messages
from gateway.dialects.messages_fields import MessagesRequest
from gateway.dialects.responses import Responses
from gateway.dialects.responses_fields import ResponsesRequest
from gateway.dispatch.sequence import Delta
from gateway.limits.admission import Usage
from gateway.request import Tool
from gateway.text.detokenizer import TokenBytes
from gateway.text.long_texts import LongTexts
from gateway.text.parsers.answer_form import AnswerForm
from gateway.text.parsers.parser import Part
from gateway.text.template_process import TemplateProcesses
from gateway.text.tokenizer import ModelTokenizer
from tests.doubles import make_tokenizer
from tests.gateway.dialects.test_all_dialects import LENGTH_FIELD, post
from tests.gateway.dialects.test_all_dialects import service as service
from tests.gateway.scripts import say
from tests.gateway.service import Service
from tests.gateway.text.odd_schemas import ODD_SCHEMAS
from tests.gateway.text.test_parsers import FORMATS, write
from tests.scale import scaled
from tests.scripted_worker import ScriptedWorker
from workers.wire.protocol import SamplingParams, TokenLogprobs

EXAMPLES = scaled(300, 20_000)
HI: list[Any] = [{"role": "user", "content": "Hi"}]
DIALECTS: list[tuple[Dialect[Any], Any, dict[str, Any]]] = [
    (ChatCompletions(), ChatCompletionRequest, {"messages": HI, "logprobs": True}),
    (Completions(), CompletionRequest, {"prompt": "Hi", "logprobs": 1}),
    (Responses(), ResponsesRequest, {"input": "Hi", "include": ["message.output_text.logprobs"]}),
    (Messages(), MessagesRequest, {"messages": HI, "max_tokens": 9}),
]
LONE = r"\ud800"
"""As JSON and Python write half of a character."""
WORDS = [
    LONE,
    r"\udfff\ud800",
    r"\ud83d",
    r"\ud83d\ude00",
    "\\",
    "\\u12",
    '"',
    "'",
    "x",
    "é",
    "\x00",
]
MARKS = [
    *("<tool_call>", "</tool_call>", "<think>", "</think>", "<function=f>", "</function>"),
    *("<parameter=x>", "</parameter>", "[TOOL_CALLS]", "[ARGS]", "<|python_tag|>"),
    *("<|python_start|>", "[f(x=", ")]", "<start_function_call>", "call:f{", "<escape>"),
    *("<end_function_call>", "<|tool_call>", '<|"|>', "<tool_call|>"),
    *('{"name": "f", "arguments": ', '{"name": "f", "parameters": ', "{", "}", "[", "]", ":", ","),
    *("{" * 1_200, "[" * 1_200, '{"a":' * 1_200, "1e999", "NaN", "-", "9" * 400, "\n"),
]
words = st.sampled_from(WORDS) | st.text(max_size=4)
values = st.recursive(
    words | st.integers() | st.floats() | st.none() | st.booleans(),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(words, inner, max_size=2),
    max_leaves=4,
)


@st.composite
def answers(draw: st.DrawFn) -> tuple[AnswerForm, str]:
    """A form of answers, and an answer: a call of that form, or any text."""
    calls = draw(st.sampled_from(FORMATS))
    form = AnswerForm(calls, draw(st.booleans()))
    if draw(st.booleans()):
        return form, "".join(draw(st.lists(st.sampled_from(MARKS) | words, max_size=20)))
    name, arguments = (
        draw(st.sampled_from(["f", "g"]) | words),
        draw(st.dictionaries(words | st.just("x"), values, max_size=3)),
    )
    # Escapes of the values are the model's own, and not ours.
    text = write(calls, (name, arguments)).replace("\\\\ud", "\\ud")
    return form, draw(st.sampled_from(["", "<think>", "So. "])) + text


@pytest.fixture(scope="module")
def spelled(tmp_path_factory: pytest.TempPathFactory) -> TokenBytes:
    folder = tmp_path_factory.mktemp("tiny")
    make_tokenizer(folder)
    return ModelTokenizer(folder, LongTexts(), TemplateProcesses()).spelling.all


@given(answers(), st.sampled_from(ODD_SCHEMAS), st.integers(1, 40), st.booleans(), st.booleans())
@settings(max_examples=EXAMPLES, deadline=None, derandomize=True, database=None)
def test_every_answer_can_be_written(
    spelled: TokenBytes,
    answer: tuple[AnswerForm, str],
    schema: dict[str, Any],
    size: int,
    is_parallel: bool,
    in_thought: bool,
) -> None:
    form, text = answer
    tools = [Tool(name=name, parameters=schema) for name in ("f", "get_weather")]
    parser = form.parser(tools, is_parallel=is_parallel, in_thought=in_thought)
    pieces = [parser.push(text[at : at + size]) for at in range(0, len(text), size)]
    pieces.append(parser.finish())
    for dialect, kind, fields in DIALECTS:
        body = msgspec.convert({"model": "m", **fields}, kind)
        stream, whole = (
            dialect.answer_format(body, AnswerContext("req", spelled, SamplingParams(9, 5)))
            for _ in range(2)
        )
        assert isinstance(stream, AnswerFormat)
        answered = Answer(0)
        events = [stream.start(Usage())]
        for delta in deltas(pieces):
            answered.add(delta)
            events.append(stream.chunk(delta))
        events.append(stream.end(Usage()))
        for line in b"".join(events).splitlines():
            if line.startswith(b"data: {"):
                msgspec.json.decode(line.removeprefix(b"data: "))
        msgspec.json.decode(b"".join(asyncio.run(whole.body([answered], Usage()))))


def deltas(pieces: list[list[Part]]) -> list[Delta]:
    """One for each step. Tokens are parts of characters too."""
    scores = [
        TokenLogprobs(at % 260, -0.5, [((at + 7) % 260, float("-inf"))])
        for at in range(len(pieces))
    ]
    ends = [None] * (len(pieces) - 1) + ["stop"]
    return [
        Delta(0, parts, [score], end, [score.token])
        for parts, score, end in zip(pieces, scores, ends, strict=True)
    ]


CALLS = {
    "name": r'<tool_call>\n{"name": "get_\ud800", "arguments": {}}\n</tool_call>',
    "argument": r'<tool_call>\n{"name": "get_time", "arguments": {"a": "\ud800"}}\n</tool_call>',
    "key": r'<tool_call>\n{"name": "get_time", "arguments": {"\udfff": 1}}\n</tool_call>',
    "before": r'<tool_call>\n{"arguments": {"a": "\ud800"}, "name": "get_time"}\n</tool_call>',
    "text": r'<tool_call>\n{"name": "get_time", "arguments": "{\"a\": \"\\ud800\"}"}</tool_call>',
    "nested": '<tool_call>\n{"name": "get_time", "arguments": {"a": ' + "[" * 1_500,
    "closed": '<tool_call>\n{"name": "get_time", "arguments": {"a": '
    + "[" * 1_500
    + "]" * 1_500
    + "}}",
}


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("dialect", ["chat", "messages", "responses"])
def test_half_a_character_in_a_call_is_answered(
    service: Service, worker: ScriptedWorker, dialect: str, stream: bool, call: str
) -> None:
    worker.script = say(call, per_step=50)
    answer = post(service, dialect, stream=stream, **{LENGTH_FIELD[dialect]: 3_000})
    assert answer.status_code == 200, answer.text
    assert "get_" in answer.text and "error" not in answer.text.replace('"error":null', "")
