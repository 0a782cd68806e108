"""What an answer tells in each dialect, whole and streamed, read with the official clients: where
it stops, what of it was a thought, and the keys that are always there."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import anthropic
import openai
import pytest

from tests.doubles import SIZES
from tests.gateway.dialects.test_all_dialects import CALL, DIALECTS, ask
from tests.gateway.scripted import ScriptedWorker
from tests.gateway.scripts import IM_END, ids, say, spelled
from tests.gateway.service import Service
from tests.gateway.templated import templated_service

THOUGHT = "<think>\nFirst {a}.\n\nThen b.\n</think>\n\n"
THOUGHT_TOKENS = len("\nFirst {a}.\n\nThen b.\n")
"""The tiny model's tokens are bytes."""


class Read(NamedTuple):
    """An answer, whatever dialect it was told in."""

    thought: str
    text: str
    calls: list[Any]
    reason: Any
    num_thought_tokens: int


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    """Its model has the chat template of Qwen 3."""
    with templated_service(tmp_path_factory.mktemp("qwen3")) as service:
        yield service


def read(service: Service, dialect: str, stream: bool, **fields: Any) -> Read:
    body = ask(dialect, **fields)
    if dialect == "messages":
        with anthropic.Anthropic(
            base_url=service.url, api_key=service.keys.acme, max_retries=0, timeout=20
        ) as client:
            return read_message(client, body, stream)
    with service.client() as client:
        if dialect == "responses":
            return read_response(client, body, stream)
        return read_chat(client, body, stream)


def read_chat(client: openai.OpenAI, body: dict[str, Any], stream: bool) -> Read:
    create: Any = client.chat.completions.create
    if not stream:
        answer = create(**body)
        (choice,) = answer.choices
        message, extra = choice.message, choice.message.model_extra
        assert extra["reasoning"] == extra["reasoning_content"]
        calls = [call.function.arguments for call in message.tool_calls or ()]
        read = extra["reasoning"] or "", message.content or "", calls, choice.finish_reason
        return Read(*read, answer.usage.completion_tokens_details.reasoning_tokens)
    thought = text = arguments = ""
    reason, number = None, 0
    for chunk in create(**body, stream=True, stream_options={"include_usage": True}):
        for choice in chunk.choices:
            extra = choice.delta.model_extra
            assert extra["reasoning"] == extra["reasoning_content"]
            thought += extra["reasoning"] or ""
            text += choice.delta.content or ""
            for call in choice.delta.tool_calls or ():
                arguments += (call.function and call.function.arguments) or ""
            reason = choice.finish_reason
        if chunk.usage and chunk.usage.completion_tokens_details:
            number = chunk.usage.completion_tokens_details.reasoning_tokens
    return Read(thought, text, [arguments] if arguments else [], reason, number)


def read_message(client: anthropic.Anthropic, body: dict[str, Any], stream: bool) -> Read:
    if stream:
        with client.messages.stream(**body) as events:
            answer: Any = events.get_final_message()
    else:
        answer = client.messages.create(**body)
    found: dict[str, list[Any]] = {"thinking": [], "text": [], "tool_use": []}
    for block in answer.content:
        found[block.type].append(block)
    return Read(
        "".join([block.thinking for block in found["thinking"]]),
        "".join([block.text for block in found["text"]]),
        [block.input for block in found["tool_use"]],
        (answer.stop_reason, answer.stop_sequence),
        answer.usage.output_tokens_details.thinking_tokens,
    )


def read_response(client: openai.OpenAI, body: dict[str, Any], stream: bool) -> Read:
    extra = {"stop": body.pop("stop")} if "stop" in body else {}
    answer: Any = client.responses.create(**body, extra_body=extra, stream=stream)
    if stream:
        *_, last = answer
        answer = last.response
    thoughts = [item for item in answer.output if item.type == "reasoning"]
    return Read(
        "".join([part.text for item in thoughts for part in item.content]),
        answer.output_text,
        [item.arguments for item in answer.output if item.type == "function_call"],
        (answer.status, answer.incomplete_details and answer.incomplete_details.reason),
        answer.usage.output_tokens_details.reasoning_tokens,
    )


