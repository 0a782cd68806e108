"""What someone sees who opens the address in a browser, or gives a client a wrong base URL."""

from __future__ import annotations

import httpx
import openai
import pytest

from gateway.http.routing import find_meant_path
from tests.gateway.service import Service

SERVED = {"/v1/chat/completions", "/v1/completions", "/v1/models", "/v1/messages", "/tokenize"}


@pytest.mark.parametrize(
    ("path", "meant"),
    [
        ("/chat/completions", "/v1/chat/completions"),
        ("/v1/v1/messages", "/v1/messages"),
        ("/v1/messages/v1/messages", "/v1/messages"),
        ("/v1/chat/completions/chat/completions", "/v1/chat/completions"),
        ("/api/v1/chat/completions", "/v1/chat/completions"),
        ("/openai/v1/models", "/v1/models"),
        ("/openai/chat/completions", "/v1/chat/completions"),
        ("/v1/chat/completions/", "/v1/chat/completions"),
        ("/v1/tokenize", "/tokenize"),
        ("/openapi.json", "/schema"),
        ("/redoc", "/docs"),
        ("/v1/files", None),
        ("/", None),
        ("/v1", None),
    ],
)
def test_the_route_that_was_meant(path: str, meant: str | None) -> None:
    assert find_meant_path(path, SERVED) == meant


def test_a_client_with_a_wrong_base_url_is_told_the_right_one(service: Service) -> None:
    client = openai.OpenAI(base_url=service.url, api_key=service.keys.acme, max_retries=0)
    with pytest.raises(openai.NotFoundError, match=r"Did you mean /v1/chat/completions\?"):
        client.chat.completions.create(model="tiny", messages=[{"role": "user", "content": "Hi"}])
    answer = httpx.get(f"{service.url}/v1/files")
    assert answer.status_code == 404
    assert answer.json()["error"]["message"] == (
        "There is no route GET /v1/files. GET /docs lists the routes."
    )


def test_a_browser_finds_the_documentation(service: Service) -> None:
    page = httpx.get(service.url)
    assert page.status_code == 200 and page.headers["content-type"].startswith("text/html")
    for link in ("/docs", "/schema", "/readyz", "/version"):
        assert f'href="{link}"' in page.text
        assert httpx.get(service.url + link).status_code == 200
    assert httpx.head(service.url).status_code == 200


def pages(service: Service) -> list[str]:
    paths = httpx.get(f"{service.url}/schema").json()["paths"]
    return ["/docs", *(path for path, methods in paths.items() if "get" in methods)]


def test_a_head_is_that_of_the_page(service: Service) -> None:
    """With a key and without, of each route that has pages, and of those that do not exist."""
    varying = {"date", "x-request-id", "openai-processing-ms", "content-length"}
    for path in [*pages(service), "/nothing", "/v1/completions"]:
        path = path.replace("{model}", "tiny").replace("{model:path}", "tiny")
        for headers in ({}, {"authorization": f"Bearer {service.keys.acme}"}):
            whole = httpx.get(f"{service.url}{path}", headers=headers)
            head = httpx.head(f"{service.url}{path}", headers=headers)
            assert (head.status_code, head.content) == (whole.status_code, b""), path
            assert {k: v for k, v in head.headers.items() if k not in varying} == {
                k: v for k, v in whole.headers.items() if k not in varying
            }
            if "content-length" in whole.headers and head.status_code == 200:
                assert head.headers["content-length"] == whole.headers["content-length"]
