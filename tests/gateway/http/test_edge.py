"""What every server refuses before its applications: ambiguous paths and too many requests without
a key; and the trail that refusals leave."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import quote

import httpx
import pytest

from loraplex.roles.management import public_app
from tests.gateway.service import Service
from tests.plane import Plane, lifespan
from web.edge import (
    ADDRESS_BURST,
    ALL_BURST,
    ALL_PER_S,
    AnonymousLimit,
    find_ambiguous_path,
)
from web.refusals import MAX_SERIES, Refusals

PLAIN = [
    "/",
    "/v1/models",
    "/v1/chat/completions",
    "/v1/chat/completions/",
    "/v1/models/support-bot@staging",
    "/v1/models/support-bot%40staging",
    "/v1/models/acme%2Fsupport-bot%40prod",
    "/v1/models/with%20space",
    "/v1/models/caf%C3%A9",
    "/a/.hidden/...",
]
AMBIGUOUS = [
    "/%61dmin/v1/tenants",
    "/admin%2Fv1/tenants",
    "/admin%2fv1/tenants",
    "//admin/v1/tenants",
    "/admin//v1/tenants",
    "/x/../admin/v1/tenants",
    "/x/%2e%2e/admin/v1/tenants",
    "/./admin/v1/tenants",
    "/x/..",
    "/v1/models/..%2F..%2Fadmin",
    "/v1/models/a%2F%2Fb",
    "/admin\\v1/tenants",
    "/admin%5Cv1/tenants",
    "/admin%00/v1/tenants",
    "/admin%0A",
    "/%2561dmin/v1/tenants",
    "/v1/models/%ff",
    "/admin%",
    "/admin%6/v1",
    "/admin%zz/v1",
    "/a|b",
]


@pytest.mark.parametrize("path", PLAIN)
def test_a_plain_path(path: str) -> None:
    assert find_ambiguous_path(path.encode()) is None


@pytest.mark.parametrize("path", AMBIGUOUS)
def test_an_ambiguous_path(path: str) -> None:
    assert find_ambiguous_path(path.encode()) is not None


async def ask(
    url: str, target: str, headers: str = "", *, host: str = "host: a\r\n", version: str = "1.1"
) -> bytes:
    address, _, port = url.removeprefix("http://").partition(":")
    reader, writer = await asyncio.open_connection(address, int(port))
    head = f"GET {target} HTTP/{version}\r\n{host}connection: close\r\n{headers}\r\n"
    writer.write(head.encode())
    answer = await reader.read()
    writer.close()
    await writer.wait_closed()
    return answer


class _Reached:
    """An application that notes which paths come to it."""

    def __init__(self) -> None:
        self.paths: list[str] = []
        self.state: Any = self
        self.admin: Any = None

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "lifespan":
            await lifespan(receive, send)
            return
        self.paths.append(scope["path"])
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"reached"})


async def test_no_spelling_passes_a_path_filter() -> None:
    data, administration = _Reached(), _Reached()
    async with Plane(public_app(data, administration)) as plane:  # type: ignore[arg-type]
        for path in AMBIGUOUS:
            answer = await ask(plane.url, path)
            assert answer.startswith(b"HTTP/1.1 400 "), path
            if b"ambiguous_path" in answer:
                assert b"x-request-id: req_" in answer
        assert (data.paths, administration.paths) == ([], [])
        assert b"reached" in await ask(plane.url, "/admin/v1/tenants")
        assert b"reached" in await ask(plane.url, "/v1/models/a%20b")
    assert (data.paths, administration.paths) == (["/v1/models/a b"], ["/admin/v1/tenants"])


@pytest.mark.parametrize(
    ("headers", "named"),
    [
        ("host: a\r\nauthorization: Bearer x\r\nauthorization: Bearer y\r\n", "authorization"),
        ("host: a\r\nauthorization: Bearer x\r\nAuthorization: Bearer x\r\n", "authorization"),
        ("host: a\r\nx-api-key: x\r\nX-Api-Key: y\r\n", "x-api-key"),
        ("host: a\r\nauthorization: Bearer x\r\nx-api-key: lpx_y\r\n", "x-api-key"),
        ("host: a\r\nx-api-key: lpx_x\r\nauthorization: Basic x\r\n", "x-api-key"),
        ("host: a\r\nhost: a\r\n", "host"),
        ("host: a\r\nhost: b\r\n", "host"),
        ("host: a/b\r\n", "host"),
        ("host: a b\r\n", "host"),
        ("host: user@a\r\n", "host"),
        ("", "host"),
        ("host: a\r\ncontent-type: text/plain\r\ncontent-type: text/html\r\n", "content-type"),
        ("host: a\r\nx-request-timeout: 1\r\nx-request-timeout: 2\r\n", "x-request-timeout"),
        ("host: a\r\nidempotency-key: a\r\nidempotency-key: b\r\n", "idempotency-key"),
    ],
)
async def test_headers_that_can_be_read_in_two_ways_are_refused(headers: str, named: str) -> None:
    """A proxy may have checked the other one."""
    app = _Reached()
    async with Plane(app) as plane:
        answer = await ask(plane.url, "/v1/models", headers, host="")
    assert answer.startswith(b"HTTP/1.1 400 ")
    assert b"ambiguous_header" in answer and b"x-request-id: req_" in answer
    assert f"'{named}'".encode() in answer
    assert app.paths == []


@pytest.mark.parametrize(
    ("headers", "version"),
    [
        ("host: a:80\r\nauthorization: Bearer lpx_x\r\nx-api-key: lpx_x\r\n", "1.1"),
        ("host: a:80\r\nauthorization: Bearer lpx_x\r\nx-api-key: sk-other\r\n", "1.1"),
        ("host: a:80\r\nauthorization: Bearer lpx_x\r\nx-api-key:\r\n", "1.1"),
        ("host: [::1]:80\r\nauthorization: Bearer  x \r\n", "1.1"),
        ("host:\r\naccept: a\r\naccept: b\r\n", "1.1"),
        ("", "1.0"),
    ],
)
async def test_headers_that_have_one_meaning_are_not(headers: str, version: str) -> None:
    app = _Reached()
    async with Plane(app) as plane:
        answer = await ask(plane.url, "/v1/models", headers, host="", version=version)
    assert answer.startswith(b"HTTP/1.1 200 ")
    assert app.paths == ["/v1/models"]


@pytest.mark.parametrize("name", ["support-bot@staging", "acme/support-bot@prod"])
def test_a_models_name_may_be_encoded(service: Service, name: str) -> None:
    headers = {"authorization": f"Bearer {service.keys.acme}"}
    answer = httpx.get(f"{service.url}/v1/models/{quote(name, safe='')}", headers=headers)
    assert (answer.status_code, answer.json()["id"]) == (200, name)


@pytest.fixture
def flooded(store: Path) -> Iterator[Service]:
    with Service(store) as service:
        yield service


@pytest.mark.full
def test_requests_without_a_key_are_limited_and_others_are_not(flooded: Service) -> None:
    """From loopback by the limit for all; half of them ask for what is not there."""
    with httpx.Client(base_url=flooded.url, timeout=20) as client:
        schemas = [client.get("/schema") for _ in range(20)]
        assert len({answer.content for answer in schemas}) == 1
        seen: set[int] = set()
        for number in range(10 * ALL_BURST):
            answer = client.get("/schema" if number % 2 else f"/nothing/{number}")
            seen.add(answer.status_code)
            if answer.status_code == 503:
                assert answer.json()["error"]["code"] == "too_many_anonymous_requests"
                assert int(answer.headers["retry-after"]) >= 1
                break
        assert seen == {200, 404, 503}
        for path in ("/livez", "/readyz", "/health"):
            assert {client.get(path).status_code for _ in range(50)} == {200}
        bad = {"authorization": f"Bearer {flooded.keys.unissued}"}
        assert {client.get("/v1/models", headers=bad).status_code for _ in range(300)} == {401}
        good = {"authorization": f"Bearer {flooded.keys.acme}"}
        assert client.get("/v1/models", headers=good).status_code == 200


def test_an_address_has_a_limit_of_its_own() -> None:
    now = 0.0
    limit = AnonymousLimit(lambda: now)
    taken = [limit.take("192.0.2.1") for _ in range(ADDRESS_BURST + 1)]
    assert taken == [None] * ADDRESS_BURST + ["address"]
    assert limit.take("192.0.2.2") is None
    now = 1.0
    assert limit.take("192.0.2.1") is None
    now = 9.0
    assert [limit.take(f"2001:db8::{i:x}") for i in range(ADDRESS_BURST + 1)][-1] == "address"


def test_all_addresses_have_a_limit_together() -> None:
    now = 0.0
    limit = AnonymousLimit(lambda: now)
    taken = [limit.take(f"192.0.{i // 256}.{i % 256}") for i in range(ALL_BURST + 1)]
    assert taken == [None] * ALL_BURST + ["all"]
    assert limit.take("127.0.0.1") == "all"
    now += 1 / ALL_PER_S
    assert limit.take("127.0.0.1") is None


async def test_a_flood_of_bad_keys_leaves_a_line_and_its_number(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.WARNING, "web.refusals")
    refusals = Refusals(interval_s=0.05)
    state = {"refusal": "invalid_api_key", "request_id": "req_1"}
    for _ in range(1000):
        refusals.note_answer({"client": ("192.0.2.7", 1), "state": state}, 401)
    refusals.note_answer({"client": ("192.0.2.7", 1), "state": state}, 404)
    async with asyncio.timeout(10):
        while len(caplog.records) < 2:
            await asyncio.sleep(0.01)
    first, again = (record.__dict__ for record in caplog.records[:2])
    assert (first["reason"], first["address"]) == ("invalid_api_key", "192.0.2.7")
    assert first["request_id"] == "req_1"
    assert (again["message"], again["number"]) == ("refused again", 999)


async def test_a_flood_from_many_addresses_does_not_fill_the_log(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.WARNING, "web.refusals")
    refusals = Refusals()
    for number in range(10 * MAX_SERIES):
        client = (f"10.0.{number // 256}.{number % 256}", 1)
        refusals.note_answer({"client": client, "state": {}}, 401)
    assert len(caplog.records) == MAX_SERIES + 1