STOP_FIELD = {"chat": "stop", "messages": "stop_sequences", "responses": "stop"}
STOPPED = {"chat": "stop", "messages": ("stop_sequence", "\n\n"), "responses": ("completed", None)}
CALLED = {
    "chat": "tool_calls",
    "messages": ("tool_use", None),
    "responses": ("completed", None),
}
CUT = {
    "chat": "length",
    "messages": ("max_tokens", None),
    "responses": ("incomplete", "max_output_tokens"),
}
FORCED: dict[str, Any] = {"chat": "required", "messages": {"type": "any"}, "responses": "required"}


@pytest.mark.parametrize("per_step", [1, 5, 400])
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("dialect", DIALECTS)
def test_a_stop_string_ends_the_text_and_no_thought(
    service: Service, worker: ScriptedWorker, dialect: str, stream: bool, per_step: int
) -> None:
    worker.script = say(f"{THOUGHT}One.\n\nTwo.", per_step=per_step)
    found = read(service, dialect, stream, **{STOP_FIELD[dialect]: ["b.", "\n\n", "</think>"]})
    assert (found.thought.strip(), found.text) == ("First {a}.\n\nThen b.", "One.")
    assert found.reason == STOPPED[dialect]
    assert found.num_thought_tokens == THOUGHT_TOKENS


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("dialect", DIALECTS)
def test_no_stop_string_cuts_a_call(
    service: Service, worker: ScriptedWorker, dialect: str, stream: bool
) -> None:
    """Neither in its arguments nor in its markers."""
    worker.script = say(f"{THOUGHT}Well.\n{CALL}", per_step=3)
    stops = ["}", "city", "<tool_call>", "</tool_call>", "\n"]
    found = read(service, dialect, stream, **{STOP_FIELD[dialect]: stops})
    assert (found.text, found.reason) == ("Well.", CALLED[dialect])
    (call,) = found.calls
    assert call in ('{"city": "Bern"}', {"city": "Bern"})


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("dialect", DIALECTS)
def test_a_forced_call_that_is_cut_shows_no_markup(
    service: Service, worker: ScriptedWorker, dialect: str, stream: bool
) -> None:
    worker.script = say(THOUGHT + CALL)
    field = "max_output_tokens" if dialect == "responses" else "max_tokens"
    for num_written in (3, len('<tool_call>\n{"name": "get_we')):
        options = {"tool_choice": FORCED[dialect], field: len(THOUGHT) + num_written}
        found = read(service, dialect, stream, **options)
        assert (found.text, found.calls, found.reason) == ("", [], CUT[dialect])


