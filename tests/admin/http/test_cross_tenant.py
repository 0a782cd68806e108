"""Every route, asked by another tenant's keys for what is not theirs: refused, and in the same
words as for what does not exist. The matrix is made of the route table, so a new route is in it or
fails here.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import httpx
import msgspec
import pytest
from litestar.handlers import HTTPRouteHandler
from litestar.routes import HTTPRoute

from admin.adapters.load_routes import LoadLoraAdapter
from admin.http.parameters import parameters
from admin.signing_keys.schemas import SigningKeyCreate
from store.database import EVERYTHING
from store.records import TENANT_SCOPES
from tests.admin.conftest import Plane
from tests.admin.dump import dump
from tests.admin.http.test_fuzz import make_app
from tests.admin.lifecycle import add_credit, make_ready, report_worker

ABSENT: dict[str, str] = {
    "tenant": "nobody",
    "key_id": "nokeyofthis1",
    "name": "none",
    "alias": "none",
    "version": "77",
    "upload_id": "upl_000000000000000000000000",
    "signing_key_id": "sig_000000000000",
    "worker_id": "none",
    "credit_id": "none",
    "path": "none",
}
"""What a path or a query can name, and one that is not there."""

NO_ONES = {
    ("GET", "/admin/v1/models"): "base models are everybody's",
    ("GET", "/admin/v1/models/{name}"): "base models are everybody's",
    ("PATCH", "/admin/v1/models/{name}"): "base models are everybody's",
    ("DELETE", "/admin/v1/models/{name}"): "base models are everybody's",
    ("GET", "/admin/v1/prices/{model}"): "of base models",
    ("PUT", "/admin/v1/prices/{model}"): "of base models",
    ("DELETE", "/admin/v1/prices/{model}"): "of base models",
    ("GET", "/v1/organization/usage/completions"): "a tenant's key sees its own",
    ("GET", "/v1/organization/costs"): "a tenant's key sees its own",
    ("GET", "/admin/v1/quota"): "a tenant's key sees its own",
    ("POST", "/admin/v1/uploads"): "makes one of the caller's own",
    ("POST", "/admin/v1/adapters"): "names things in its body: has a test of its own",
}
"""Routes that a tenant's key may call and where nothing that could be another's is named, and
those whose parameter is nobody's. All others without such a parameter must refuse the key."""

SCOPES = [*({scope} for scope in sorted(TENANT_SCOPES)), TENANT_SCOPES]

ROUTES = [
    (method, route.path_format, handler)
    for route in make_app().routes
    if isinstance(route, HTTPRoute)
    for handler in route.route_handlers
    for method in sorted(handler.http_methods - {"OPTIONS"})
]


class Matrix(msgspec.Struct):
    plane: Plane
    url: str
    foreign: dict[str, str]
    callers: list[httpx.AsyncClient]
    """globex's keys, one for each of SCOPES."""


@pytest.fixture
async def matrix(plane: Plane, base: str) -> Matrix:
    """acme has one of each thing, globex nothing but keys."""
    acme = await plane.tenant("acme")
    async with plane.database.transaction(EVERYTHING) as connection:
        tenant_id = await connection.fetchval("SELECT id FROM tenants")
        key_id = await connection.fetchval("SELECT id FROM api_keys WHERE tenant_id IS NOT NULL")
        await make_ready(connection, tenant_id, "a", "b")
        await add_credit(connection, "c1")
    await report_worker(plane.database, "worker-1")
    limits = await plane.client.put("tenants/acme/quota", json={"requests_per_minute": 5})
    assert limits.status_code == 200, limits.text
    upload = await acme.post("uploads", json={"bytes": 10, "filename": "a.tar"})
    signing_key = await acme.post("signing-keys", json=SigningKeyCreate.example)
    await plane.client.post("tenants", json={"name": "globex"})
    keys = [await plane.key("globex", scopes=sorted(scopes)) for scopes in SCOPES]
    foreign = {
        "tenant": "acme",
        "key_id": key_id,
        "name": "bot",
        "alias": "prod",
        "version": "1",
        "upload_id": upload.json()["id"],
        "signing_key_id": signing_key.json()["id"],
        "worker_id": "worker-1",
        "credit_id": "c1",
        "path": "openapi.json",
    }
    callers = [plane.bearing(str(key["key"])) for key in keys]
    return Matrix(plane, plane.url.removesuffix("/admin/v1"), foreign, callers)


