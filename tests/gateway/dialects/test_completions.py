"""Text completions through the official client."""

from __future__ import annotations

from typing import Any

import openai
import pytest

from gateway.dispatch.sequence import WHOLE_INTERVAL
from tests.gateway.scripted import ScriptedWorker
from tests.gateway.scripts import ids, repeat_prompt, say
from workers.wire.protocol import OutputKind


def test_one_prompt(client: openai.OpenAI, worker: ScriptedWorker) -> None:
    worker.script = say(" there was a long answer")
    answer = client.completions.create(model="tiny", prompt="Once")
    assert answer.object == "text_completion"
    assert answer.choices[0].text == " there was a lon"
    assert answer.choices[0].finish_reason == "length"
    assert answer.usage and answer.usage.completion_tokens == 16
    assert worker.requests[-1].tokens == ids("Once")
    assert worker.requests[-1].params.max_tokens == 16


@pytest.mark.parametrize(
    "prompt",
    [["one", "two"], [ids("one"), ids("two")]],
    ids=["texts", "token lists"],
)
@pytest.mark.parametrize("stream", [False, True])
def test_prompts_and_choices_are_told_apart(
    client: openai.OpenAI, worker: ScriptedWorker, prompt: list, stream: bool
) -> None:
    worker.script = repeat_prompt
    before = len(worker.requests)
    texts = ["", "", "", ""]
    if stream:
        for chunk in client.completions.create(model="tiny", prompt=prompt, n=2, stream=True):
            for choice in chunk.choices:
                texts[choice.index] += choice.text
    else:
        answer = client.completions.create(model="tiny", prompt=prompt, n=2)
        assert answer.usage and answer.usage.prompt_tokens == 6
        texts = [choice.text for choice in answer.choices]
        assert [choice.index for choice in answer.choices] == [0, 1, 2, 3]
    assert texts == ["one#0", "one#1", "two#0", "two#1"]
    seeds = [request.params.seed for request in worker.requests[before:]]
    assert seeds[0] == seeds[1] != seeds[2] == seeds[3]


def test_a_prompt_of_token_ids(client: openai.OpenAI, worker: ScriptedWorker) -> None:
    worker.script = repeat_prompt
    answer = client.completions.create(model="tiny", prompt=ids("ids"), seed=1)
    assert answer.choices[0].text == "ids#0"
    assert worker.requests[-1].params.seed == 1


def test_echo(client: openai.OpenAI, worker: ScriptedWorker) -> None:
    worker.script = say(" world")
    answer = client.completions.create(model="tiny", prompt="Hello STOP", echo=True, stop="STOP")
    assert answer.choices[0].text == "Hello STOP world"
    assert worker.requests[-1].params.prompt_logprobs is None


@pytest.mark.parametrize("stream", [False, True])
def test_echo_with_logprobs(client: openai.OpenAI, worker: ScriptedWorker, stream: bool) -> None:
    worker.script = say("cd")
    tokens: list[str] = []
    logprobs: list[float | None] = []
    offsets: list[int] = []
    tops: list[dict[str, float] | None] = []
    answer = client.completions.create(
        model="tiny", prompt="ab", echo=True, logprobs=2, stream=stream
    )
    for part in answer if stream else [answer]:
        found = part.choices[0].logprobs
        if found:
            tokens += found.tokens
            logprobs += found.token_logprobs
            offsets += found.text_offset
            tops += found.top_logprobs
    assert tokens == ["a", "b", "c", "d", "<|im_end|>"]
    assert logprobs == [None, -0.5, -0.5, -0.5, -0.5]
    assert offsets == [0, 1, 2, 3, 4]
    assert tops[0] is None and tops[1] == {"b": -0.5, "c": -1.5}


def test_scoring_a_prompt_generates_nothing(client: openai.OpenAI, worker: ScriptedWorker) -> None:
    worker.script = say("never shown")
    answer = client.completions.create(
        model="tiny", prompt=ids("score me"), echo=True, logprobs=0, max_tokens=0
    )
    assert answer.choices[0].text == "score me"
    assert answer.choices[0].finish_reason == "length"
    assert answer.choices[0].logprobs and len(answer.choices[0].logprobs.tokens) == 8
    assert answer.usage and answer.usage.completion_tokens == 0
    assert worker.requests[-1].kind is OutputKind.SCORE
    assert worker.requests[-1].params.max_tokens == 0
    assert worker.requests[-1].params.prompt_logprobs == 0


