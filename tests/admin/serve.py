"""Admin planes that a test serves in its own loop or starts as processes."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import httpx

from adapters.store.folder import LocalStore
from admin.app import create_app
from admin.http.plane import AdminConfig
from admin.keys.keys import create_key
from store.database import EVERYTHING, Database
from tests.plane import Plane, product

PEPPER = b"pepper of the tests"
PATH = "/admin/v1"
CONFIG = AdminConfig(pepper=PEPPER)


def bearing(url: str, key: str) -> httpx.AsyncClient:
    headers = {"authorization": f"Bearer {key}"}
    return httpx.AsyncClient(base_url=url, headers=headers, timeout=60)


async def admin_key(database: Database, pepper: bytes = PEPPER) -> str:
    async with database.transaction(EVERYTHING) as connection:
        _, text = await create_key(connection, pepper, None)
    return text


@asynccontextmanager
async def administration(
    database: Database,
    store: Path | LocalStore,
    config: AdminConfig = CONFIG,
    *,
    has_upkeep: bool = True,
) -> AsyncIterator[httpx.AsyncClient]:
    """Serves an admin plane and yields an administrator's client of it. has_upkeep: it also does
    what is done between requests."""
    key = await admin_key(database, config.pepper)
    store = LocalStore(store) if isinstance(store, Path) else store
    app = create_app(config, database=database, store=store)
    plane = app.state.admin
    upkeep = [asyncio.create_task(plane.run())] if has_upkeep else []
    try:
        async with Plane(app) as served, served.new_client(key, PATH) as client:
            yield client
    finally:
        for task in upkeep:
            task.cancel()
        await asyncio.gather(*upkeep, return_exceptions=True)
        await plane.validation.close()


def admin_process(folder: Path, dsn: str, store: Path) -> Plane:
    """Returns `loraplex admin`, which leaves no disk to others and gives each tenant as much as it
    wants. folder: of its log and data."""
    return product(
        "admin",
        folder=folder,
        database_url=dsn,
        store=store,
        key_pepper=PEPPER.decode(),
        min_free_disk=0,
        default_tenant_quota=f"adapter_bytes={1 << 40}",
    )
