"""Renewals of leases in a real Postgres, which a test may cut off from its gateways."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import asyncpg

from gateway.limits.lease_book import LeaseRequest, LeaseResponse
from gateway.limits.leases import PostgresLeaseRenewal
from gateway.limits.quota import Key
from gateway.quota_types import Limit
from store.database import EVERYTHING, Database
from store.errors import DatabaseUnavailable

TENANT = "ten_acme00000000"


class FaultyRenewal(PostgresLeaseRenewal):
    is_away = False
    cut_off = ""
    """The only gateway that the database does not answer."""
    delay_s = 0.0
    is_deaf = False
    """The database does what it is asked, and its answer is lost."""
    num_renewals = 0
    """Those that have ended."""

    def __init__(self, database: Database) -> None:
        super().__init__(database, lifetime_s=300)
        self.database = database

    async def renew(
        self, holder: str, number: int, requests: list[LeaseRequest]
    ) -> list[LeaseResponse] | None:
        await asyncio.sleep(self.delay_s)
        try:
            if self.is_away or holder == self.cut_off:
                raise DatabaseUnavailable("it does not answer this one")
            answers = await super().renew(holder, number, requests)
        finally:
            self.num_renewals += 1
        if self.is_deaf:
            raise DatabaseUnavailable("its answer is lost")
        return answers

    async def set(self, limit: Limit) -> None:
        async with self.database.acquire() as connection:
            await connection.execute(
                f"INSERT INTO quotas (subject, tenant_id, {limit.kind.value}) VALUES ($1, $1, $2)"
                f" ON CONFLICT (subject) DO UPDATE SET {limit.kind.value} = $2",
                *(limit.subject, limit.amount),
            )

    async def held(self, key: Key) -> int:
        async with self.database.acquire() as connection:
            return await connection.fetchval(
                "SELECT coalesce(sum(granted), 0)::bigint FROM quota_leases"
                " WHERE (subject, kind, start) = ($1, $2, $3::text::timestamptz)",
                *key,
            )


@asynccontextmanager
async def opened_renewal(dsn: str) -> AsyncIterator[FaultyRenewal]:
    """Opens a database in which `TENANT` has no limits, and nothing is held of any."""
    owner: Any = await asyncpg.connect(dsn)
    await owner.execute("TRUNCATE quota_leases, quotas, usage_totals")
    await owner.execute("DELETE FROM quota_holders WHERE gateway_id <> ''")
    await owner.execute(
        "INSERT INTO tenants (id, name) VALUES ($1, 'acme') ON CONFLICT DO NOTHING", TENANT
    )
    await owner.close()
    database = await Database.connect(dsn, sees=EVERYTHING)
    yield FaultyRenewal(database)
    await database.close()