@pytest.mark.parametrize("stream", [False, True])
def test_echo_alone_needs_no_logprobs(
    client: openai.OpenAI, worker: ScriptedWorker, stream: bool
) -> None:
    """And shows none, though the worker scores the prompt."""
    worker.script = say("never shown")
    asked = {"model": "tiny", "prompt": "only this", "echo": True, "max_tokens": 0}
    answer = client.completions.create(**asked, stream=stream)
    choices = [choice for part in (answer if stream else [answer]) for choice in part.choices]
    assert "".join(choice.text for choice in choices) == "only this"
    assert all(choice.logprobs is None for choice in choices)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("max_tokens", [0, 3])
def test_a_prompt_with_several_choices_is_scored_once(
    client: openai.OpenAI, worker: ScriptedWorker, stream: bool, max_tokens: int
) -> None:
    """Every choice shows what it would show alone."""
    asked = {"model": "tiny", "prompt": ["ab", "wxyz"], "echo": True, "logprobs": 1, "seed": 1}

    def parts(**fields: Any) -> list[dict[str, Any]]:
        """Of each choice all that its chunks say, joined."""
        answer = client.completions.create(
            **asked,
            max_tokens=max_tokens,
            stream=stream,
            extra_body={"return_token_ids": True, **fields},
        )
        found: dict[int, dict[str, Any]] = {}
        for chunk in answer if stream else [answer]:
            for choice in chunk.choices:
                said = found.setdefault(choice.index, {"text": "", "scored": [], "ids": []})
                said["text"] += choice.text
                said["ids"] += (choice.model_extra or {})["token_ids"]
                said["finish_reason"] = choice.finish_reason
                if choice.logprobs is not None:
                    said["scored"].append(choice.logprobs.model_dump())
        return [found[index] for index in sorted(found)]

    worker.script = repeat_prompt
    before = len(worker.requests)
    one, other = parts()
    assert len(worker.requests) == before + 2
    many = parts(n=3)
    sent = worker.requests[before + 2 :]
    assert len([r for r in sent if r.params.prompt_logprobs is not None]) == 2
    assert len(sent) == (2 if max_tokens == 0 else 6)
    assert sorted(r.params.choice for r in sent if r.tokens == ids("ab")) == (
        [0] if max_tokens == 0 else [0, 1, 2]
    )
    assert many == [one] * 3 + [other] * 3


def test_logprobs_have_the_token_itself_and_its_place(
    client: openai.OpenAI, worker: ScriptedWorker
) -> None:
    """A token that is a part of a character begins where that does."""
    worker.script = say("é!")
    answer = client.completions.create(model="tiny", prompt="x", logprobs=0, max_tokens=3)
    found = answer.choices[0].logprobs
    assert found and found.tokens and found.top_logprobs
    assert [list(top) for top in found.top_logprobs] == [[token] for token in found.tokens]
    assert found.text_offset == [0, 0, 1]


@pytest.mark.parametrize("stream", [False, True])
def test_token_ids(client: openai.OpenAI, worker: ScriptedWorker, stream: bool) -> None:
    """Up to the one that ends the stop string."""
    worker.script = say("Grüße STOP more", per_step=3)
    asked = {"model": "tiny", "prompt": "x", "stop": "OP", "max_tokens": 40}
    extra = {"return_token_ids": True}
    if stream:
        chunks = client.completions.create(**asked, stream=True, extra_body=extra)
        choices = [choice for chunk in chunks for choice in chunk.choices]
    else:
        choices = client.completions.create(**asked, extra_body=extra).choices
    tokens = [t for choice in choices for t in (choice.model_extra or {})["token_ids"]]
    assert "".join(choice.text for choice in choices) == "Grüße ST"
    assert tokens == ids("Grüße STOP")


@pytest.mark.parametrize("stream", [False, True])
def test_token_ids_are_those_that_are_counted(
    client: openai.OpenAI, worker: ScriptedWorker, stream: bool
) -> None:
    """The end token is one of them."""
    worker.script = say("done", per_step=3)
    asked: dict[str, Any] = {"model": "tiny", "prompt": "x", "max_tokens": 40}
    asked["extra_body"] = {"return_token_ids": True}
    if stream:
        asked |= {"stream": True, "stream_options": {"include_usage": True}}
    answer = client.completions.create(**asked)
    parts = list(answer) if stream else [answer]
    tokens = [t for part in parts for c in part.choices for t in (c.model_extra or {})["token_ids"]]
    assert tokens[:-1] == ids("done")
    assert len(tokens) == parts[-1].usage.completion_tokens == 5


def test_who_waits_for_the_whole_is_not_told_of_each_token(
    client: openai.OpenAI, worker: ScriptedWorker
) -> None:
    """Unless a stop string may end it at any."""

    def asked(**options: Any) -> int:
        worker.script = say("an answer")
        list(client.completions.create(model="tiny", prompt="Once", **options))
        return worker.requests[-1].stream_interval

    assert asked() == asked(n=2) == WHOLE_INTERVAL > 1
    assert asked(stream=True) == asked(stop="END") == 1
