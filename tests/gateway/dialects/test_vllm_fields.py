"""vLLM's fields that decide about prompts, tokens and what is told of them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import anthropic
import openai
import pytest

from tests.gateway.scripted import ScriptedWorker
from tests.gateway.scripts import ids, say, spelled
from tests.gateway.service import Service
from tests.gateway.templated import FIRST_ADDED, templated_service
from workers.wire.protocol import ThoughtBound, TokenRules

BEGIN, END = FIRST_ADDED, FIRST_ADDED + 1
CHAT: list[Any] = [{"role": "user", "content": "Hi"}]


@pytest.fixture(scope="module")
def thinking(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    """A model that thinks, with markers that are tokens."""
    folder = tmp_path_factory.mktemp("thinking")
    with templated_service(folder, added=("<think>", "</think>")) as service:
        yield service


def ask(client: openai.OpenAI, prompt: Any = "Hello", **fields: Any) -> Any:
    typed = {name: fields.pop(name) for name in ("stream", "n", "echo", "logprobs") & fields.keys()}
    typed.setdefault("extra_body", fields)
    return client.completions.create(model="tiny", prompt=prompt, max_tokens=4, **typed)


def test_allowed_and_bad_words_reach_the_worker_as_tokens(
    client: openai.OpenAI, worker: ScriptedWorker
) -> None:
    """The text with a space before it ends as the text does: one sequence bans both."""
    worker.script = say("ok")
    ask(client, allowed_token_ids=[3, 1], bad_words=["  ab", "c"], n=2)
    rules = TokenRules((3, 1), (tuple(ids("ab")), tuple(ids("c"))))
    assert [request.params.rules for request in worker.requests[-2:]] == [rules, rules]
    ask(client)
    assert worker.requests[-1].params.rules is None


@pytest.mark.parametrize(
    ("param", "fields"),
    [
        ("allowed_token_ids", {"allowed_token_ids": [1 << 20]}),
        ("allowed_token_ids", {"allowed_token_ids": [1], "guided_regex": "a"}),
        ("allowed_token_ids", {"allowed_token_ids": [1] * 4097}),
        ("bad_words", {"bad_words": ["x"] * 257}),
        ("bad_words", {"bad_words": [f"{n:0256}" for n in range(17)]}),
        ("bad_words", {"bad_words": [""]}),
        ("best_of", {"best_of": 3, "n": 2}),
        ("prompt_logprobs", {"prompt_logprobs": 1, "stream": True}),
        ("logprobs", {"prompt_logprobs": 20, "prompt": ["x" * 100] * 128}),
        ("truncate_prompt_tokens", {"truncate_prompt_tokens": 0}),
    ],
)
def test_what_is_too_much_or_contradicts_is_refused(
    client: openai.OpenAI, worker: ScriptedWorker, param: str, fields: dict[str, Any]
) -> None:
    num_requests = len(worker.requests)
    with pytest.raises(openai.BadRequestError) as refusal:
        list(ask(client, **fields))
    assert refusal.value.param == param or param in refusal.value.message
    assert len(worker.requests) == num_requests


def test_a_prompt_is_told_with_the_likeliest_tokens(
    client: openai.OpenAI, worker: ScriptedWorker
) -> None:
    """In each choice of a completion and once in a chat, computed and billed once."""
    worker.script = say("ok")
    answer = ask(client, "ab", prompt_logprobs=2, n=2, echo=True, logprobs=1)
    first, second = ids("b")[0], (ids("b")[0] + 1) % 256
    told = [
        None,
        {
            str(first): {"logprob": -0.5, "rank": 1, "decoded_token": "b"},
            str(second): {"logprob": -1.5, "rank": 2, "decoded_token": "c"},
        },
    ]
    assert [choice.prompt_logprobs for choice in answer.choices] == [told, told]
    assert answer.choices[0].logprobs.top_logprobs[1] == {"b": -0.5}
    assert answer.usage.prompt_tokens == 2
    assert sorted(
        (r.params.prompt_logprobs is None, r.params.prompt_logprobs) for r in worker.requests[-2:]
    ) == [(False, 2), (True, None)]
    chat: Any = client.chat.completions.create(
        model="tiny", messages=CHAT, extra_body={"prompt_logprobs": 0}, n=2
    )
    assert len(chat.prompt_logprobs) == chat.usage.prompt_tokens
    assert next(iter(chat.prompt_logprobs[1].values()))["rank"] is None
    assert not hasattr(chat.choices[0], "prompt_logprobs")


def test_a_prompt_keeps_its_last_tokens(client: openai.OpenAI, worker: ScriptedWorker) -> None:
    worker.script = say("ok")
    answer = ask(client, "Hello", truncate_prompt_tokens=3, echo=True)
    assert answer.choices[0].text == "llook" and answer.usage.prompt_tokens == 3
    ask(client, ids("Hello"), truncate_prompt_tokens=9)
    assert worker.requests[-1].tokens == ids("Hello")
    room = worker.models[0].max_model_len
    with pytest.raises(openai.BadRequestError, match="context"):
        ask(client, "x" * (room + 9))
    ask(client, "x" * (room + 9), truncate_prompt_tokens=-1)
    assert len(worker.requests[-1].tokens) == room - 4
    chat = client.chat.completions.create(
        model="tiny", messages=CHAT, extra_body={"truncate_prompt_tokens": 5}
    )
    assert chat.usage and chat.usage.prompt_tokens == 5
    assert spelled(worker.requests[-1].tokens) == "tant\n"


@pytest.mark.parametrize("is_chat", [False, True])
def test_each_chunk_tells_what_its_choice_has_used(
    client: openai.OpenAI, worker: ScriptedWorker, is_chat: bool
) -> None:
    """The end token counts, which no chunk shows."""
    worker.script = say("abc")
    options: Any = {"include_usage": True, "continuous_usage_stats": True}
    if is_chat:
        stream: Any = client.chat.completions.create(
            model="tiny", messages=CHAT, stream=True, stream_options=options
        )
    else:
        stream = client.completions.create(
            model="tiny", prompt="Hello", stream=True, stream_options=options
        )
    *chunks, last = stream
    counts = [chunk.usage.completion_tokens for chunk in chunks]
    assert counts == ([0] if is_chat else []) + [1, 2, 3, 4]
    assert {chunk.usage.prompt_tokens for chunk in chunks} == {last.usage.prompt_tokens}
    assert last.usage.completion_tokens == 4


@pytest.mark.parametrize("stream", [False, True])
def test_a_chat_repeats_what_it_goes_on_with(
    client: openai.OpenAI, worker: ScriptedWorker, stream: bool
) -> None:
    worker.script = say(" Parcel.")
    begun: list[Any] = [*CHAT, {"role": "assistant", "content": "Your"}]
    goes_on = {"echo": True, "continue_final_message": True}
    for messages, text in ((begun, "Your Parcel."), (CHAT, " Parcel.")):
        body = goes_on if messages is begun else {"echo": True}
        answer: Any = client.chat.completions.create(
            model="tiny", messages=messages, extra_body=body, stream=stream
        )
        if stream:
            assert "".join(chunk.choices[0].delta.content or "" for chunk in answer) == text
        else:
            assert answer.choices[0].message.content == text


@pytest.mark.parametrize("field", ["thinking_token_budget", "thinking_budget"])
def test_a_chat_bounds_its_thought(thinking: Service, field: str) -> None:
    thinking.worker.script = say("ok")
    with thinking.client() as client:
        for budget, rules in ((7, TokenRules(thought=ThoughtBound(7, BEGIN, END))), (-1, None)):
            client.chat.completions.create(model="tiny", messages=CHAT, extra_body={field: budget})
            assert thinking.worker.requests[-1].params.rules == rules
        with pytest.raises(openai.BadRequestError, match="differ"):
            client.chat.completions.create(
                model="tiny",
                messages=CHAT,
                extra_body={"thinking_budget": 1, "thinking_token_budget": 2},
            )


def test_messages_bound_their_thought(thinking: Service, service: Service) -> None:
    """Where the markers are no tokens it is dropped and named; a chat is refused."""
    asked: Any = {"type": "enabled", "budget_tokens": 1024}
    body: Any = {"model": "tiny", "max_tokens": 9, "messages": CHAT, "thinking": asked}
    dropped: list[str | None] = []
    for each in (thinking, service):
        each.worker.script = say("ok")
        with each.client() as client:
            url = str(client.base_url).removesuffix("/v1/")
            anthropics = anthropic.Anthropic(base_url=url, api_key=client.api_key)
            raw = anthropics.messages.with_raw_response.create(**body)
            dropped.append(raw.headers.get("loraplex-dropped"))
    assert dropped == [None, "thinking.budget_tokens"]
    bound = ThoughtBound(1024, BEGIN, END)
    assert thinking.worker.requests[-1].params.rules == TokenRules(thought=bound)


def test_thoughts_without_tokens_of_their_own_cannot_be_bounded(
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    with (
        templated_service(tmp_path_factory.mktemp("spelled")) as service,
        service.client() as client,
        pytest.raises(openai.BadRequestError, match="no tokens of their own") as refusal,
    ):
        client.chat.completions.create(
            model="tiny", messages=CHAT, extra_body={"thinking_token_budget": 5}
        )
    assert refusal.value.param == "thinking_token_budget"


def test_the_grammar_of_the_answer_begins_after_a_bounded_thought(thinking: Service) -> None:
    thinking.worker.script = say("ok")
    with thinking.client() as client:
        client.chat.completions.create(
            model="tiny",
            messages=CHAT,
            extra_body={"thinking_token_budget": 5, "guided_json": {"type": "integer"}},
        )
    request = thinking.worker.requests[-1]
    assert request.params.rules == TokenRules(thought=ThoughtBound(5, BEGIN, END))
    assert "thought" in json.loads(request.grammar)["grammars"][0]["lark_grammar"]