@pytest.mark.parametrize(
    ("asked", "told"),
    [
        (None, None),
        ({"summary": "auto"}, "auto"),
        ({"generate_summary": "concise"}, "concise"),
        ({"summary": "none"}, None),
    ],
)
def test_reasoning_is_its_own_summary_where_one_is_asked_for(
    client: openai.OpenAI, worker: ScriptedWorker, asked: Any, told: str | None
) -> None:
    """Whole, in the events of a stream, and sent back, with or without its content."""
    worker.script = say(f"{THOUGHT}One.", per_step=3)
    body: dict[str, Any] = ask("responses", reasoning=asked)
    create: Any = client.responses.with_raw_response.create
    raw = create(**body)
    answer = raw.parse()
    assert "loraplex-dropped" not in raw.headers and answer.reasoning.summary == told
    streamed: Any = client.responses.create(**body, stream=True)
    *events, last = streamed
    for thought in (answer.output[0], last.response.output[0]):
        assert thought.content[0].text.strip() == "First {a}.\n\nThen b."
        summary = [part.text for part in thought.summary]
        assert summary == ([thought.content[0].text] if told else [])
    named = [event for event in events if "summary" in event.type]
    assert bool(named) is (told is not None)
    if told is None:
        return
    kinds = [event.type.removeprefix("response.reasoning_summary_") for event in named]
    first, *deltas, text, part = kinds
    assert (first, set(deltas), text, part) == (
        *("part.added", {"text.delta"}, "text.done", "part.done"),
    )
    sent = answer.output[0].to_dict()
    assert "".join([piece.delta for piece in named[1:-2]]) == sent["summary"][0]["text"]
    prompts: list[list[int]] = []
    for item in (sent, {**sent, "summary": []}, {**sent, "content": None}):
        call = {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"}
        output = {"type": "function_call_output", "call_id": "c", "output": "7"}
        raw = create(**{**body, "input": [*body["input"], item, call, output]})
        assert "loraplex-dropped" not in raw.headers
        prompts.append(worker.requests[-1].tokens)
    assert prompts[0] == prompts[1] == prompts[2] and "Then b." in spelled(prompts[0])


@pytest.mark.parametrize("per_step", [1, 400])
def test_tokens_of_a_thought_are_counted_for_each_choice(
    client: openai.OpenAI, worker: ScriptedWorker, per_step: int
) -> None:
    """The tokens of the markers are not, nor the end token; streamed, each chunk tells so far."""
    worker.script = say(f"{THOUGHT}One.", per_step=per_step)
    create: Any = client.chat.completions.create
    answer = create(**ask("chat", n=2))
    assert answer.usage.completion_tokens_details.reasoning_tokens == 2 * THOUGHT_TOKENS
    worker.script = say(THOUGHT[:-20], per_step=per_step)
    told = [
        chunk.usage.completion_tokens_details.reasoning_tokens
        for chunk in create(
            **ask("chat"),
            stream=True,
            stream_options={"include_usage": True, "continuous_usage_stats": True},
        )
    ]
    assert told == sorted(told) and told[-1] == len(THOUGHT[:-20]) - len("<think>")


def test_a_last_chunk_has_an_empty_delta(client: openai.OpenAI, worker: ScriptedWorker) -> None:
    """Also where text comes with the end, and where a thought, a call or the length ends it."""
    cases = [("Text", 400), (THOUGHT, 400), (THOUGHT + CALL, 400), ("Text", 2), (THOUGHT, 9)]
    for written, max_tokens in cases:
        worker.script = say(written, per_step=400)
        asked: dict[str, Any] = ask("chat", max_tokens=max_tokens)
        *_, last = client.chat.completions.create(**asked, stream=True)
        (choice,) = last.choices
        assert choice.finish_reason and not any(choice.delta.to_dict().values())


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("is_chat", [False, True])
def test_scores_of_chosen_tokens(
    client: openai.OpenAI, worker: ScriptedWorker, is_chat: bool, stream: bool
) -> None:
    """How classifiers are run: in place of the likeliest tokens those of the labels."""
    worker.script = say("ab")
    labels = [260, 7]
    create: Any = client.chat.completions.create if is_chat else client.completions.create
    asked = ask("chat") if is_chat else {"model": "tiny", "prompt": "Hi"}
    asked |= {"logprobs": True if is_chat else 0, "max_tokens": 1, "stream": stream}
    extra = {"logprob_token_ids": labels, "return_tokens_as_token_ids": True}
    answer = create(**asked, extra_body=extra)
    told = [c.logprobs for part in (answer if stream else [answer]) for c in part.choices]
    (scores,) = [each for each in told if each]
    own = f"token_id:{ids('a')[0]}"
    if is_chat:
        (entry,) = scores.content
        assert [(top.token, top.logprob) for top in entry.top_logprobs] == [
            (own, -0.5),
            ("token_id:260", -65.0),
            ("token_id:7", -1.75),
        ]
    else:
        (tops,) = scores.top_logprobs
        assert tops == {own: -0.5, "token_id:260": -65.0, "token_id:7": -1.75}
        assert next(iter(tops)) == own
    params = worker.requests[-1].params
    assert (params.logprobs, params.logprob_token_ids) == (0, tuple(labels))


@pytest.mark.parametrize("stream", [False, True])
def test_all_tokens_are_told_where_they_are_few_enough(
    client: openai.OpenAI, worker: ScriptedWorker, stream: bool
) -> None:
    """131,072 numbers in all, streamed or not; more are refused before the answer is begun."""
    worker.script = say("abc")
    create: Any = client.chat.completions.create
    fields: dict[str, Any] = {"logprobs": True, "top_logprobs": -1, "stream": stream}
    answer = create(**ask("chat", max_tokens=400), **fields)
    parts = list(answer) if stream else [answer]
    told = [
        entry for part in parts for c in part.choices if c.logprobs for entry in c.logprobs.content
    ]
    assert [len(entry.top_logprobs) for entry in told] == [SIZES["vocab_size"]] * 4
    num_requests = len(worker.requests)
    with pytest.raises(openai.BadRequestError, match="131072 log-probabilities") as refused:
        create(**ask("chat", max_tokens=410), **fields)
    assert refused.value.code == "answer_too_large" and len(worker.requests) == num_requests


@pytest.mark.parametrize(
    ("path", "param", "fields"),
    [
        ("chat", "logprob_token_ids", {"logprob_token_ids": [1]}),
        ("chat", "logprob_token_ids", {"logprob_token_ids": [320], "logprobs": True}),
        ("chat", "logprob_token_ids", {"logprob_token_ids": [1] * 129, "logprobs": True}),
        ("chat", "top_logprobs", {"top_logprobs": -1}),
        ("chat", "top_logprobs", {"top_logprobs": -2, "logprobs": True}),
        ("text", "logprob_token_ids", {"logprob_token_ids": [1]}),
        ("text", "logprobs", {"logprobs": -1}),
    ],
)
def test_scores_that_cannot_be_told(
    client: openai.OpenAI, worker: ScriptedWorker, path: str, param: str, fields: dict[str, Any]
) -> None:
    create: Any = client.chat.completions.create if path == "chat" else client.completions.create
    asked = ask("chat") if path == "chat" else {"model": "tiny", "prompt": "Hi"}
    num_requests = len(worker.requests)
    with pytest.raises(openai.BadRequestError) as refused:
        create(**asked, extra_body=fields)
    assert refused.value.param == param and len(worker.requests) == num_requests


OF_A_MESSAGE = {"container", "diagnostics", "stop_details", "stop_sequence"}
OF_ITS_USAGE = {
    *("cache_creation", "inference_geo", "server_tool_use", "service_tier", "speed"),
}
OF_ITS_END = {"container", "stop_details", "stop_sequence"}


def test_messages_have_the_keys_of_their_schema(service: Service, worker: ScriptedWorker) -> None:
    """Null where there is nothing to tell; the tokens of the thought are counted."""
    worker.script = say(f"{THOUGHT}Well.\n{CALL}")
    with anthropic.Anthropic(base_url=service.url, api_key=service.keys.acme) as client:
        create: Any = client.messages.create
        message = create(**ask("messages")).to_dict()
        begun, *events, ended, _ = [e.to_dict() for e in create(**ask("messages"), stream=True)]
    assert all(message[key] is None for key in OF_A_MESSAGE)
    assert all(message["usage"][key] is None for key in OF_ITS_USAGE)
    assert message["usage"]["output_tokens_details"] == {"thinking_tokens": THOUGHT_TOKENS}
    assert begun["message"].keys() == message.keys()
    assert begun["message"]["usage"].keys() == message["usage"].keys()
    assert all(ended["delta"][key] is None for key in OF_ITS_END)
    assert ended["usage"]["output_tokens_details"] == {"thinking_tokens": THOUGHT_TOKENS}
    blocks = [event["content_block"] for event in events if "content_block" in event]
    for _, text, call in (message["content"], blocks):
        assert text["citations"] is None
        assert call["caller"] == {"type": "direct"} and call["toolset_name"] is None


@pytest.mark.parametrize("is_chat", [False, True])
def test_keys_without_news_are_null(
    client: openai.OpenAI, worker: ScriptedWorker, is_chat: bool
) -> None:
    worker.script = say("ok")
    create: Any = client.chat.completions.create if is_chat else client.completions.create
    asked = ask("chat") if is_chat else {"model": "tiny", "prompt": "Hi"}
    body = create(**asked).to_dict()
    constants = {"service_tier": "default"} if is_chat else {}
    assert constants.items() <= body.items() and "system_fingerprint" not in body
    (choice,) = body["choices"]
    for_all = ("prompt_logprobs", "prompt_token_ids")
    assert all((body if is_chat else choice)[key] is None for key in for_all)
    assert choice["stop_reason"] is None and choice["token_ids"] is None
    if is_chat:
        message = choice["message"]
        assert message["annotations"] == [] and message["refusal"] is None
        assert message["reasoning"] is None and message["reasoning_content"] is None
    for chunk in create(**asked, stream=True):
        told = chunk.to_dict()
        assert constants.items() <= told.items() and "system_fingerprint" not in told
        assert told["choices"][0]["stop_reason"] is None
        assert "token_ids" not in chunk.choices[0].model_extra


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("is_chat", [False, True])
def test_the_reason_of_a_stop_is_told(
    client: openai.OpenAI, worker: ScriptedWorker, is_chat: bool, stream: bool
) -> None:
    """A stop string, the id of a stop token, or nothing for the end token."""
    create: Any = client.chat.completions.create if is_chat else client.completions.create
    asked = ask("chat") if is_chat else {"model": "tiny", "prompt": "Hi"}
    worker.script = say("one two")
    for fields, reason in (
        ({"stop": [" t", "wo"]}, " t"),
        ({"extra_body": {"stop_token_ids": [IM_END]}}, IM_END),
        ({}, None),
    ):
        answer = create(**asked, **fields, stream=stream)
        choice = (list(answer)[-1] if stream else answer).choices[0]
        assert (choice.finish_reason, choice.model_extra["stop_reason"]) == ("stop", reason)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("is_chat", [False, True])
def test_ids_of_the_prompt_and_of_the_answer(
    client: openai.OpenAI, worker: ScriptedWorker, is_chat: bool, stream: bool
) -> None:
    """Each generated token has its log-probability, those of thoughts and calls and the end token
    too; by request it is named by its id. Streamed, the first chunk alone has the prompt's."""
    written = THOUGHT + CALL
    worker.script = say(written, per_step=4)
    create: Any = client.chat.completions.create if is_chat else client.completions.create
    asked = ask("chat", n=2) if is_chat else {"model": "tiny", "prompt": ["Hi", "you"]}
    asked |= {"logprobs": True if is_chat else 1, "max_tokens": 200, "stream": stream}
    extra = {"return_token_ids": True, "return_tokens_as_token_ids": True}
    answer = create(**asked, extra_body=extra)
    tokens: dict[int, list[int]] = {0: [], 1: []}
    names: dict[int, list[str]] = {0: [], 1: []}
    prompts: dict[int, list[list[int]]] = {0: [], 1: []}
    for part in answer if stream else [answer]:
        for choice in part.choices:
            tokens[choice.index] += choice.model_extra.get("token_ids") or []
            told = part.model_extra if is_chat else choice.model_extra
            if "prompt_token_ids" in told:
                prompts[choice.index].append(told["prompt_token_ids"])
            if choice.logprobs and is_chat:
                names[choice.index] += [each.token for each in choice.logprobs.content]
            elif choice.logprobs:
                names[choice.index] += choice.logprobs.tokens
                assert all(
                    name in top
                    for name, top in zip(
                        choice.logprobs.tokens, choice.logprobs.top_logprobs, strict=True
                    )
                )
    sent = [request.tokens for request in worker.requests[-2:]]
    assert tokens == {index: [*ids(written), IM_END] for index in (0, 1)}
    assert names == {index: [f"token_id:{token}" for token in tokens[index]] for index in (0, 1)}
    if is_chat:
        assert prompts[0] + prompts[1] == sent[:1] * (1 if stream else 2)
    else:
        assert sorted(prompts[0] + prompts[1]) == sorted(sent)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    "begun",
    [
        {"content": "<think>\nThe parcel of Tuesday, which was late"},
        {"content": "", "reasoning_content": "The parcel of Tuesday, which was late"},
    ],
)
def test_an_answer_continues_a_thought(
    service: Service, worker: ScriptedWorker, stream: bool, begun: dict[str, Any]
) -> None:
    """Stop strings are not searched for in the thought, and it goes on with a space."""
    worker.script = say(" twice. stop\n</think>\n\nTwice. stop it")
    fields = {
        "messages": [{"role": "user", "content": "?"}, {"role": "assistant", **begun}],
        "extra_body": {"continue_final_message": True, "add_generation_prompt": False},
        "stop": [" stop"],
    }
    answer = read(service, "chat", stream, **fields)
    assert (answer.thought, answer.text) == (" twice. stop", "Twice.")
    assert spelled(worker.requests[-1].tokens).endswith("which was late")
    fields["extra_body"]["echo"] = True
    answer = read(service, "chat", stream, **fields)
    assert answer.thought.endswith("which was late twice. stop") and answer.text == "Twice."


def test_an_answer_after_a_thought_that_has_ended_is_text(
    service: Service, worker: ScriptedWorker
) -> None:
    worker.script = say(" day.")
    begun = {"role": "assistant", "content": "<think>\na\n</think>\n\nOn which"}
    answer = read(
        service,
        "chat",
        False,
        messages=[{"role": "user", "content": "?"}, begun],
        extra_body={"continue_final_message": True, "add_generation_prompt": False},
    )
    assert (answer.thought, answer.text) == ("", " day.")
