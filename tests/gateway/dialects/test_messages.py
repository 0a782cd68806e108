"""Anthropic's Messages through the official client."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Iterator
from typing import Any

import anthropic
import httpx
import pytest

from gateway.dialects.messages import Messages
from gateway.dialects.messages_fields import MessagesRequest
from tests.gateway.scripted import MAX_MODEL_LEN, ScriptedWorker
from tests.gateway.scripts import endless, ids, say, silence, spelled
from tests.gateway.service import Service
from workers.wire.client import WorkerFailed
from workers.wire.protocol import ErrorCode, Generate, SequenceOutput

HELLO: Any = [{"role": "user", "content": "Hi"}]
RENDERED = "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
ASK: dict[str, Any] = {"model": "tiny", "max_tokens": 64, "messages": HELLO}


@pytest.fixture
def messages(service: Service) -> Iterator[anthropic.Anthropic]:
    """acme's."""
    options = {"base_url": service.url, "max_retries": 0, "timeout": 20}
    with anthropic.Anthropic(api_key=service.keys.acme, **options) as client:
        yield client
    service.wait_for(lambda: service.gateway.admission.num_open == 0)
    service.wait_for(lambda: not service.gateway.in_flight_requests.by_version)


def raw(service: Service, body: Any, path: str = "/v1/messages", **options: Any) -> httpx.Response:
    headers = {"x-api-key": service.keys.acme} | options.pop("headers", {})
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    return httpx.post(service.url + path, content=content, headers=headers, timeout=20, **options)


def events(text: str) -> list[tuple[str, dict[str, Any]]]:
    """Name and data of each event."""
    found: list[tuple[str, dict[str, Any]]] = []
    for written in text.split("\n\n")[:-1]:
        name, data = written.split("\n")
        found.append((name.removeprefix("event: "), json.loads(data.removeprefix("data: "))))
    return found


def test_one_message(messages: anthropic.Anthropic, worker: ScriptedWorker) -> None:
    worker.script = say("Grüße 🏴", cached=16)
    raw = messages.messages.with_raw_response.create(**ASK | {"model": "support-bot"})
    answer = raw.parse()
    assert (answer.type, answer.role, answer.model) == ("message", "assistant", "support-bot")
    assert answer.id.startswith("msg_")
    (block,) = answer.content
    assert block.to_dict() == {"type": "text", "text": "Grüße 🏴", "citations": None}
    assert (answer.stop_reason, answer.stop_sequence) == ("end_turn", None)
    num_prompt = len(worker.requests[-1].tokens)
    assert answer.usage.input_tokens == num_prompt - 16
    assert answer.usage.cache_read_input_tokens == 16
    assert answer.usage.cache_creation_input_tokens == 0
    assert answer.usage.output_tokens == len("Grüße 🏴".encode()) + 1
    assert raw.headers["loraplex-adapter-version"] == "7"
    assert "loraplex-dropped" not in raw.headers
    assert answer._request_id == worker.requests[-1].request_id == raw.headers["x-request-id"]


def test_what_the_worker_is_asked(messages: anthropic.Anthropic, worker: ScriptedWorker) -> None:
    worker.script = say("ok")
    messages.messages.create(
        **ASK | {"model": "acme/support-bot@staging", "max_tokens": 9},
        system=[{"type": "text", "text": "Be"}, {"type": "text", "text": "brief."}],
        metadata={"user_id": "u"},
        extra_body={"temperature": 0.5, "top_p": 0.9, "top_k": 7},
    )
    asked = worker.requests[-1]
    assert asked.adapter and asked.adapter.digest == "ten_acme-support-bot-3"
    params = asked.params
    assert (params.temperature, params.top_p, params.top_k) == (0.5, 0.9, 7)
    assert (params.max_tokens, params.logprobs) == (9, None)
    assert spelled(asked.tokens) == f"<|im_start|>system\nBe\nbrief.<|im_end|>\n{RENDERED}"


def test_every_event_in_order(service: Service, worker: ScriptedWorker) -> None:
    worker.script = say("ab", cached=8)
    answer = raw(service, ASK | {"stream": True})
    assert answer.headers["content-type"] == "text/event-stream; charset=utf-8"
    found = events(answer.text)
    assert all(name == data["type"] for name, data in found)
    assert [name for name, _ in found] == [
        "message_start",
        "content_block_start",
        "content_block_delta",
        "content_block_delta",
        "content_block_stop",
        "message_delta",
        "message_stop",
    ]
    start, begun, *deltas, stopped, ended, _ = [data for _, data in found]
    num_prompt = len(worker.requests[-1].tokens)
    assert start["message"]["content"] == [] and start["message"]["stop_reason"] is None
    counts = {name: n for name, n in start["message"]["usage"].items() if isinstance(n, int)}
    assert counts == {
        "input_tokens": num_prompt - 8,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": 8,
        "output_tokens": 1,
    }
    assert begun["content_block"] == {"type": "text", "text": "", "citations": None}
    assert [each["delta"] for each in deltas] == [
        {"type": "text_delta", "text": "a"},
        {"type": "text_delta", "text": "b"},
    ]
    assert {each["index"] for each in (begun, *deltas, stopped)} == {0}
    assert (ended["delta"]["stop_reason"], ended["delta"]["stop_sequence"]) == ("end_turn", None)
    assert ended["usage"]["output_tokens"] == 3