def named(method: str, path: str, handler: HTTPRouteHandler) -> list[str]:
    """What a request names that may be another's."""
    names = [name for name, place, _ in parameters(handler) if place == "path" or name == "tenant"]
    if (method, path) in NO_ONES:
        return []
    assert set(names) <= ABSENT.keys(), f"{path}: what of another could be named there?"
    return names


def requests(
    method: str, path: str, handler: HTTPRouteHandler, values: dict[str, str]
) -> Iterator[tuple[str, dict[str, Any]]]:
    """URL and arguments; whose it is, is named where the route takes it, and is not."""
    data = handler.parsed_data_field
    body = None if data is None else data.annotation.example
    arguments: dict[str, Any] = {"json": body} if data is not None else {}
    if path.startswith("/admin/v1/uploads") and method == "PATCH":
        arguments = {"content": b"abc", "headers": {"upload-offset": "0"}}
    if path == "/v1/load_lora_adapter":
        arguments = {"json": LoadLoraAdapter.example}
    url = path.format_map(values)
    yield url, arguments
    if any(name == "tenant" and place == "query" for name, place, _ in parameters(handler)):
        yield url, arguments | {"params": {"tenant": values["tenant"]}}


def told(answer: httpx.Response, values: dict[str, str]) -> tuple[int, str]:
    """What is answered, whatever was named."""
    body = answer.text
    for value in sorted(values.values(), key=len, reverse=True):
        body = body.replace(f"'{value}'", "it").replace(f"version {value} ", "version it ")
    return answer.status_code, body


async def test_what_is_anothers_is_as_absent(matrix: Matrix):
    asked = 0
    before = await dump(matrix.plane.database, but=("key_uses",))
    for method, path, handler in ROUTES:
        names = named(method, path, handler)
        for caller, scopes in zip(matrix.callers, SCOPES, strict=True):
            where = (method, path, sorted(scopes))
            if not names:
                answer = await caller.request(method, matrix.url + path)
                is_excused = (method, path) in NO_ONES
                assert is_excused or answer.status_code == 403, (where, answer.text)
                continue
            theirs = requests(method, path, handler, matrix.foreign)
            nobodys = requests(method, path, handler, ABSENT)
            for (url, arguments), (other, others) in zip(theirs, nobodys, strict=True):
                if (url, arguments) == (other, others):
                    continue  # names nothing: of the caller's own
                answer = await caller.request(method, matrix.url + url, **arguments)
                absent = await caller.request(method, matrix.url + other, **others)
                assert answer.status_code in (403, 404), (where, url, answer.text)
                assert told(answer, matrix.foreign) == told(absent, ABSENT), where
                asked += 1
        assert await dump(matrix.plane.database, but=("key_uses",)) == before, (method, path)
    assert asked > 100


async def test_a_new_version_is_not_made_for_another(matrix: Matrix):
    """Whose it shall be, and of which upload, stands in the body."""
    before = await dump(matrix.plane.database, but=("key_uses",))
    url = f"{matrix.url}/admin/v1/adapters"
    files = {"adapter_config.json": b"{}", "adapter_model.safetensors": b"x"}
    for caller, scopes in zip(matrix.callers, SCOPES, strict=True):
        statuses = {404} if "adapters:write" in scopes else {403}
        for field, name in (("upload", "upload_id"), ("tenant", "tenant")):
            answers: list[tuple[int, str]] = []
            for values in (matrix.foreign, ABSENT):
                if field == "upload":
                    body = {"upload": values[name], "name": "bot"}
                    answer = await caller.post(url, json=body)
                else:
                    form = {"tenant": values[name], "name": "bot"}
                    answer = await caller.post(url, data=form, files=files)
                answers.append(told(answer, values))
            assert answers[0] == answers[1]
            assert answers[0][0] in statuses, answers
    assert await dump(matrix.plane.database, but=("key_uses",)) == before
