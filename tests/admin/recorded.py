"""Answers of the admin plane and of its commands as they were recorded: each route, called by an
administrator, by the tenant whose things it names, and by another tenant.

`python -m tools.record_admin` writes `recorded.json.gz` anew after a change that is meant;
`test_recorded.py` compares.
"""

from __future__ import annotations

import asyncio
import gzip
import random
import re
import secrets
import shutil
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, cast
from unittest import mock

import httpx
import msgspec
from anyio.from_thread import BlockingPortal, start_blocking_portal
from click.testing import CliRunner
from litestar import Litestar

from adapters.store.folder import LocalStore
from admin.app import create_app
from admin.http.plane import AdminPlane
from loraplex.cli import cli
from store.database import EVERYTHING, Database
from store.records import ADMIN_SCOPES, TENANT_SCOPES
from tests.admin.calls import ABSENT, ROUTES, Furnished, Route, furnish
from tests.admin.conftest import CONFIG, Plane
from tests.admin.serve import admin_key
from tests.plane import Plane as Server
from tests.postgres import fresh_database, server

RECORD = Path(__file__).with_name("recorded.json.gz")
VARYING = (
    # Times of usage, in March, are given.
    (re.compile(r"(?!2026-03-0)\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d(\.\d+)?(Z|\+00:00)"), "TIME"),
    (re.compile(r"\breq_[0-9a-f]{32}"), "REQUEST"),
    (re.compile(r'("hash": ?)"[0-9a-f]{64}"'), r'\1"HASH"'),
    (re.compile(r'"(start_time|end_time)":\d+'), r'"\1":0'),
    (re.compile(r"^(\d+):[0-9a-f]{64}", re.MULTILINE), r"\1:HASH"),
    (re.compile(r"http://127.0.0.1:\d+"), "URL"),
)
UNRECORDED = {"date", "content-length", "server-timing", "x-request-id"}
READING = """
tenant list
tenant show acme
key list
key list --tenant acme
model list
model show tiny
model show none
quota show --tenant acme
quota show --key KEY
quota show
price list
signing-key list --tenant acme
workers list
workers show worker-1
workers show none
adapter list
adapter list --tenant acme
adapter show bot --tenant acme
adapter show bot@3 --tenant acme
adapter rejected --tenant acme
adapter history bot --alias staging --tenant acme
usage --since 2026-03-05 --end 2026-03-06
usage credits
audit list --tenant acme --limit 3
audit verify
""".strip().splitlines()
"""Commands that only read. KEY and SIGNING_KEY stand for ids."""
CHANGING = """
tenant create initech --sharing-group family
tenant create acme
tenant change acme --sharing-group family --require-signature
tenant change acme --sharing-group=
tenant change acme
tenant delete acme --yes
tenant delete nobody --yes
key create --tenant acme --name ci --scope inference --model bot --cidr 10.0.0.0/8
key create --admin
key rotate KEY --overlap 60
key revoke KEY
key revoke none
model load spare
model unload spare
model pin spare
model unpin spare
model delete spare --yes
model delete tiny --yes
quota set --tenant acme --requests-per-minute 7 --spend-per-month 2.50 --class interactive
quota set --tenant acme --spend-per-day none
quota set --key KEY --tokens-per-day 8
quota set --key KEY --adapters 8
quota clear --tenant acme
quota clear --key KEY
price set tiny --input 0.20 --output 0.60
price set none --input 0.20 --output 0.60
price remove tiny
price remove none
signing-key revoke SIGNING_KEY --tenant acme
signing-key revoke none --tenant acme
workers drain worker-1
workers undrain worker-1
adapter promote bot@2 --tenant acme
adapter canary bot@2 --weight 10 --tenant acme
adapter rollback bot@staging --tenant acme
adapter pin bot --tenant acme
adapter unpin bot@staging --tenant acme
adapter unalias bot@staging --yes --tenant acme
adapter approve bot@3 --tenant acme
adapter delete bot@3 --yes --tenant acme
adapter delete bot --yes --tenant acme
usage credit tiny --input 0 --output 0 --since 2026-03-05 --end 2026-03-06 --reason free --id c2
""".strip().splitlines()


class Answer(msgspec.Struct):
    status: int
    headers: dict[str, str]
    body: str


