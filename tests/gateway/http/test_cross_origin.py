"""Pages in browsers: which origins may call, and what they may read."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from loraplex.errors import BadSettings
from loraplex.settings import load_settings
from tests.gateway.scripts import say
from tests.gateway.service import Service
from web.edge import ALL_BURST

APP, OTHER = "https://app.example.com", "https://evil.example.com"
CHAT = {"model": "tiny", "messages": [{"role": "user", "content": "Hi"}]}
QUESTION = {
    "access-control-request-method": "POST",
    "access-control-request-headers": "authorization, content-type, x-stainless-os",
}
ALLOW = "access-control-allow-origin"


@pytest.fixture(scope="module")
def open_service(store: Path) -> Iterator[Service]:
    with Service(store, cors_origins=(APP,)) as service:
        yield service


def url_of(service: Service, path: str = "/v1/chat/completions") -> str:
    with service.client() as client:
        return str(client.base_url).removesuffix("/v1/") + path


def key_of(service: Service) -> str:
    with service.client() as client:
        return client.api_key


def test_a_browser_asks_without_a_key_and_then_calls(open_service: Service) -> None:
    open_service.worker.script = say("ok")
    url = url_of(open_service)
    asked = httpx.options(url, headers={"origin": APP, **QUESTION})
    assert (asked.status_code, asked.content) == (204, b"")
    assert asked.headers[ALLOW] == APP and asked.headers["vary"] == "origin"
    assert (
        asked.headers["access-control-allow-headers"] == QUESTION["access-control-request-headers"]
    )
    assert "POST" in asked.headers["access-control-allow-methods"]
    key = {"authorization": f"Bearer {key_of(open_service)}", "origin": APP}
    for stream in (False, True):
        answer = httpx.post(url, json={**CHAT, "stream": stream}, headers=key)
        assert answer.status_code == 200 and answer.headers[ALLOW] == APP
        exposed = answer.headers["access-control-expose-headers"].split(", ")
        assert {"x-request-id", "x-ratelimit-remaining-tokens", "retry-after"} <= set(exposed)
    assert httpx.post(url, json=CHAT, headers={"origin": APP}).headers[ALLOW] == APP


@pytest.mark.parametrize("origin", [OTHER, "null", None])
def test_other_origins_are_told_nothing(open_service: Service, origin: str | None) -> None:
    headers = {"origin": origin} if origin else {}
    url = url_of(open_service)
    assert ALLOW not in httpx.options(url, headers={**headers, **QUESTION}).headers
    answer = httpx.post(url, json=CHAT, headers=headers)
    assert answer.status_code == 401 and ALLOW not in answer.headers
    assert "origin" in answer.headers["vary"]


def test_without_the_setting_nothing_is_said(service: Service) -> None:
    asked = httpx.options(url_of(service), headers={"origin": APP, **QUESTION})
    assert ALLOW not in asked.headers and "vary" not in asked.headers


@pytest.fixture
def flooded(store: Path) -> Iterator[Service]:
    """A service of its own, because the test uses up its limits."""
    with Service(store, cors_origins=(APP,)) as service:
        yield service


@pytest.mark.parametrize(
    ("method", "path", "headers"),
    [
        ("OPTIONS", "/v1/chat/completions", {"origin": OTHER, **QUESTION}),
        ("OPTIONS", "/nothing", {}),
        ("GET", "/nothing", {}),
        ("GET", "/version", {}),
    ],
)
def test_others_requests_without_a_key_stop_no_preflight(
    flooded: Service, method: str, path: str, headers: dict[str, str]
) -> None:
    with httpx.Client() as client:
        url = url_of(flooded, path)
        statuses = [
            client.request(method, url, headers=headers).status_code for _ in range(2 * ALL_BURST)
        ]
        assert 503 in statuses
        question = {"origin": APP, **QUESTION}
        asked = [client.options(url_of(flooded), headers=question) for _ in range(2 * ALL_BURST)]
        assert {each.status_code for each in asked} == {204}
        # Pages have a limit of their own.
        if path != "/version":
            assert client.get(url_of(flooded, "/version")).status_code == 200


def test_origins_are_checked() -> None:
    assert load_settings({}, {"LORAPLEX_CORS_ORIGINS": f"{APP}, *"}).cors_origins == (APP, "*")
    with pytest.raises(BadSettings, match="LORAPLEX_CORS_ORIGINS"):
        load_settings({}, {"LORAPLEX_CORS_ORIGINS": f"{APP}/path"})
