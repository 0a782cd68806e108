"""All routes of the admin plane, each with a call that succeeds, and a plane that has one thing of
each kind that a call can name."""

from __future__ import annotations

from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import httpx
import msgspec
from litestar import Litestar
from litestar.handlers import HTTPRouteHandler
from litestar.routes import HTTPRoute

from admin.app import create_app
from admin.http.parameters import parameters
from store.database import EVERYTHING
from store.records import ServingData
from tests.adapters.files import write_adapter
from tests.admin.conftest import CONFIG, Plane, write_model
from tests.admin.lifecycle import add, add_credit, claim, make_ready, prove, report_worker
from tests.admin.usage.test_usage import load, row

ADMIN = "/admin/v1"
ABSENT: dict[str, str] = {
    "tenant": "nobody",
    "key_id": "nokeyofthis1",
    "name": "none",
    "model": "none",
    "alias": "none",
    "version": "77",
    "upload_id": "upl_000000000000000000000000",
    "signing_key_id": "sig_000000000000",
    "worker_id": "none",
    "credit_id": "none",
    "path": "none",
}
"""What a path or a query can name, and one that does not exist."""
DAY = {"start": "2026-03-05T00:00:00Z", "end": "2026-03-06T00:00:00Z"}
CREDIT = {"model": "tiny", "input": "0", "output": "0", "reason": "free", **DAY}


class Call(msgspec.Struct, frozen=True):
    """Call of a route that succeeds with an admin key, and most with a key of the tenant `acme`."""

    body: Any = None
    """JSON. None stands for the example of the route's type of body."""
    values: dict[str, str] = {}
    """Values of parameters of the path that differ from `Furnished.values`."""
    query: dict[str, Any] = {}
    sends: dict[str, Any] = {}
    """Arguments of `httpx.Client.request` for a body that is not JSON."""
    is_everybodys: bool = False
    """Whether what the path names belongs to no tenant, or is always the caller's own."""


def adapter_files(seed: int = 0) -> dict[str, bytes]:
    """Returns the files of an adapter of the base model, by name."""
    with TemporaryDirectory() as folder:
        write_adapter(Path(folder), seed=seed)
        return {file.name: file.read_bytes() for file in sorted(Path(folder).iterdir())}