def test_streaming_helper(messages: anthropic.Anthropic, worker: ScriptedWorker) -> None:
    worker.script = say("naïve 🏴 ende", cached=8)
    with messages.messages.stream(**ASK) as stream:
        text = "".join(stream.text_stream)
        answer = stream.get_final_message()
    assert text == "naïve 🏴 ende"
    assert [block.text for block in answer.content if block.type == "text"] == [text]
    assert answer.stop_reason == "end_turn" and answer.usage.cache_read_input_tokens == 8
    assert answer.usage.output_tokens == len(text.encode()) + 1


async def test_the_async_client(service: Service, worker: ScriptedWorker) -> None:
    worker.script = say("hello")
    options: dict[str, Any] = {"base_url": service.url, "max_retries": 0, "timeout": 20}
    async with anthropic.AsyncAnthropic(auth_token=service.keys.acme, **options) as client:
        answer = await client.messages.create(**ASK)
        async with client.messages.stream(**ASK) as stream:
            streamed = await stream.get_final_message()
        counted = await client.messages.count_tokens(model="tiny", messages=HELLO)
    assert [block.text for block in streamed.content if block.type == "text"] == ["hello"]
    assert [block.text for block in answer.content if block.type == "text"] == ["hello"]
    assert counted.input_tokens == answer.usage.input_tokens == streamed.usage.input_tokens


@pytest.mark.parametrize("stream", [False, True])
def test_why_it_stopped(
    messages: anthropic.Anthropic, worker: ScriptedWorker, stream: bool
) -> None:
    def stopped(**options: Any) -> tuple[str | None, str | None, str]:
        if stream:
            with messages.messages.stream(**ASK | options) as stream_:
                answer = stream_.get_final_message()
        else:
            answer = messages.messages.create(**ASK | options)
        text = "".join([block.text for block in answer.content if block.type == "text"])
        return answer.stop_reason, answer.stop_sequence, text

    worker.script = say("one STOP two")
    assert stopped(stop_sequences=["END", "STOP"]) == ("stop_sequence", "STOP", "one ")
    assert stopped(max_tokens=3) == ("max_tokens", None, "one")
    assert stopped() == ("end_turn", None, "one STOP two")
    worker.script = say("")
    assert stopped() == ("end_turn", None, "")


def test_tokens_are_counted(messages: anthropic.Anthropic, worker: ScriptedWorker) -> None:
    before = len(worker.requests)
    conversation: Any = [*HELLO, {"role": "assistant", "content": "Yo"}, *HELLO]
    counted = messages.messages.count_tokens(model="tiny", messages=conversation, system="S")
    assert len(worker.requests) == before
    worker.script = say("ok")
    messages.messages.create(**ASK | {"messages": conversation, "system": "S", "max_tokens": 4})
    assert counted.input_tokens == len(worker.requests[-1].tokens)
    long: Any = [{"role": "user", "content": "x" * 2 * MAX_MODEL_LEN}]
    counted = messages.messages.count_tokens(model="tiny", messages=long)
    assert counted.input_tokens > 2 * MAX_MODEL_LEN


def test_an_answer_that_is_begun_goes_on(
    messages: anthropic.Anthropic, worker: ScriptedWorker
) -> None:
    worker.script = say("ok")
    messages.messages.create(
        **ASK | {"messages": [*HELLO, {"role": "assistant", "content": "The best is ("}]}
    )
    assert spelled(worker.requests[-1].tokens) == RENDERED + "The best is ("


