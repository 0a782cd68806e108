"""What is refused, by which name, and that nothing is left behind."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pytest

from tests.gateway import recorded
from tests.gateway.dialects.cases import cases
from tests.gateway.scripts import say
from tests.gateway.service import MAX_MODEL_LEN, Service
from tests.scripted_worker import ScriptedWorker

HELLO = [{"role": "user", "content": "Hi"}]
CHAT_PATH = "/v1/chat/completions"
CHAT = {"model": "tiny", "messages": HELLO}


def refused(service: Service, route: str, body: Any, key: str | None = None) -> dict[str, Any]:
    """The error of a request that must be refused with a 4xx in the OpenAI shape."""
    headers = {"authorization": f"Bearer {key or service.keys.acme}"}
    send = {"content": body} if isinstance(body, bytes | Iterator) else {"json": body}
    answer = httpx.post(service.url + route, headers=headers, timeout=20, **send)
    assert 400 <= answer.status_code < 500, answer.text
    assert answer.headers["x-request-id"].startswith("req_")
    error = answer.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    return {**error, "status": answer.status_code}


def test_a_body_over_the_bound(service: Service) -> None:
    error = refused(service, "/v1/completions", {"model": "tiny", "prompt": "a" * (10 << 20)})
    assert (error["status"], error["code"]) == (413, "request_too_large")
    unannounced = (b"a" * (1 << 20) for _ in range(11))
    error = refused(service, "/v1/completions", unannounced)
    assert (error["status"], error["code"]) == (413, "request_too_large")


def test_too_long_for_the_context(client: openai.OpenAI, worker: ScriptedWorker) -> None:
    with pytest.raises(openai.BadRequestError, match="maximum context length is 128") as refusal:
        client.completions.create(model="tiny", prompt="a" * MAX_MODEL_LEN)
    assert refusal.value.code == "context_length_exceeded"
    worker.script = say("x")
    client.completions.create(model="tiny", prompt="a" * 100, max_tokens=28)
    client.completions.create(model="tiny", prompt="a" * 127)
    assert worker.requests[-1].params.max_tokens == 1
    chat = client.chat.completions.create(model="tiny", messages=HELLO)  # type: ignore[arg-type]
    assert worker.requests[-1].params.max_tokens == MAX_MODEL_LEN - chat.usage.prompt_tokens  # type: ignore[union-attr]


def test_an_unknown_route(service: Service) -> None:
    error = refused(service, "/admin/v1", {})
    assert (error["status"], error["type"]) == (404, "not_found_error")


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/chat/completions/"])
@pytest.mark.parametrize("model", ["support-bot", "unknown"])
def test_every_spelling_of_a_path_is_numbered_and_guarded(
    service: Service, worker: ScriptedWorker, path: str, model: str
) -> None:
    worker.script = say("ok")
    body = {**CHAT, "model": model}
    headers = {"authorization": f"Bearer {service.keys.acme}"}
    answer = httpx.post(service.url + path, headers=headers, json=body, timeout=20)
    assert answer.status_code == (404 if model == "unknown" else 200)
    for name in ("x-request-id", "openai-processing-ms"):
        assert len(answer.headers.get_list(name)) == 1
    assert httpx.post(service.url + path, json=body, timeout=20).status_code == 401


def test_unknown_and_foreign_models_read_the_same() -> None:
    """In the recorded refusals of names of every kind."""
    exchanges = recorded.read().exchanges
    told = [
        (body["model"], exchanges[name]) for name, path, body, _ in cases() if path == CHAT_PATH
    ]
    errors = [(model, each) for model, each in told if each.status == 404]
    assert {"secret", "globex/secret", "nonsense", "../../etc/passwd"} <= {
        name for name, _ in errors
    }
    for model, exchange in errors:
        message = json.loads(exchange.body)["error"]["message"]
        assert message.replace(model[:128], "X", 1).replace("...", "") == (
            "The model 'X' does not exist or you do not have access to it."
        )