class Recorded(msgspec.Struct):
    answers: dict[str, dict[str, Answer]]
    """Answers to each route's calls by each caller."""
    logged: dict[str, list[str]]
    """What the audit log says of changes by a route's calls by a caller."""
    printed: dict[str, str]
    """What each command prints, as text and as JSON."""


class Recorder:
    """Plane with furnished copies of its database and store, each used by one caller of a route."""

    furnished: Furnished

    def __init__(self, app: Litestar, url: str, dsn: str, store: Path) -> None:
        self.app, self.url, self.dsn, self.store = app, url, dsn, store

    @asynccontextmanager
    async def plane(self, dsn: str, store: Path) -> AsyncIterator[Plane]:
        own, database = await Database.connect(dsn), await Database.connect(dsn, sees=EVERYTHING)
        self.app.state.admin = AdminPlane(CONFIG, own, LocalStore(store))
        try:
            yield Plane(f"{self.url}/admin/v1", database, store, [])
        finally:
            await self.app.state.admin.validation.close()
            await own.close()
            await database.close()

    @asynccontextmanager
    async def copy(self) -> AsyncIterator[Plane]:
        """Yields a plane as it was furnished, in which ids are drawn in the same order."""
        store = self.store.with_name("copy")
        with fresh_database(copied=self.dsn) as dsn:
            shutil.copytree(self.store, store)
            try:
                with drawn_alike(2):
                    async with self.plane(dsn, store) as plane:
                        yield plane
            finally:
                shutil.rmtree(store)

    @property
    def callers(self) -> dict[str, httpx.AsyncClient]:
        known = self.furnished
        return {
            "administrator": known.plane.client,
            "tenant": known.owner,
            "stranger": known.stranger,
        }


@contextmanager
def drawn_alike(seed: int) -> Iterator[None]:
    """Lets the same ids and keys be drawn in each run."""
    drawn = random.Random(seed)
    with (
        mock.patch.object(secrets, "token_bytes", drawn.randbytes),
        mock.patch.object(secrets, "choice", drawn.choice),
    ):
        yield


@asynccontextmanager
async def recorder(folder: Path) -> AsyncIterator[Recorder]:
    app = create_app(CONFIG, database=cast("Database", None), store=LocalStore(folder / "none"))
    async with Server(app) as served:
        with fresh_database() as dsn, drawn_alike(1):
            made = Recorder(app, served.url, dsn, folder / "store")
            async with made.plane(dsn, made.store) as plane:
                plane.bearing(await admin_key(plane.database))
                made.furnished = await furnish(plane)
            yield made
            for client in plane.clients:
                await client.aclose()


@contextmanager
def recorder_on_thread(folder: Path) -> Iterator[tuple[BlockingPortal, Recorder]]:
    """Yields a recorder that runs on a thread of its own, and the portal to call it."""
    server()  # It would end with the thread that first needs it.
    with (
        start_blocking_portal() as portal,
        portal.wrap_async_context_manager(recorder(folder)) as made,
    ):
        yield portal, made


async def recorded_now(folder: Path) -> Recorded:
    """Returns what the present code answers. Calls and commands that change nothing share a copy,
    and each other one has its own."""
    found = Recorded({}, {}, {})
    async with recorder(folder) as made:

        async def ask(route: Route, who: str, plane: Plane) -> None:
            before = await _newest(plane.database)
            calls = await _answers(route, made.callers[who], made.url, made.furnished)
            found.answers[f"{route.name} by {who}"] = calls
            if actions := await _actions(plane.database, before):
                found.logged[f"{route.name} by {who}"] = actions

        async def enter(command: str, *forms: str) -> None:
            for form in forms:
                words = f"{command} {form}".strip()
                said = await asyncio.to_thread(_print, words, made.url, made.furnished)
                found.printed[words] = said

        pairs = [(route, who) for route in ROUTES for who in made.callers]
        async with made.copy() as plane:
            for route, who in pairs:
                if not _changes(route, who):
                    await ask(route, who, plane)
            for command in READING:
                # The width of the column with an entry's details varies.
                is_table = " list" in command and not command.startswith("audit")
                await enter(command, "", "--json", *(["--wide"] if is_table else []))
            assert not found.logged
        for route, who in pairs:
            if _changes(route, who):
                async with made.copy() as plane:
                    await ask(route, who, plane)
        for command in CHANGING:
            for form in ("", "--json"):
                async with made.copy():
                    await enter(command, form)
    return found


