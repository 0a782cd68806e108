"""Compressed bodies on every route of the data plane."""

from __future__ import annotations

import gzip
import json
import zlib
from typing import Any

import httpx
import pytest
import zstandard

from tests.gateway.scripts import say
from tests.gateway.service import Service
from tests.scripted_worker import ScriptedWorker

CODERS: dict[str, Any] = {
    "gzip": gzip.compress,
    "deflate": zlib.compress,
    "zstd": zstandard.compress,
}
CHAT = {"messages": [{"role": "user", "content": "Hi"}]}
ROUTES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": CHAT,
    "/v1/completions": {"prompt": "Hi"},
    "/v1/responses": {"input": "Hi"},
    "/v1/messages": {**CHAT, "max_tokens": 5},
    "/v1/messages/count_tokens": CHAT,
    "/v1/embeddings": {"input": "Hi"},
    "/v2/embed": {"texts": ["Hi"]},
    "/tokenize": {"prompt": "Hi"},
    "/detokenize": {"tokens": [1, 2]},
}


def post(service: Service, path: str, data: bytes, coding: str) -> httpx.Response:
    headers = {
        "authorization": f"Bearer {service.keys.acme}",
        "content-encoding": coding,
        "content-type": "application/json",
    }
    return httpx.post(f"{service.url}{path}", content=data, headers=headers)


@pytest.mark.parametrize("coding", CODERS)
@pytest.mark.parametrize("path", ROUTES)
def test_each_route_takes_compressed_bodies(
    service: Service, worker: ScriptedWorker, path: str, coding: str
) -> None:
    worker.script = say("hello")
    body = json.dumps({"model": "tiny", **ROUTES[path]}).encode()
    answer = post(service, path, CODERS[coding](body), coding)
    assert answer.status_code == 200, answer.text


@pytest.mark.parametrize("coding", CODERS)
def test_a_bomb_is_too_large(service: Service, coding: str) -> None:
    bomb = CODERS[coding](b" " * (64 << 20))
    answer = post(service, "/v1/completions", bomb, coding)
    assert (answer.status_code, answer.json()["error"]["code"]) == (413, "request_too_large")


@pytest.mark.parametrize("coding", ["br", "compress", "gzip, zstd"])
def test_other_codings_are_refused_by_name(service: Service, coding: str) -> None:
    answer = post(service, "/v1/completions", b"{}", coding)
    error = answer.json()["error"]
    assert (answer.status_code, error["code"]) == (415, "unsupported_encoding")
    assert error["param"] == "content-encoding" and "gzip, deflate, zstd" in error["message"]


def test_a_body_that_is_not_of_its_coding(service: Service) -> None:
    answer = post(service, "/v1/completions", b'{"model": "tiny"}', "gzip")
    error = answer.json()["error"]
    assert (answer.status_code, error["param"]) == (400, "content-encoding")
    assert "not valid gzip" in error["message"]
