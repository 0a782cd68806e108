"""Answers with many log-probabilities: refused before they are begun if they are too large, else
written some tokens at a time while the loop goes on with others."""

from __future__ import annotations

import asyncio
import tracemalloc
from typing import Any

import msgspec
import numpy as np
import openai
import pytest

from gateway.dialects.chat_completions import ChatFormat
from gateway.dialects.cohere_embeddings import EmbedFormat, EmbedRequest
from gateway.dialects.completions import CompletionFormat
from gateway.dialects.dialect import SCORES_AT_ONCE, Answer, BodyFormat, split
from gateway.dialects.embeddings import EmbeddingFormat
from gateway.dialects.openai_fields import OpenAIRequest
from gateway.dialects.openai_format import OpenAIFormat
from gateway.dispatch.sequence import Delta, Scored, ScoredToken
from gateway.exceptions import InvalidRequest
from gateway.limits.admission import Usage
from gateway.limits.bounds import (
    MAX_ECHO_CHARS,
    MAX_LOGPROBS,
    MAX_VECTOR_NUMBERS,
    check_answer,
)
from gateway.text.parsers.parser import Text
from tests.gateway.scripts import ids, say
from tests.gateway.service import Service
from tests.scripted_worker import ScriptedWorker

NUM_TOP = 20
SCORED_AT_ONCE = SCORES_AT_ONCE // (NUM_TOP + 1)
"""Tokens, with so many others each."""
MORE_BYTES = 16 << 20
"""What the parts of a large answer may take beside it: a quarter of what a request may take."""
PROMPT = "abcdefghij" * 10
"""Of which a few choices have more tokens than are written at once."""


class Counted(dict[int, bytes]):
    """The bytes of each id, and how often one was asked for since `num_asked` was reset."""

    num_asked = 0

    def __getitem__(self, token: int) -> bytes:
        self.num_asked += 1
        return b"%d " % token


def scored(num_tokens: int) -> list[Scored]:
    return [
        ScoredToken(n, -float(n), [(n + place, -float(place)) for place in range(NUM_TOP)])
        for n in range(num_tokens)
    ]


def format_of(dialect: type[OpenAIFormat], spelled: Any) -> OpenAIFormat:
    return dialect("x", OpenAIRequest(model="tiny"), spelled, logprobs=True)


@pytest.mark.parametrize("dialect", [CompletionFormat, ChatFormat])
@pytest.mark.parametrize("num_choices", [1, 40])
async def test_a_large_body_is_written_while_the_loop_goes_on(
    dialect: type[OpenAIFormat], num_choices: int
) -> None:
    """The same body as of its parts, and never more of it at a time than a few tokens."""
    spelled, num_tokens = Counted(), MAX_LOGPROBS // (NUM_TOP + 1) // num_choices // 4
    answers = [Answer(i, scored=scored(num_tokens)) for i in range(num_choices)]
    task = asyncio.create_task(format_of(dialect, spelled).body(answers, Usage()))
    most = 0
    while not task.done():
        spelled.num_asked = 0
        await asyncio.sleep(0)
        most = max(most, spelled.num_asked)
    assert num_tokens * num_choices >= SCORED_AT_ONCE
    assert 0 < most <= (SCORED_AT_ONCE + 1) * (NUM_TOP + 2)
    shown = format_of(dialect, Counted())
    whole = [shown._logprobs_of(answer.index, answer.scored) for answer in answers]
    body = msgspec.json.decode(b"".join(task.result()))
    assert [choice["logprobs"] for choice in body["choices"]] == msgspec.to_builtins(whole)