SPARE = {"name": "spare"}
ALIAS = "/adapters/{name}/aliases/{alias}"
CALLS = {
    "GET /tenants": Call(),
    "POST /tenants": Call({"name": "initech", "sharing_group": "family"}),
    "GET /tenants/{tenant}": Call(),
    "PATCH /tenants/{tenant}": Call(),
    "DELETE /tenants/{tenant}": Call(),
    "GET /tenants/{tenant}/keys": Call(),
    "POST /tenants/{tenant}/keys": Call(),
    "GET /tenants/{tenant}/quota": Call(),
    "PUT /tenants/{tenant}/quota": Call(
        {"tokens_per_day": 9, "adapters": 20, "pin_bytes": 1 << 21}
    ),
    "DELETE /tenants/{tenant}/quota": Call(values={"tenant": "globex"}),
    "GET /quota": Call(is_everybodys=True),
    "GET /keys": Call(),
    "POST /keys": Call({"name": "operators", "cidrs": ["127.0.0.0/8"]}),
    "GET /keys/{key_id}": Call(),
    "DELETE /keys/{key_id}": Call(),
    "POST /keys/{key_id}/rotate": Call(),
    "GET /keys/{key_id}/quota": Call(),
    "PUT /keys/{key_id}/quota": Call(),
    "DELETE /keys/{key_id}/quota": Call(),
    "GET /models": Call(is_everybodys=True),
    "POST /models": Call({"name": "llama", "digest": "b" * 64, "max_model_len": 256}),
    "GET /models/{name}": Call(values=SPARE, is_everybodys=True),
    "PATCH /models/{name}": Call({"max_model_len": 128}, values=SPARE, is_everybodys=True),
    "DELETE /models/{name}": Call(values=SPARE, is_everybodys=True),
    "GET /prices": Call(),
    "GET /prices/{model}": Call(is_everybodys=True),
    "PUT /prices/{model}": Call(is_everybodys=True),
    "DELETE /prices/{model}": Call(is_everybodys=True),
    "GET /signing-keys": Call(),
    "POST /signing-keys": Call(),
    "GET /signing-keys/{signing_key_id}": Call(),
    "DELETE /signing-keys/{signing_key_id}": Call(),
    "GET /adapters": Call(),
    "POST /adapters": Call(
        sends={
            "data": {"tenant": "acme", "name": "bot", "model": "tiny"},
            "files": adapter_files(),
        },
        is_everybodys=True,
    ),
    "GET /adapters/{name}": Call(),
    "DELETE /adapters/{name}": Call(),
    "GET /adapters/{name}/versions": Call(),
    "GET /adapters/{name}/versions/{version}": Call(),
    "DELETE /adapters/{name}/versions/{version}": Call(values={"version": "3"}),
    "POST /adapters/{name}/versions/{version}/template/approve": Call(values={"version": "3"}),
    f"GET {ALIAS}": Call(),
    f"PUT {ALIAS}": Call({"version": 2}),
    f"DELETE {ALIAS}": Call(values={"alias": "staging"}),
    f"POST {ALIAS}/rollback": Call(values={"alias": "staging"}),
    f"PUT {ALIAS}/pin": Call(),
    f"DELETE {ALIAS}/pin": Call(values={"alias": "staging"}),
    "POST /uploads": Call({"bytes": 10, "filename": "a.tar"}, is_everybodys=True),
    "GET /uploads/rejected": Call(),
    "GET /uploads/{upload_id}": Call(),
    "PATCH /uploads/{upload_id}": Call(
        sends={"content": b"abc", "headers": {"upload-offset": "0"}}
    ),
    "DELETE /uploads/{upload_id}": Call(),
    "GET /audit": Call(query={"limit": 3}),
    "GET /audit/export": Call(),
    "GET /audit/verify": Call(),
    "GET /usage": Call(query=DAY),
    "GET /usage/credits": Call(),
    "GET /usage/credits/{credit_id}": Call(),
    "PUT /usage/credits/{credit_id}": Call(CREDIT, values={"credit_id": "c2"}),
    "GET /workers": Call(),
    "GET /workers/{worker_id}": Call(),
    "POST /workers/{worker_id}/drain": Call(),
    "DELETE /workers/{worker_id}/drain": Call(),
    "GET /overview": Call(),
    "GET /schema": Call(),
    "GET /schema/openapi.json": Call(),
    "GET /schema/{path}": Call(values={"path": "openapi.json"}),
    "POST /v1/load_lora_adapter": Call(
        sends={"data": {"lora_name": "live", "model": "tiny"}, "files": adapter_files(1)}
    ),
    "POST /v1/unload_lora_adapter": Call({"lora_name": "scratch"}),
    "GET /v1/organization/costs": Call(query={"start_time": 1772668800}, is_everybodys=True),
    "GET /v1/organization/usage/completions": Call(
        query={"start_time": 1772668800}, is_everybodys=True
    ),
}
"""Calls by method and path. Paths without /v1 begin with /admin/v1."""


class Route(msgspec.Struct, frozen=True):
    method: str
    path: str
    handler: HTTPRouteHandler
    call: Call

    @property
    def name(self) -> str:
        return f"{self.method} {self.path.removeprefix(ADMIN)}"

    @property
    def scopes(self) -> set[str]:
        """Scopes of which a key needs one."""
        guards: Any = self.handler.resolve_guards()
        return {scope for guard in guards for scope in guard.__dict__["scopes"]}

    def takes(self, place: str, name: str | None = None) -> list[str]:
        """Returns the names of the parameters in a path, query or header: all, or only `name`."""
        found = [each for each, where, _ in parameters(self.handler) if where == place]
        return [each for each in found if name in (None, each)]

    @property
    def body(self) -> Any:
        """Body of the call, or None if it is not JSON."""
        data: Any = self.handler.parsed_data_field
        return data.annotation.example if data and self.call.body is None else self.call.body

    def url(self, values: dict[str, str]) -> str:
        return self.path.format_map(values if values is ABSENT else values | self.call.values)

    def request(self, values: dict[str, str], *, is_named: bool) -> tuple[str, dict[str, Any]]:
        """Returns the URL and arguments of the call. Names the tenant if `is_named` is set and the
        route takes it in its query."""
        arguments = dict(self.call.sends) or ({"json": self.body} if self.body is not None else {})
        query = dict(self.call.query)
        if is_named and self.takes("query", "tenant"):
            query["tenant"] = values["tenant"]
        return self.url(values), arguments | {"params": query}


