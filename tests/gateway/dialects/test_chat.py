"""Chat completions through the official client."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import openai
import pytest

from tests.gateway.scripted import ScriptedWorker
from tests.gateway.scripts import endless, ids, repeat_prompt, say, spelled
from tests.gateway.service import Service
from workers.wire.protocol import Generate, SequenceOutput

HELLO = [{"role": "user", "content": "Hi"}]
RENDERED = "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"


def test_one_body(client: openai.OpenAI, worker: ScriptedWorker) -> None:
    worker.script = say("Grüße, 世界 🏴", cached=16)
    raw = client.chat.completions.with_raw_response.create(
        model="support-bot", messages=HELLO, temperature=0, seed=5
    )
    answer = raw.parse()
    assert answer.object == "chat.completion" and answer.model == "support-bot"
    assert answer.choices[0].message.role == "assistant"
    assert answer.choices[0].message.content == "Grüße, 世界 🏴"
    assert answer.choices[0].finish_reason == "stop"
    assert answer.usage and answer.usage.completion_tokens == len("Grüße, 世界 🏴".encode()) + 1
    assert answer.usage.prompt_tokens == len(worker.requests[-1].tokens)
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens
    assert answer.usage.prompt_tokens_details
    assert answer.usage.prompt_tokens_details.cached_tokens == 16
    assert raw.headers["loraplex-adapter-version"] == "7"
    assert raw.headers["loraplex-worker"]
    assert raw.headers["x-request-id"] == worker.requests[-1].request_id
    assert int(raw.headers["openai-processing-ms"]) >= 0


def test_what_the_worker_is_asked(client: openai.OpenAI, worker: ScriptedWorker) -> None:
    worker.script = say("ok")
    client.chat.completions.create(
        model="acme/support-bot@staging",
        messages=HELLO,
        temperature=0.5,
        top_p=0.9,
        presence_penalty=0.1,
        frequency_penalty=-0.1,
        logit_bias={"65": -100},
        max_completion_tokens=9,
        seed=-3,
        user="u",
        metadata={"k": "v"},
        store=False,
        service_tier="auto",
        response_format={"type": "text"},
        safety_identifier="s",
        prompt_cache_key="p",
        extra_body={
            "top_k": 7,
            "min_p": 0.05,
            "repetition_penalty": 1.1,
            "ignore_eos": True,
            "min_tokens": 2,
            "stop_token_ids": [10],
            "priority": 3,
            "cache_salt": "pepper",
        },
    )
    asked = worker.requests[-1]
    assert asked.adapter and asked.adapter.digest == "ten_acme-support-bot-3"
    assert (asked.tenant, asked.cache_domain) == ("ten_acme", "tenant:ten_acme")
    assert (asked.priority, asked.cache_salt) == (3, "pepper")
    params = asked.params
    assert (params.temperature, params.top_p, params.top_k, params.min_p) == (0.5, 0.9, 7, 0.05)
    assert (params.presence_penalty, params.frequency_penalty) == (0.1, -0.1)
    assert (params.repetition_penalty, params.logit_bias) == (1.1, {65: -100})
    assert (params.max_tokens, params.seed, params.ignore_eos) == (9, -3, True)
    assert (params.min_tokens, params.stop_token_ids, params.logprobs) == (2, (10,), None)
    assert spelled(asked.tokens) == RENDERED


@pytest.mark.parametrize("name", ["max_tokens", "max_completion_tokens"])
def test_min_tokens_above_max_tokens_are_refused_by_name(client: openai.OpenAI, name: str) -> None:
    asked: dict[str, Any] = {"model": "tiny", name: 3, "extra_body": {"min_tokens": 4}}
    with pytest.raises(openai.BadRequestError, match="'min_tokens' is 4") as refused:
        client.chat.completions.create(messages=HELLO, **asked)
    assert refused.value.param == "min_tokens"
    if name == "max_tokens":
        with pytest.raises(openai.BadRequestError, match="'min_tokens' is 4"):
            client.completions.create(prompt="x", **asked)


def test_a_base_model_has_no_adapter(client: openai.OpenAI, worker: ScriptedWorker) -> None:
    worker.script = say("ok")
    raw = client.chat.completions.with_raw_response.create(model="tiny", messages=HELLO)
    assert worker.requests[-1].adapter is None
    assert "loraplex-adapter-version" not in raw.headers


def test_a_sharing_group_is_the_cache_domain(service: Service, worker: ScriptedWorker) -> None:
    worker.script = say("ok")
    with service.client(service.keys.globex) as client:
        client.chat.completions.create(model="support-bot", messages=HELLO)
    asked = worker.requests[-1]
    assert (asked.tenant, asked.cache_domain) == ("ten_globex", "group:family")
    assert asked.adapter and asked.adapter.digest == "ten_globex-support-bot-1"


def test_stream(client: openai.OpenAI, worker: ScriptedWorker) -> None:
    worker.script = say("naïve 🏴 ende")
    chunks = list(client.chat.completions.create(model="tiny", messages=HELLO, stream=True))
    assert chunks[0].choices[0].delta.role == "assistant"
    pieces = [chunk.choices[0].delta.content or "" for chunk in chunks]
    assert "".join(pieces) == "naïve 🏴 ende"
    assert "�" not in "".join(pieces)
    assert [c.choices[0].finish_reason for c in chunks][-1] == "stop"
    assert all(c.choices[0].finish_reason is None for c in chunks[:-1])
    assert {c.id for c in chunks} == {chunks[0].id} and chunks[0].id.startswith("chatcmpl-")
    assert all("usage" not in chunk.model_dump(exclude_unset=True) for chunk in chunks)


def test_stream_with_usage(client: openai.OpenAI, worker: ScriptedWorker) -> None:
    worker.script = say("hello", cached=8)
    *chunks, last = client.chat.completions.create(
        model="tiny", messages=HELLO, stream=True, stream_options={"include_usage": True}
    )
    assert last.choices == [] and last.usage
    assert last.usage.completion_tokens == 6
    assert last.usage.prompt_tokens_details
    assert last.usage.prompt_tokens_details.cached_tokens == 8
    assert all(c.usage is None and "usage" in c.model_fields_set for c in chunks)


def test_choices_are_told_apart(client: openai.OpenAI, worker: ScriptedWorker) -> None:
    worker.script = repeat_prompt
    before = len(worker.requests)
    answer = client.chat.completions.create(model="tiny", messages=HELLO, n=3, max_tokens=90)
    assert [c.index for c in answer.choices] == [0, 1, 2]
    assert [c.message.content[-2:] for c in answer.choices if c.message.content] == [
        "#0",
        "#1",
        "#2",
    ]
    asked = worker.requests[before:]
    assert [r.params.choice for r in asked] == [0, 1, 2]
    assert len({r.params.seed for r in asked}) == 1 and len({r.id for r in asked}) == 3
    assert answer.usage and answer.usage.prompt_tokens == len(asked[0].tokens)


def test_streamed_choices_are_told_apart(client: openai.OpenAI, worker: ScriptedWorker) -> None:
    worker.script = repeat_prompt
    texts = ["", "", ""]
    ends: list[str | None] = [None, None, None]
    for chunk in client.chat.completions.create(
        model="tiny", messages=HELLO, n=3, max_tokens=90, stream=True
    ):
        for choice in chunk.choices:
            texts[choice.index] += choice.delta.content or ""
            ends[choice.index] = choice.finish_reason or ends[choice.index]
    assert [text[-2:] for text in texts] == ["#0", "#1", "#2"]
    assert ends == ["stop"] * 3


@pytest.mark.parametrize("per_step", [1, 2, 5])
def test_logprobs(client: openai.OpenAI, worker: ScriptedWorker, per_step: int) -> None:
    worker.script = say("a€", per_step=per_step)
    answer = client.chat.completions.create(
        model="tiny", messages=HELLO, logprobs=True, top_logprobs=2
    )
    assert answer.choices[0].logprobs
    content = answer.choices[0].logprobs.content
    assert content
    assert [entry.bytes for entry in content[:4]] == [[0x61], [0xE2], [0x82], [0xAC]]
    names = ["a", "bytes:\\xe2", "bytes:\\x82", "bytes:\\xac", "<|im_end|>"]
    assert [entry.token for entry in content] == names
    assert [entry.logprob for entry in content] == [-0.5] * 5
    assert [t.logprob for t in content[0].top_logprobs] == [-0.5, -1.5]
    assert content[0].top_logprobs[0].token == "a"


def test_streamed_logprobs_are_the_same(client: openai.OpenAI, worker: ScriptedWorker) -> None:
    worker.script = say("a€")
    entries = [
        entry
        for chunk in client.chat.completions.create(
            model="tiny", messages=HELLO, logprobs=True, stream=True
        )
        if chunk.choices[0].logprobs
        for entry in chunk.choices[0].logprobs.content or []
    ]
    spelled = bytes(byte for entry in entries for byte in entry.bytes or [])
    assert spelled == "a€<|im_end|>".encode()
    assert all(entry.top_logprobs == [] for entry in entries)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("per_step", [1, 3, 100])
def test_stop_across_tokens(
    client: openai.OpenAI, worker: ScriptedWorker, stream: bool, per_step: int
) -> None:
    worker.script = say("one STILL two STOP" + " three" * 9, per_step=per_step, pause_s=0.01)
    text, reason, tokens = complete(client, stream, stop=["STOP", "never"])
    assert (text, reason) == ("one STILL two ", "stop")
    assert tokens == len("one STILL two STOP")
    if per_step < 100:
        Service.wait_for(lambda: worker.requests[-1] in worker.aborted)


@pytest.mark.parametrize("stream", [False, True])
def test_a_stop_string_ends_its_own_sequence_while_others_go_on(
    client: openai.OpenAI, worker: ScriptedWorker, stream: bool
) -> None:
    """The second choice begins when the first is aborted, or never."""

    async def script(request: Generate) -> AsyncIterator[SequenceOutput]:
        if request.params.choice == 0:
            source = endless()
            yield SequenceOutput(id=request.id, tokens=ids("oneSTOP"))
        else:
            async with asyncio.timeout(10):
                while not any(r.params.choice == 0 for r in worker.aborted[before:]):
                    await asyncio.sleep(0.01)
            source = say("two")
        async for output in source(request):
            yield output

    worker.script = script
    before = len(worker.aborted)
    texts = ["", ""]
    if stream:
        for chunk in client.chat.completions.create(
            model="tiny", messages=HELLO, n=2, stop="STOP", stream=True
        ):
            for choice in chunk.choices:
                texts[choice.index] += choice.delta.content or ""
    else:
        answer = client.chat.completions.create(model="tiny", messages=HELLO, n=2, stop="STOP")
        texts = [choice.message.content or "" for choice in answer.choices]
    assert texts == ["one", "two"]
    assert [r.params.choice for r in worker.aborted[before:]] == [0]


@pytest.mark.parametrize("stream", [False, True])
def test_what_was_held_back_is_shown_at_the_end(
    client: openai.OpenAI, worker: ScriptedWorker, stream: bool
) -> None:
    worker.script = say("wait, ST")
    assert complete(client, stream, stop="STOP")[:2] == ("wait, ST", "stop")


def test_length(client: openai.OpenAI, worker: ScriptedWorker) -> None:
    worker.script = say("a long answer")
    assert complete(client, False, max_tokens=4) == ("a lo", "length", 4)


def test_half_a_character_at_the_end_is_a_replacement(
    client: openai.OpenAI, worker: ScriptedWorker
) -> None:
    worker.script = say("a🏴")
    assert complete(client, True, max_tokens=3)[:2] == ("a�", "length")


def test_a_stop_string_does_not_count_before_min_tokens(
    client: openai.OpenAI, worker: ScriptedWorker
) -> None:
    worker.script = say("x.y.z.")
    text, reason, _ = complete(client, False, stop=".", extra_body={"min_tokens": 3})
    assert (text, reason) == ("x.y", "stop")


def test_an_answer_may_be_sent_back_as_it_came(
    client: openai.OpenAI, worker: ScriptedWorker
) -> None:
    worker.script = say("sure")
    answer = client.chat.completions.create(model="tiny", messages=HELLO)
    message = {
        **answer.choices[0].message.model_dump(),
        "annotations": None,
        "audio": None,
        "function_call": None,
        "tool_calls": None,
    }
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    again = client.chat.completions.create(
        model="tiny",
        messages=[
            {"role": "developer", "content": "be kind"},
            message,  # type: ignore[list-item]
            {"role": "user", "content": parts},  # type: ignore[typeddict-item]
        ],
        max_tokens=4,
    )
    assert again.choices[0].message.content == "sure"
    assert spelled(worker.requests[-1].tokens) == (
        "<|im_start|>system\nbe kind<|im_end|>\n<|im_start|>assistant\nsure<|im_end|>\n"
        "<|im_start|>user\na\nb<|im_end|>\n<|im_start|>assistant\n"
    )


def complete(client: openai.OpenAI, stream: bool, **options) -> tuple[str, str | None, int]:
    """(text, finish reason, completion tokens) of one choice, streamed or not."""
    if not stream:
        answer = client.chat.completions.create(model="tiny", messages=HELLO, **options)
        assert answer.usage
        choice = answer.choices[0]
        return choice.message.content or "", choice.finish_reason, answer.usage.completion_tokens
    text, reason, tokens = "", None, 0
    for chunk in client.chat.completions.create(
        model="tiny", messages=HELLO, stream=True, stream_options={"include_usage": True}, **options
    ):
        for choice in chunk.choices:
            text += choice.delta.content or ""
            reason = choice.finish_reason or reason
        if chunk.usage:
            tokens = chunk.usage.completion_tokens
    return text, reason, tokens
