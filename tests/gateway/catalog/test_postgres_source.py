"""The catalog follows a real Postgres."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any, NoReturn

import asyncpg
import pytest

from adapters.manifest import BaseModelShape
from admin.adapters import aliases
from admin.keys import keys
from admin.models import models
from admin.tenants import tenants
from gateway.catalog.catalog import (
    LOAD_INTERVAL_S,
    Catalog,
    PostgresSource,
    authenticate,
    authorize,
)
from gateway.catalog.view import CatalogView
from loraplex.roles.bootstrap import migrate_database
from store.database import EVERYTHING, Database
from store.errors import DatabaseUnavailable
from store.records import TENANT_SCOPES, CatalogSnapshot, Tenant
from tests.doubles import SIZES
from tests.gateway.live import Live
from tests.gateway.pepper import PEPPER
from tests.gateway.service import DIGEST
from tests.postgres import own_server
from web.errors import Unauthenticated

SHAPE = BaseModelShape.from_config({**SIZES, "model_type": "llama"}, DIGEST)


async def until(catalog: Catalog, condition: Callable[[CatalogView], bool]) -> CatalogView:
    async with asyncio.timeout(20):
        while catalog.view is None or not condition(catalog.view):
            await asyncio.sleep(0.01)
    return catalog.view


async def test_keys_and_models_as_they_change(database: Database) -> None:
    """By notification alone: the poll would come too late."""
    catalog = Catalog(PostgresSource(database, poll_interval_s=3600))
    running = asyncio.create_task(catalog.run())
    await until(catalog, lambda view: not view.tenants)
    async with database.transaction() as connection:
        tenant = await tenants.create_tenant(connection, "acme")
        await models.register_model(connection, "tiny", SHAPE, 512)
        key, text = await keys.create_key(connection, PEPPER, tenant.id, TENANT_SCOPES)
    view = await until(catalog, lambda view: key.id in view.keys)
    caller = authorize(
        view, authenticate(view, PEPPER, f"Bearer {text}", datetime.now(UTC)), "inference"
    )
    assert caller.tenant.name == "acme"
    assert view.resolve(caller.tenant, "tiny").base.digest == DIGEST
    before = view.generation
    async with database.transaction() as connection:
        await keys.revoke_key(connection, key.id)
    view = await until(catalog, lambda view: view.generation > before)
    with pytest.raises(Unauthenticated):
        authenticate(view, PEPPER, f"Bearer {text}", datetime.now(UTC))
    running.cancel()


async def test_many_changes_are_loaded_together(database: Database) -> None:
    """The first at once, then few loads however many changes, and the last is not missed."""
    snapshots: list[CatalogSnapshot] = []

    async def follow() -> None:
        async for snapshot in PostgresSource(database, poll_interval_s=3600).snapshots():
            snapshots.append(snapshot)

    following = asyncio.create_task(follow())
    async with asyncio.timeout(20):
        while not snapshots:
            await asyncio.sleep(0.01)
        began = time.monotonic()
        for i in range(100):
            async with database.transaction() as connection:
                await tenants.create_tenant(connection, f"tenant-{i}")
        took_s = time.monotonic() - began
        while sum(len(snapshot.tenants) for snapshot in snapshots) < 100:
            await asyncio.sleep(0.01)
    assert len(snapshots) <= 3 + took_s / LOAD_INTERVAL_S
    following.cancel()


async def test_all_is_loaded_of_a_server_that_was_started_anew() -> None:
    """It may be another, or have been set back: what changed there is in no list of changes."""
    with own_server() as postgres:
        await migrate_database(postgres.dsn())
        database = await Database.connect(postgres.dsn(), sees=EVERYTHING)
        async with database.transaction() as connection:
            for name in ("acme", "globex"):
                await tenants.create_tenant(connection, name)
        catalog = Catalog(PostgresSource(database, poll_interval_s=0.1))
        running = asyncio.create_task(catalog.run())
        await until(catalog, lambda view: len(view.tenants) == 2)
        await asyncio.to_thread(postgres.stop)
        await asyncio.to_thread(postgres.start)
        connection = await asyncpg.connect(postgres.dsn())
        await connection.execute(SET_BACK)
        await connection.close()
        view = await until(catalog, lambda view: view.generation > 1000)
        assert {tenant.name for tenant in view.tenants.values()} == {"other", "globex"}
        running.cancel()
        await database.close()


class AwayAtFirst:
    """A database whose first connection cannot be had."""

    def __init__(self, database: Database) -> None:
        self.listen = database.listen
        self.acquire = self.away
        self._database = database

    def away(self) -> NoReturn:
        self.acquire = self._database.acquire
        raise DatabaseUnavailable("away")


async def test_a_database_that_was_away_is_looked_at_again_soon(database: Database) -> None:
    """However rarely it is polled while it answers."""
    away: Any = AwayAtFirst(database)
    source = PostgresSource(away, poll_interval_s=3600)
    catalog = Catalog(source)
    running = asyncio.create_task(catalog.run())
    await until(catalog, lambda view: not view.tenants)
    assert away.acquire == database.acquire and source.unconfirmed_s == 0.0
    running.cancel()


async def test_what_was_just_made_ready_is_found_at_once(live: Live) -> None:
    """Whoever was told that it is ready may call it, however many changes are on their way."""
    await live.make_ready("a", "b")
    async with live.worker, live.gateway() as plane:
        for i in range(8):
            async with live.database.transaction() as connection:
                alias = (live.tenant_id, "bot", f"a{i}")
                await aliases.set_alias(connection, *alias, 1 + i % 2)
            answer = await plane.complete(f"bot@a{i}")
            assert answer.headers["loraplex-adapter-version"] == str(1 + i % 2)
            assert (await plane.complete(f"bot@b{i}")).status_code == 404


async def test_a_catalog_of_thousands_is_seen_within_a_second(database: Database) -> None:
    """2,000 versions, proofs and aliases: measured 27 ms a load, 17 of them on the loop."""
    async with database.transaction() as connection:
        await models.register_model(connection, "tiny", SHAPE, 512)
        tenant = await tenants.create_tenant(connection, "acme")
        for statement in MANY:
            await connection.execute(statement, tenant.id)
    catalog = Catalog(PostgresSource(database, poll_interval_s=3600))
    running = asyncio.create_task(catalog.run())
    await until(catalog, lambda view: len(view.names(tenant)) == 2001)
    for number in (2, 1, 2):
        began = time.monotonic()
        async with database.transaction() as connection:
            await connection.execute(
                "UPDATE aliases SET version = $1 WHERE (name, alias) = ('a7', 'v1')", number
            )
        await until(catalog, lambda view: _version(view, tenant, "a7@v1") == number)  # noqa: B023
        assert time.monotonic() - began < 10
    running.cancel()


SET_BACK = """
SET session_replication_role = replica;
UPDATE tenants SET name = 'other' WHERE name = 'acme';
UPDATE catalog_generation SET generation = 1001;
"""
"""As no trigger sees it."""


def _version(view: CatalogView, tenant: Tenant, name: str) -> int:
    version = view.resolve(tenant, name).version
    assert version is not None and version.invocation_tokens == (1,)
    return version.version


MANY = (
    "INSERT INTO adapters (tenant_id, name, last_version)"
    " SELECT $1, 'a' || i, 2 FROM generate_series(1, 1000) i",
    "INSERT INTO adapter_versions (tenant_id, name, version, state, digest, base_name, manifest)"
    " SELECT $1, 'a' || i, n, 'ready', md5(i || '/' || n) || md5(n || '/' || i), 'tiny',"
    " '{\"invocation_tokens\": [1]}' FROM generate_series(1, 1000) i, generate_series(1, 2) n",
    "INSERT INTO aliases (tenant_id, name, alias, version)"
    " SELECT tenant_id, name, 'v' || version, version FROM adapter_versions WHERE tenant_id = $1",
    "INSERT INTO adapter_proofs (digest, base_digest, layout, checksum, fingerprint, worker)"
    " SELECT digest, digest, 'layout', digest, '{}', 'w' FROM adapter_versions"
    " WHERE tenant_id = $1",
)
