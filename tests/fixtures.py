"""Fixtures that tests of several folders have: fresh databases, and no collector of cycles."""

from __future__ import annotations

import gc
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from store.database import Database
    from tests.proxy import PostgresProxy

# Modules that speak to Postgres are imported where they are used: tests of kernels also run on GPU
# machines that have no driver of Postgres.


@pytest.fixture
def dsn() -> Iterator[str]:
    from tests.postgres import fresh_database

    with fresh_database() as dsn:
        yield dsn


@pytest.fixture
def empty_dsn() -> Iterator[str]:
    """Without any schema."""
    from tests.postgres import fresh_database

    with fresh_database(migrated=False) as dsn:
        yield dsn


@pytest.fixture
async def database(dsn: str) -> AsyncIterator[Database]:
    """Sees everything, as a gateway does."""
    from store.database import EVERYTHING, Database

    database = await Database.connect(dsn, sees=EVERYTHING)
    yield database
    await database.close()


@pytest.fixture
async def owner(dsn: str) -> AsyncIterator[Database]:
    """May do what nobody of ours can."""
    from store.database import Database

    database = await Database.connect(dsn, role=None, max_size=2)
    yield database
    await database.close()


@pytest.fixture
async def proxy(dsn: str, tmp_path: Path) -> AsyncIterator[PostgresProxy]:
    from tests.proxy import PostgresProxy

    async with PostgresProxy(dsn, tmp_path / "proxy") as proxy:
        yield proxy


@pytest.fixture
def without_collector() -> Iterator[None]:
    gc.collect()
    gc.disable()
    yield
    gc.enable()
