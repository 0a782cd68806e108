"""The catalog follows a real Postgres."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable

import pytest

from adapters.manifest import BaseModelShape
from admin import models, tenants
from admin.database import Database
from admin.records import TENANT_SCOPES
from gateway.auth import authenticate, authorize
from gateway.catalog import Catalog, CatalogView
from gateway.errors import Unauthenticated
from gateway.source import PostgresSource
from tests.doubles import SIZES
from tests.gateway.service import DIGEST, PEPPER
from tests.postgres import fresh_database

SHAPE = BaseModelShape.from_config({**SIZES, "model_type": "llama"}, DIGEST)


@pytest.fixture
async def database() -> AsyncIterator[Database]:
    with fresh_database() as dsn:
        database = await Database.connect(dsn)
        yield database
        await database.close()


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
        key, text = await tenants.create_key(connection, PEPPER, tenant.id, TENANT_SCOPES)
    view = await until(catalog, lambda view: key.id in view.keys)
    caller = authorize(view, authenticate(view, PEPPER, f"Bearer {text}"), "inference")
    assert caller.tenant.name == "acme"
    assert view.resolve(caller.tenant, "tiny").base.digest == DIGEST
    before = view.generation
    async with database.transaction() as connection:
        await tenants.revoke_key(connection, key.id)
    view = await until(catalog, lambda view: view.generation > before)
    with pytest.raises(Unauthenticated):
        authenticate(view, PEPPER, f"Bearer {text}")
    running.cancel()
