"""One database for the leases of all tests: it has what the last test left, which the next
deletes."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator

import pytest

from tests.gateway.faulty_renewal import FaultyRenewal, opened_renewal
from tests.postgres import fresh_database


@pytest.fixture(scope="session")
def lease_dsn() -> Iterator[str]:
    with fresh_database() as dsn:
        yield dsn


@pytest.fixture
async def renewal(lease_dsn: str) -> AsyncIterator[FaultyRenewal]:
    async with opened_renewal(lease_dsn) as renewal:
        yield renewal