def test_turns_of_one_role_are_one(messages: anthropic.Anthropic, worker: ScriptedWorker) -> None:
    worker.script = say("ok")
    parts: Any = [{"type": "text", "text": "b"}, {"type": "text", "text": "c"}]
    messages.messages.create(
        **ASK | {"messages": [{"role": "user", "content": "a"}, {"role": "user", "content": parts}]}
    )
    assert spelled(worker.requests[-1].tokens) == RENDERED.replace("Hi", "a\nb\nc")


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"max_tokens": None}, "max_tokens"),
    ({"max_tokens": 0}, "max_tokens"),
    ({"n": 2}, "'n'"),
    ({"mcp_servers": [{}]}, "mcp_servers"),
    ({"temperature": 3}, "temperature"),
    ({"stop_sequences": ["s"] * 65}, "stop_sequences"),
    ({"messages": []}, "messages"),
    ({"messages": [{"role": "tool", "content": "x"}]}, "messages[0].role"),
    (
        {
            "messages": [
                {
                    "role": "user",
                    "content": [
                        {
                            "type": "image",
                            "source": {"type": "base64", "media_type": "image/png", "data": ""},
                        }
                    ],
                }
            ]
        },
        "messages[0].content[0]': 'image'",
    ),
    (
        {"messages": [{"role": "user", "content": [{"type": "hologram"}]}]},
        "hologram",
    ),
    (
        {"messages": [{"role": "user", "content": [{"type": "thinking", "thinking": ""}]}]},
        "messages[0].content[0]': 'thinking'",
    ),
]


@pytest.mark.parametrize(("options", "words"), REFUSED)
def test_wrong_requests_name_the_field(
    service: Service, options: dict[str, Any], words: str
) -> None:
    body = {name: value for name, value in (ASK | options).items() if value is not None}
    answer = raw(service, body)
    assert answer.status_code == 400
    error = answer.json()
    assert error["type"] == "error" and error["error"]["type"] == "invalid_request_error"
    assert words in error["error"]["message"]
    assert error["request_id"] == answer.headers["request-id"] == answer.headers["x-request-id"]


def test_every_refusal_has_anthropics_shape(
    messages: anthropic.Anthropic, service: Service, worker: ScriptedWorker
) -> None:
    def refused(kind: type[anthropic.APIStatusError], **options: Any) -> anthropic.APIStatusError:
        with pytest.raises(kind) as raised:
            messages.with_options(**options.pop("client", {})).messages.create(**ASK | options)
        error = raised.value
        assert error.request_id and isinstance(error.body, dict)
        assert error.body["type"] == "error" and error.body["request_id"] == error.request_id
        return error

    error = refused(anthropic.AuthenticationError, client={"api_key": service.keys.unissued})
    assert error.type == "authentication_error"
    assert refused(anthropic.NotFoundError, model="secret").type == "not_found_error"
    admin = refused(anthropic.PermissionDeniedError, client={"api_key": service.keys.admin})
    assert admin.type == "permission_error"
    error = refused(anthropic.OverloadedError, model="elsewhere")
    assert error.type == "overloaded_error" and error.response.headers["retry-after"]

    for path, method, status, kind in (
        ("/v1/messages", "GET", 405, "invalid_request_error"),
        ("/v1/messages/batches", "POST", 404, "not_found_error"),
    ):
        answer = httpx.request(
            method, service.url + path, headers={"x-api-key": service.keys.acme}, timeout=20
        )
        assert answer.status_code == status and answer.json()["error"]["type"] == kind
    for path in ("/v1/messages", "/v1/messages/count_tokens"):
        for content in (b"", b"{", b'{"model": 3}'):
            answer = raw(service, content, path)
            assert answer.status_code == 400
            assert answer.json()["error"]["type"] == "invalid_request_error"
        answer = raw(service, {}, path, headers={"x-api-key": ""})
        assert answer.json()["error"]["type"] == "authentication_error"
    assert "param" in raw(service, {}, "/v1/chat/completions").json()["error"]


def test_a_worker_that_fails_before_the_first_event(
    messages: anthropic.Anthropic, worker: ScriptedWorker
) -> None:
    async def script(request: Generate) -> AsyncIterator[SequenceOutput]:
        raise WorkerFailed(ErrorCode.LOGITS_NAN, "no numbers")
        yield

    worker.script = script
    with pytest.raises(anthropic.InternalServerError) as raised:
        messages.messages.create(**ASK, stream=True)
    assert raised.value.type == "api_error" and raised.value.details.error_code == "logits_nan"


def test_an_error_in_the_middle_of_a_stream(
    messages: anthropic.Anthropic, service: Service, worker: ScriptedWorker
) -> None:
    async def script(request: Generate) -> AsyncIterator[SequenceOutput]:
        yield SequenceOutput(id=request.id, tokens=ids("abc"))
        raise WorkerFailed(ErrorCode.LOGITS_NAN, "no numbers")

    worker.script = script
    found = events(raw(service, ASK | {"stream": True}).text)
    assert [name for name, _ in found][-1] == "error"
    assert found[-1][1]["error"]["type"] == "api_error"
    assert found[-1][1]["request_id"] == worker.requests[-1].request_id
    with pytest.raises(anthropic.APIStatusError) as raised, messages.messages.stream(**ASK) as got:
        got.get_final_message()
    assert raised.value.type == "api_error"