def _changes(route: Route, who: str) -> bool:
    """Returns whether a caller may change something by a route. A tenant has keys of all its
    scopes."""
    scopes = ADMIN_SCOPES if who == "administrator" else TENANT_SCOPES
    return route.method != "GET" and not route.scopes.isdisjoint(scopes)


async def _answers(
    route: Route, client: httpx.AsyncClient, url: str, furnished: Furnished
) -> dict[str, Answer]:
    """Makes the calls of a route that are refused, and then those that succeed."""
    found: dict[str, Answer] = {}
    is_admin = client is furnished.plane.client
    path, known = route.request(furnished.values, is_named=is_admin)

    async def call(name: str, path: str = path, **changes: Any) -> None:
        headers = dict(known.get("headers") or {}) | changes.pop("headers", {})
        answer = await client.request(
            route.method, url + path, **(known | changes | {"headers": headers})
        )
        kept = {k: _same(v) for k, v in sorted(answer.headers.items()) if k not in UNRECORDED}
        if "etag" in kept:
            kept["etag"] = "ETAG"
        is_document = answer.is_success and route.path.startswith("/admin/v1/schema")
        body = "DOCUMENT" if is_document else _same(answer.text)
        found[name] = Answer(answer.status_code, kept, body)

    absent, named = route.request(ABSENT, is_named=is_admin)
    if absent != path or named["params"] != known["params"]:
        await call("absent", absent, params=named["params"])
    await call("unknown parameter", params=known["params"] | {"no_such": "1"})
    if (body := route.body) is not None:
        await call("unknown field", json={**body, "no_such": 1})
        await call("no field", json={})
        await call("no JSON", json=None, content=b"{")
    if route.takes("query", "limit"):
        await call("no limit", params=known["params"] | {"limit": 0})
        await call("page", params=known["params"] | {"limit": 1})
    if route.method != "GET":
        await call("stale", headers={"if-match": '"nothing"'})
    once = {"idempotency-key": "once"}
    await call("done", headers=once)
    await call("repeated", headers=once)
    if route.takes("header", "Idempotency-Key"):
        await call("other body", json={**(route.body or {}), "name": "other"}, headers=once)
        await call("again")
    return found


def _print(command: str, url: str, furnished: Furnished) -> str:
    """Returns what a command prints, and the words of its failure."""
    known = furnished.values
    names = {"KEY": known["key_id"], "SIGNING_KEY": known["signing_key_id"]}
    admin_key = furnished.plane.client.headers["authorization"].removeprefix("Bearer ")
    environment = {
        "LORAPLEX_URL": url,
        "LORAPLEX_KEY": admin_key,
        "LORAPLEX_DATA_DIR": "/nonexistent",
    }
    arguments = [names.get(part, part) for part in command.split()]
    # Ages are whole days, whatever the time that the record takes.
    with mock.patch("loraplex.output.datetime") as clock:
        clock.now.return_value = datetime.now(UTC) + timedelta(days=3, hours=1)
        done = CliRunner().invoke(cli, arguments, env=environment)
    failed = "" if isinstance(done.exception, SystemExit | None) else f"{done.exception}\n"
    return _same(done.stdout + failed)


def _same(text: str) -> str:
    """Returns the text without what differs from run to run."""
    for pattern, name in VARYING:
        text = pattern.sub(name, text)
    return text


async def _newest(database: Database) -> int:
    async with database.acquire() as connection:
        return await connection.fetchval("SELECT max(seq) FROM audit_log")


async def _actions(database: Database, after: int) -> list[str]:
    """Returns what the audit log says of later changes."""
    query = "SELECT action, object, key_id FROM audit_log WHERE seq > $1 ORDER BY seq"
    async with database.acquire() as connection:
        return [_same(" ".join(entry.values())) for entry in await connection.fetch(query, after)]


def read() -> Recorded:
    return msgspec.json.decode(gzip.decompress(RECORD.read_bytes()), type=Recorded)


def write(record: Recorded) -> None:
    text = msgspec.json.format(msgspec.json.encode(record, order="sorted"))
    RECORD.write_bytes(gzip.compress(text, mtime=0))
