"""A served admin plane against its own OpenAPI document: what it takes and what it answers.

`LORAPLEX_TEST_SCALE=full` sends 20,000 requests.
"""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import Iterator
from typing import Any
from urllib.parse import parse_qsl, urlsplit

import httpx
import pytest
import requests
import schemathesis
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from litestar import Litestar
from schemathesis import GenerationMode
from schemathesis.checks import load_all_checks
from schemathesis.specs.openapi import checks

from admin.app import create_app
from admin.http.plane import AdminConfig
from admin.keys.keys import create_key
from store.database import EVERYTHING, Database
from store.records import TENANT_SCOPES
from tests.admin.conftest import PEPPER, write_model
from tests.admin.dump import dump
from tests.admin.lifecycle import add_credit, make_ready, report_worker
from tests.postgres import fresh_database
from tests.scale import scaled

load_all_checks()
pytestmark = pytest.mark.soak

EXCLUDED = [
    # Rules between fields and of what is there now (a digest that the store has, an expiry ahead)
    # are told in words only: what fits the schema may still be refused with 400, 404 or 409.
    checks.positive_data_acceptance,
]


schemathesis.openapi.format(
    "decimal", st.decimals(0, 2_000_000, places=6).map(str) | st.sampled_from(["NaN", "-1", "1e9"])
)


def make_app() -> Litestar:
    """The same code as that of the served plane, so that each operation is a test of its own."""
    config = AdminConfig(pepper=PEPPER)
    return create_app(config, database=None, store=None)  # type: ignore[arg-type]


SCHEMA: Any = schemathesis.openapi.from_dict(make_app().openapi_schema.to_schema())
OPERATIONS = [
    (method, path)
    for path, methods in SCHEMA.raw_schema["paths"].items()
    for method in sorted(methods)
]
EXAMPLES = scaled(640, 20_000) // len(OPERATIONS)


class World:
    """A plane in a process of its own, with one thing of each kind that can be asked for."""

    def __init__(self, dsn: str, url: str, admin_key: str) -> None:
        self.url = url
        self.session = requests.Session()
        self.client = httpx.Client(base_url=url, timeout=30)
        self.headers = {"authorization": f"Bearer {admin_key}"}
        self._dsn = dsn
        self.known: dict[str, str | int] = {}

    def restore(self) -> None:
        """What requests have deleted is there again."""
        asyncio.run(self._restore())

    async def _restore(self) -> None:
        made = self._post("models", {"name": "tiny", "digest": "b" * 64})
        assert made.status_code in (201, 409), made.text
        database = await Database.connect(self._dsn, sees=EVERYTHING, max_size=1)
        async with database.transaction() as connection:
            await connection.execute("DELETE FROM tenants")
            if not await connection.fetchval("SELECT count(*) FROM usage_credits"):
                await add_credit(connection, "c1")
            tenant_id = "ten_000000000000"
            await connection.execute(
                "INSERT INTO tenants (id, name) VALUES ($1, 'acme')", tenant_id
            )
            await make_ready(connection, tenant_id, "a", "b")
            key, _ = await create_key(connection, PEPPER, tenant_id, TENANT_SCOPES)
        await report_worker(database, "worker-1", "b" * 64)
        await database.close()
        upload = self._post("uploads", {"bytes": 100, "filename": "a.tar"})
        self.known = {
            "tenant": "acme",
            "key_id": key.id,
            "name": "bot",
            "model": "tiny",
            "alias": "prod",
            "version": 1,
            "upload_id": upload.json()["id"],
            "signing_key_id": "sig_000000000000",
            "worker_id": "worker-1",
            "credit_id": "c1",
        }

    def dump(self) -> dict[str, list[str]]:
        """What the database holds, but for when keys were used and what was answered."""
        return asyncio.run(self._dump())

    async def _dump(self) -> dict[str, list[str]]:
        database = await Database.connect(self._dsn, max_size=1)
        found = await dump(database, but=("key_uses",))
        await database.close()
        return found

    def _post(self, path: str, body: dict[str, object]) -> requests.Response:
        return self.session.post(f"{self.url}/admin/v1/{path}", json=body, headers=self.headers)


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    store = tmp_path_factory.mktemp("store")
    write_model(store, "b" * 64)
    with fresh_database() as dsn:
        key = asyncio.run(_make_admin_key(dsn))
        command = [sys.executable, "-m", "tests.admin.serve", dsn, str(store)]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
            assert process.stdout is not None
            url = process.stdout.readline().strip().removesuffix("/admin/v1")
            try:
                world = World(dsn, url, key)
                with world.session, world.client:
                    yield world
                assert process.poll() is None, "the plane has died"
            finally:
                process.kill()


async def _make_admin_key(dsn: str) -> str:
    database = await Database.connect(dsn, sees=EVERYTHING, max_size=1)
    async with database.transaction() as connection:
        _, key = await create_key(connection, PEPPER, None)
    await database.close()
    return key


@pytest.mark.full
@pytest.mark.parametrize(("method", "path"), OPERATIONS)
def test_every_answer_is_as_documented(world: World, method: str, path: str) -> None:
    operation = SCHEMA[path][method]
    world.restore()
    names = [parameter.name for parameter in operation.path_parameters]
    known = {name: world.known[name] for name in names}
    if path.startswith("/admin/v1/models/"):
        known["name"] = world.known["model"]
    query: dict[str, Any] = {}
    if any(parameter.name == "tenant" for parameter in operation.query):
        query = {"query": {"tenant": world.known["tenant"]}}
    cases = st.one_of(
        # What is there, on no condition; the others seldom meet it.
        operation.as_strategy(GenerationMode.POSITIVE, path_parameters=known, headers={}, **query),
        operation.as_strategy(GenerationMode.POSITIVE, path_parameters=known),
        operation.as_strategy(GenerationMode.POSITIVE),
        operation.as_strategy(GenerationMode.NEGATIVE),
    )

    @settings(
        max_examples=EXAMPLES,
        derandomize=True,
        database=None,
        deadline=None,
        suppress_health_check=list(HealthCheck),
    )
    @given(case=cases)
    def send(case: Any) -> None:
        answer = case.call(base_url=world.url, session=world.session, headers=world.headers)
        excluded = list(EXCLUDED)
        sent = dict(parse_qsl(urlsplit(answer.request.url).query, keep_blank_values=True))
        if not set(case.query or {}) <= sent.keys():
            # What makes it wrong, such as a parameter that is an empty list, was not sent.
            excluded.append(checks.negative_data_rejection)
        if path.startswith("/v1/organization/"):
            # Lists of ids: in a query any value is a list of one.
            excluded.append(checks.negative_data_rejection)
        case.validate_response(answer, headers=world.headers, excluded_checks=excluded)

    send()
