"""Hostile text wherever a request to the admin plane has room for text: refused or taken as text,
never an error of the server's, and nothing is changed by it."""

from __future__ import annotations

import contextlib
import json
from typing import Any
from urllib.parse import quote

import httpx
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from admin.http.parameters import parameters
from tests.admin.calls import ROUTES
from tests.admin.http.test_fuzz import ThreadedPlane, plane
from tests.hostile import TEXTS, texts
from tests.scale import scaled

__all__ = ["plane"]

pytestmark = pytest.mark.soak
CASES = scaled(150, 20_000)
FIELDS = ("name", "sharing_group", "digest", "model", "filename", "upload", "scopes", "cidrs")
HEADERS = ("authorization", "x-api-key", "if-match", "idempotency-key", "upload-offset")


@st.composite
def hostile_requests(draw: st.DrawFn) -> tuple[str, str, dict[str, Any]]:
    """Method, URL and arguments of a request to some route, with at least one hostile text."""
    route = draw(st.sampled_from(ROUTES))
    values: dict[str, str] = {}
    query: dict[str, str] = {}
    for name, place, _ in parameters(route.handler):
        if place == "path":
            values[name] = quote(draw(texts).encode("utf-8", "replace"), safe="") or "x"
        elif place == "query" and draw(st.booleans()):
            query[name] = draw(texts)
    if draw(st.booleans()):
        query[draw(texts)] = draw(texts)
    headers: dict[str, bytes] = {}
    for name in HEADERS:
        if draw(st.integers(0, 4)) == 0:
            headers[name] = draw(texts).encode("utf-8", "replace")
    body = draw(st.dictionaries(st.sampled_from(FIELDS) | texts, texts, max_size=4))
    # Some texts are names, and a key's may be any: with this field nothing is made of them.
    body["no such field"] = draw(texts)
    content = json.dumps(body) if draw(st.booleans()) else draw(texts.filter(lambda t: t != "{}"))
    arguments = {"params": query, "headers": headers, "content": content.encode("utf-8", "replace")}
    return route.method, route.path.format_map(values), arguments


def send(plane: ThreadedPlane, method: str, url: str, arguments: dict[str, Any]) -> None:
    """Some that no client can send are not sent: of headers with line ends, the client knows."""
    headers = {name: value.strip() for name, value in arguments["headers"].items()}
    with contextlib.suppress(httpx.LocalProtocolError):
        answer = plane.client.request(
            method, url, **(arguments | {"headers": dict(plane.headers) | headers})
        )
        assert answer.status_code < 500, (method, url, arguments, answer.text)
        assert "x-injected" not in answer.headers
        if answer.is_error and answer.headers.get("content-type") == "application/json":
            assert "syntax" not in answer.text, answer.text


@pytest.mark.full
def test_no_text_breaks_the_plane_or_changes_anything(plane: ThreadedPlane) -> None:
    plane.restore()
    before = plane.dump()

    @settings(
        max_examples=CASES,
        derandomize=True,
        database=None,
        deadline=None,
        suppress_health_check=list(HealthCheck),
    )
    @given(hostile_requests())
    def check(request: tuple[str, str, dict[str, Any]]) -> None:
        send(plane, *request)

    check()
    assert plane.dump() == before


@pytest.mark.parametrize("place", ["path", "query", "header", "body"])
def test_each_text_in_each_place(plane: ThreadedPlane, place: str) -> None:
    plane.restore()
    before = plane.dump()
    for text in TEXTS:
        part = quote(text.encode("utf-8", "replace"), safe="")
        arguments: dict[str, Any] = {"headers": {}}
        url, method = "/admin/v1/tenants", "GET"
        if place == "path":
            url = f"{url}/{part}/keys"
        elif place == "query":
            arguments["params"] = {"after": text}
        elif place == "header":
            arguments["headers"] = {"authorization": f"Bearer {text}".encode("utf-8", "replace")}
        else:
            method, arguments["content"] = "POST", json.dumps({"name": text}).encode()
        if text in ("0", "9" * 40, "null", "NaN", "true", "1e400", "x" * 5000) and place == "body":
            continue  # some of these are names
        send(plane, method, url, arguments)
    assert plane.dump() == before