def make_app() -> Litestar:
    """Returns the same code as that of a served plane, for its routes and its document."""
    return create_app(CONFIG, database=None, store=None)  # type: ignore[arg-type]


def _routes() -> list[Route]:
    found: list[Route] = []
    for route in make_app().routes:
        if isinstance(route, HTTPRoute):
            for handler in route.route_handlers:
                for method in sorted(handler.http_methods - {"OPTIONS"}):
                    name = f"{method} {route.path_format.removeprefix(ADMIN)}"
                    found.append(Route(method, route.path_format, handler, CALLS[name]))
    assert {route.name for route in found} == CALLS.keys()
    return found


ROUTES = _routes()


class Furnished(msgspec.Struct):
    """Plane in which the tenant `acme` has one thing of each kind, and `globex` only a key."""

    plane: Plane
    values: dict[str, str]
    """Value of each parameter that names a thing."""
    owner: httpx.AsyncClient
    """Bears a key of acme."""
    stranger: httpx.AsyncClient
    """Bears a key of globex."""


async def furnish(plane: Plane) -> Furnished:
    admin = plane.client
    write_model(plane.store, "b" * 64)
    for name in ("tiny", "spare"):
        await _done(admin.post("models", json={"name": name, "digest": "b" * 64}))
        await _done(admin.put(f"prices/{name}", json={"input": "1", "output": "2"}))
    owner = await plane.tenant("acme")
    key_id = owner.headers["authorization"].split("_")[1]
    stranger = await plane.tenant("globex")
    async with plane.database.transaction(EVERYTHING) as connection:
        tenant_id = await connection.fetchval("SELECT id FROM tenants WHERE name = 'acme'")
        await make_ready(connection, tenant_id, "a", "b")
        await add(connection, tenant_id, "c", serving=ServingData(chat_template="{{ messages }}"))
        for found in await claim(connection):
            await prove(connection, found)
        await add_credit(connection, "c1")
    fields = {"tenant_id": tenant_id, "key_id": key_id, "model": "tiny"}
    await load(plane.database, [row(number, **fields) for number in range(3)])
    await report_worker(plane.database, "worker-1", "b" * 64, seconds_ago=-3600)
    limits = {"requests_per_minute": 5, "spend_per_day": "5.00", "pin_bytes": 1 << 20}
    await _done(admin.put("tenants/acme/quota", json=limits))
    await _done(admin.put("tenants/globex/quota", json={"requests_per_minute": 5}))
    await _done(admin.put(f"keys/{key_id}/quota", json={"tokens_per_day": 1000}))
    for version in (1, 2):
        await _done(owner.put("adapters/bot/aliases/staging", json={"version": version}))
    await _done(owner.put("adapters/bot/aliases/staging/pin"))
    form = {"data": {"lora_name": "scratch", "model": "tiny"}, "files": adapter_files(2)}
    answer = await owner.post(str(owner.base_url.join("/v1/load_lora_adapter")), **form)
    assert answer.is_success, answer.text
    upload = await _done(owner.post("uploads", json={"bytes": 10, "filename": "a.tar"}))
    pem = "ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAIA6rWI3G2dz5FiGQMBSmJDQ0IZ2a4ZcX4Q6XcKAIxTPV"
    signing_key = await _done(owner.post("signing-keys", json={"name": "ci", "public_key": pem}))
    values = {
        "tenant": "acme",
        "key_id": key_id,
        "name": "bot",
        "model": "tiny",
        "alias": "prod",
        "version": "1",
        "upload_id": upload["id"],
        "signing_key_id": signing_key["id"],
        "worker_id": "worker-1",
        "credit_id": "c1",
        "path": "openapi.json",
    }
    return Furnished(plane, values, owner, stranger)


async def _done(call: Any) -> Any:
    answer = await call
    assert answer.is_success, answer.text
    return answer.json()
