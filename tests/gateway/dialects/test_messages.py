"""Anthropic's Messages through the official client."""

from __future__ import annotations

import asyncio
import json
import time
from typing import Any

import anthropic
import httpx
import pytest

from gateway.dialects.messages import Messages
from gateway.dialects.messages_fields import MessagesRequest
from tests.gateway.scripts import endless, silence
from tests.gateway.service import Service
from tests.scripted_worker import ScriptedWorker

HELLO: Any = [{"role": "user", "content": "Hi"}]
ASK: dict[str, Any] = {"model": "tiny", "max_tokens": 64, "messages": HELLO}


def raw(service: Service, body: Any, path: str = "/v1/messages", **options: Any) -> httpx.Response:
    headers = {"x-api-key": service.keys.acme} | options.pop("headers", {})
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    return httpx.post(service.url + path, content=content, headers=headers, timeout=20, **options)


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
