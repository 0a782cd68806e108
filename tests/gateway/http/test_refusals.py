"""What is refused, by which name, and that nothing is left behind."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pytest

from tests.gateway.scripted import ScriptedWorker
from tests.gateway.scripts import say
from tests.gateway.service import MAX_MODEL_LEN, Service

HELLO = [{"role": "user", "content": "Hi"}]
CHAT = {"model": "tiny", "messages": HELLO}
TEXT = {"model": "tiny", "prompt": "Hi"}


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


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("functions", [{}]),
        ("modalities", ["audio"]),
        ("audio", {"voice": "a"}),
        ("best_of", 2),
        ("logit_bais", {"5": 1}),
        ("chat_template", "{{ 1 }}"),
        ("use_beam_search", True),
    ],
)
def test_unsupported_fields_by_name(service: Service, field: str, value: Any) -> None:
    error = refused(service, "/v1/chat/completions", {**CHAT, field: value})
    assert (error["status"], error["param"]) == (400, field)
    assert error["code"] == "unsupported_parameter" and f"'{field}'" in error["message"]


@pytest.mark.parametrize(
    ("route", "param", "changes"),
    [
        ("chat", "response_format", {"response_format": {"type": "xml"}}),
        ("chat", "service_tier", {"service_tier": "gold"}),
        ("chat", "temperature", {"temperature": -1}),
        ("chat", "temperature", {"temperature": "1"}),
        ("chat", "temperature", {"temperature": "1", "modalities": ["text"]}),
        ("chat", "top_p", {"top_p": -0.1}),
        ("chat", "top_logprobs", {"top_logprobs": 21, "logprobs": True}),
        ("chat", "top_logprobs", {"top_logprobs": 2}),
        ("chat", "n", {"n": 0}),
        ("chat", "n", {"n": 16384}),
        ("chat", "stop", {"stop": ["a"] * 65}),
        ("chat", "stop", {"stop": "a" * 257}),
        ("chat", "max_tokens", {"max_tokens": {}}),
        ("chat", "max_tokens", {"max_tokens": []}),
        ("chat", "temperature", {"temperature": {}}),
        ("chat", "stream", {"stream": []}),
        ("chat", "user", {"user": []}),
        ("chat", "stream_options", {"stream_options": {"include_usage": []}, "stream": True}),
        ("chat", "seed", {"seed": 1 << 63}),
        ("chat", "max_tokens", {"max_tokens": 0}),
        ("chat", "logit_bias", {"logit_bias": {"320": 1}}),
        ("chat", "logit_bias", {"logit_bias": {"1": 101}}),
        ("chat", "logit_bias", {"logit_bias": {"a": 1}}),
        ("chat", "stop_token_ids", {"stop_token_ids": [320]}),
        ("chat", "messages", {"messages": []}),
        ("chat", "messages", {"messages": [{"role": "critic", "content": "x"}]}),
        ("chat", "messages", {"messages": [{"role": "user"}]}),
        ("chat", "messages", {"messages": [{**HELLO[0], "extra": 1}]}),
        ("chat", "messages", {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}),
        ("text", "best_of", {"best_of": 2}),
        ("text", "suffix", {"suffix": "x"}),
        ("text", "logprobs", {"logprobs": 21}),
        ("text", "max_tokens", {"max_tokens": 0}),
        ("text", "prompt", {"prompt": []}),
        ("text", "prompt", {"prompt": ""}),
        ("text", "prompt", {"prompt": [[]]}),
        ("text", "prompt", {"prompt": ["a", 1]}),
        ("text", "prompt", {"prompt": [320]}),
        ("text", "prompt", {"prompt": [-1]}),
        ("text", "prompt", {"prompt": ["a"] * 129}),
        ("text", "prompt", {"prompt": ["a"] * 65, "n": 2}),
    ],
)
def test_bad_values_by_name(
    service: Service, worker: ScriptedWorker, route: str, param: str, changes: dict[str, Any]
) -> None:
    before = len(worker.requests)
    path, body = {
        "chat": ("/v1/chat/completions", CHAT),
        "text": ("/v1/completions", TEXT),
    }[route]
    error = refused(service, path, {**body, **changes})
    assert (error["status"], error["type"]) == (400, "invalid_request_error")
    assert error["param"] == param, error
    assert len(worker.requests) == before and service.gateway.admission.num_open == 0


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"logit_bias": {"1": 1, "abc": 1}}, "the key 'abc' of 'logit_bias'"),
        ({"logit_bias": {"1": 1, "2": 101}}, "the key '2' of 'logit_bias'"),
        ({"logit_bias": {"1": 1, "2": None}}, "the key '2' of 'logit_bias'"),
        ({"logit_bias": {"1": 1, "-3": 1}}, "the key '-3' of 'logit_bias'"),
        ({"logit_bias": {"1": 1, "320": 1}}, "'logit_bias' names the token id 320"),
        ({"stop_token_ids": [1, 999]}, "'stop_token_ids' names the token id 999"),
        ({"metadata": {"a": "b", "c": 1}}, "the key 'c' of 'metadata'"),
        ({"temperature": "hot"}, "'temperature'"),
    ],
)
def test_a_wrong_entry_by_its_key(service: Service, changes: dict[str, Any], named: str) -> None:
    for body in ({**CHAT, **changes}, {**CHAT, **changes, "tools": None}):
        error = refused(service, "/v1/chat/completions", body)
        assert named in error["message"] and error["param"] == next(iter(changes))


def test_token_ids_are_keys_beside_a_field_that_is_absent(
    service: Service, worker: ScriptedWorker
) -> None:
    worker.script = say("ok")
    body = {**CHAT, "logit_bias": {"5": 1}, "frobnicate": None}
    answer = httpx.post(
        f"{service.url}/v1/chat/completions",
        json=body,
        headers={"authorization": f"Bearer {service.keys.acme}"},
        timeout=20,
    )
    assert answer.status_code == 200, answer.text
    assert worker.requests[-1].params.logit_bias == {5: 1.0}


def test_a_missing_field_by_name(service: Service) -> None:
    error = refused(service, "/v1/chat/completions", {"model": "tiny"})
    assert (error["status"], error["param"]) == (400, "messages")


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"[]",
        b"\xff",
        b"null",
        b'{"model": "tiny", "messages": ' + b"[" * 100_000,
        b'{"a":' * 100_000,
        b'{"model": "tiny", "prompt": ' + b"[" * 100_000 + b"]" * 100_000 + b"}",
    ],
    ids=lambda body: repr(body[:20]),
)
@pytest.mark.parametrize("route", ["/v1/chat/completions", "/v1/completions"])
def test_bad_json(service: Service, route: str, body: bytes) -> None:
    assert refused(service, route, body)["status"] == 400


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


@pytest.mark.parametrize(
    "name",
    [
        "nonsense",
        "secret",
        "globex/secret",
        "globex/support-bot",
        "acme/tiny",
        "support-bot@nonsense",
        "support-bot@8",
        "support-bot@",
        "support-bot@07x",
        "support-bot@99999999999999999999",
        "/support-bot",
        "acme/acme/support-bot",
        "tiny@prod",
        "@7",
        "../../etc/passwd",
        "a" * 10_000,
    ],
)
def test_unknown_and_foreign_models_read_the_same(service: Service, name: str) -> None:
    error = refused(service, "/v1/chat/completions", {**CHAT, "model": name})
    assert error["status"] == 404 and error["code"] == "model_not_found"
    assert error["param"] == "model"
    assert error["message"].replace(name[:128], "X", 1).replace("...", "") == (
        "The model 'X' does not exist or you do not have access to it."
    )


def test_no_ready_worker_says_when_to_come_back(service: Service) -> None:
    answer = httpx.post(
        service.url + "/v1/chat/completions",
        headers={"authorization": f"Bearer {service.keys.acme}"},
        json={**CHAT, "model": "elsewhere"},
    )
    assert answer.status_code == 503
    assert answer.json()["error"]["code"] == "no_worker"
    assert int(answer.headers["retry-after"]) >= 1
    assert int(answer.headers["retry-after-ms"]) >= 1000


def test_an_unknown_route(service: Service) -> None:
    error = refused(service, "/admin/v1", {})
    assert (error["status"], error["type"]) == (404, "not_found_error")


def test_a_wrong_method(service: Service) -> None:
    answer = httpx.get(service.url + "/v1/chat/completions")
    assert answer.status_code == 405 and answer.json()["error"]["code"] == "method_not_allowed"
    assert "POST" in answer.headers["allow"]


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
