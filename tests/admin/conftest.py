"""A fresh database for each test of the Postgres plane."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator

import pytest

from admin.database import Database
from tests.postgres import fresh_database


@pytest.fixture
def dsn() -> Iterator[str]:
    with fresh_database() as dsn:
        yield dsn


@pytest.fixture
def empty_dsn() -> Iterator[str]:
    """Without any schema."""
    with fresh_database(migrated=False) as dsn:
        yield dsn


@pytest.fixture
async def database(dsn: str) -> AsyncIterator[Database]:
    database = await Database.connect(dsn)
    yield database
    await database.close()