def largest_answers(kind: str) -> tuple[BodyFormat, list[Answer]]:
    """Returns the format and the choices of an answer that has just the allowed size."""
    if kind == "scores":
        answers = [Answer(0, scored=scored(MAX_LOGPROBS // (NUM_TOP + 1)))]
        return format_of(ChatFormat, Counted()), answers
    size = 1024
    num_forms = 2 if kind == "forms" else 1
    rng = np.random.default_rng(0)
    answers = [
        Answer(index, vector=rng.normal(size=size).astype("<f4").tobytes())
        for index in range(MAX_VECTOR_NUMBERS // size // num_forms)
    ]
    if kind == "forms":
        asked = EmbedRequest(model="tiny", texts=["a"], embedding_types=["float", "int8"])
        return EmbedFormat("x", asked), answers
    return EmbeddingFormat("x", "tiny", None, is_base64=kind == "base64"), answers


@pytest.mark.parametrize("kind", ["floats", "base64", "forms", "scores"])
async def test_the_largest_answers_take_at_most_twice_their_bytes(kind: str) -> None:
    """While they are written, beyond what a request may take."""
    format, answers = largest_answers(kind)
    tracemalloc.start()
    try:
        pieces = await format.body(answers, Usage())
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak <= 2 * sum(map(len, pieces)) + MORE_BYTES


def test_a_large_delta_is_split_into_events() -> None:
    delta = Delta(3, [Text("text")], list(scored(3 * SCORED_AT_ONCE + 1)), "length", [7])
    parts = list(split([delta]))
    assert [len(part.scored) for part in parts] == [SCORED_AT_ONCE] * 3 + [1]
    assert [entry for part in parts for entry in part.scored] == delta.scored
    assert "".join(part.text for part in parts) == "text"
    assert [part.finish_reason for part in parts] == [None] * 3 + ["length"]
    assert [part.tokens for part in parts] == [[7], [], [], []]


@pytest.mark.parametrize("stream", [False, True])
def test_a_large_answer_is_whole(
    client: openai.OpenAI, worker: ScriptedWorker, stream: bool
) -> None:
    worker.script = say("yz")
    fields: dict[str, Any] = {"prompt": PROMPT, "echo": True, "logprobs": 5, "n": 3}
    answer: Any = client.completions.create(model="tiny", max_tokens=2, stream=stream, **fields)
    tokens: dict[int, list[str]] = {}
    offsets: dict[int, list[int]] = {}
    for part in answer if stream else [answer]:
        for choice in part.choices:
            if choice.logprobs:
                tokens.setdefault(choice.index, []).extend(choice.logprobs.tokens)
                offsets.setdefault(choice.index, []).extend(choice.logprobs.text_offset)
    assert tokens == {index: list(PROMPT + "yz") for index in range(3)}
    assert offsets == {index: list(range(len(PROMPT) + 2)) for index in range(3)}


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("completions", {"prompt": ids(PROMPT), "echo": True, "max_tokens": 0, "logprobs": 20}),
        ("completions", {"prompt": ids(PROMPT), "echo": True, "max_tokens": 1, "stream": True}),
        ("completions", {"prompt": "a", "max_tokens": 120, "logprobs": 20}),
        ("chat/completions", {"max_tokens": 100, "logprobs": True, "top_logprobs": 20}),
    ],
    ids=["scores", "streamed", "generated", "chat"],
)
def test_an_answer_that_would_be_too_large_is_not_begun(
    service: Service, path: str, body: dict[str, Any]
) -> None:
    """12,000 tokens with 20 others each took 2.6 KiB a token, and the loop 176 ms."""
    num_requests = len(service.worker.requests)
    if path == "completions":
        body = {"logprobs": 20, **body}
    else:
        body = {"messages": [{"role": "user", "content": "Hi"}], **body}
    answer = service.post(f"/v1/{path}", {"model": "tiny", "n": 128, **body})
    error = answer.json()["error"]
    assert (answer.status_code, error["param"]) == (400, "logprobs")
    assert error["code"] == "answer_too_large" and str(MAX_LOGPROBS) in error["message"]
    assert len(service.worker.requests) == num_requests


def test_of_a_stream_generated_tokens_do_not_count(
    client: openai.OpenAI, worker: ScriptedWorker
) -> None:
    worker.script = say("y")
    chunks = list(
        client.completions.create(
            model="tiny", prompt="a", max_tokens=120, logprobs=20, n=128, stream=True
        )
    )
    assert len([chunk for chunk in chunks if chunk.choices[0].finish_reason]) == 128


def test_what_is_repeated_of_prompts_is_bounded() -> None:
    check_answer(MAX_LOGPROBS, MAX_ECHO_CHARS)
    with pytest.raises(InvalidRequest, match=f"may repeat {MAX_ECHO_CHARS}"):
        check_answer(0, MAX_ECHO_CHARS + 1)