def test_a_client_that_leaves(messages: anthropic.Anthropic, worker: ScriptedWorker) -> None:
    worker.script = endless()
    with messages.messages.stream(**ASK) as stream:
        next(iter(stream.text_stream))
    Service.wait_for(lambda: worker.requests[-1] in worker.aborted)


async def test_pings_have_their_name(store: Any) -> None:
    service = Service(store, ping_interval_s=0.05)
    service.start()
    try:
        service.worker.script = silence
        async with httpx.AsyncClient(timeout=20) as client:
            headers = {"x-api-key": service.keys.acme}
            body = ASK | {"stream": True}
            url = f"{service.url}/v1/messages"
            async with client.stream("POST", url, json=body, headers=headers) as answer:
                async with asyncio.timeout(10):
                    lines = answer.aiter_lines()
                    assert await anext(lines) == "event: ping"
                    assert await anext(lines) == 'data: {"type":"ping"}'
    finally:
        await asyncio.to_thread(service.stop)


def test_what_agents_send_beyond_the_page(service: Service, worker: ScriptedWorker) -> None:
    worker.script = say("ok")
    ephemeral = {"type": "ephemeral"}
    body = {
        "model": "tiny",
        "max_tokens": 8,
        "stream": False,
        "system": [
            {"type": "text", "text": "x-anthropic-billing-header: cc_version=2.1; cch=00ab1;"},
            {"type": "text", "text": "You code.", "cache_control": ephemeral},
        ],
        "messages": [
            {
                "role": "user",
                "content": [
                    {"type": "text", "text": "a", "cache_control": ephemeral},
                ],
            },
            {"role": "system", "content": "Mind."},
            {"role": "user", "content": "b"},
        ],
        "metadata": {"user_id": json.dumps({"device": "d", "session": "s"})},
        "thinking": {"type": "enabled", "budget_tokens": 1024},
        "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
        "output_config": {"effort": "high"},
        "tools": [{"type": "web_search_20250305", "name": "web_search", "max_uses": 8}],
        "temperature": 1,
        "service_tier": "auto",
    }
    headers = {
        "anthropic-version": "2023-06-01",
        "anthropic-beta": "interleaved-thinking-2025-05-14,fine-grained-tool-streaming-2025-05-14",
        "x-stainless-lang": "js",
    }
    answer = raw(service, body, params={"beta": "true"}, headers=headers)
    assert answer.status_code == 200, answer.text
    assert answer.headers["loraplex-dropped"].split(", ") == [
        "billing_header",
        "cache_control",
        "context_management",
        "service_tier",
        "thinking.budget_tokens",
        "tools.web_search_20250305",
    ]
    assert spelled(worker.requests[-1].tokens) == (
        "<|im_start|>system\nYou code.<|im_end|>\n"
        "<|im_start|>user\na<|im_end|>\n"
        "<|im_start|>system\nMind.<|im_end|>\n"
        "<|im_start|>user\nb<|im_end|>\n<|im_start|>assistant\n"
    )


def test_a_changing_billing_header_spoils_no_prefix(
    messages: anthropic.Anthropic, worker: ScriptedWorker
) -> None:
    worker.script = say("ok")
    for check in ("00ab1", "77fe3"):
        line = f"x-anthropic-billing-header: cc_version=2.1.3; cch={check};"
        messages.messages.create(**ASK, system=f"{line}\n\nYou code.")
    first, second = worker.requests[-2:]
    assert first.tokens == second.tokens
    assert spelled(first.tokens) == f"<|im_start|>system\nYou code.<|im_end|>\n{RENDERED}"


def test_an_answer_is_held_to_a_schema(
    messages: anthropic.Anthropic, worker: ScriptedWorker
) -> None:
    worker.script = say('{"n":1}')
    schema = {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]}
    messages.messages.create(
        **ASK, output_config={"format": {"type": "json_schema", "schema": schema}}
    )
    assert '"n"' in worker.requests[-1].grammar


def test_agents_ask_whether_the_address_answers(service: Service) -> None:
    answer = httpx.head(service.url, timeout=20)
    assert (answer.status_code, answer.content) == (200, b"")


def test_thousands_of_messages_of_one_role_do_not_hold_up_the_event_loop() -> None:
    """Joined one by one they took 8 s: each copied all before it."""
    body = MessagesRequest(
        model="tiny",
        max_tokens=1,
        messages=[{"role": "user", "content": "x" * 2400} for _ in range(4096)],
    )
    begin = time.thread_time()
    (message,) = Messages().read(body).messages or []
    assert time.thread_time() - begin < 0.5
    assert len(message.content) == 4096 * 2401 - 1
