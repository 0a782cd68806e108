"""Adapters as names: what a tenant has. Their versions and aliases have modules of their own."""

from __future__ import annotations

from datetime import datetime

import msgspec

from admin.database import Connection
from admin.errors import NotFound
from admin.queries import from_row, sql


class Adapter(msgspec.Struct, frozen=True):
    name: str
    created_at: datetime


class AdapterSummary(Adapter, frozen=True):
    """A line of a listing."""

    aliases: dict[str, int]
    """Alias to version; of a canary set the stable one."""
    states: dict[str, int]
    """Number of versions in each state."""
    last_state: str
    """Of the newest version."""


async def list_adapters(
    connection: Connection, tenant_id: str, after: str, limit: int
) -> list[AdapterSummary]:
    """By name, in one query."""
    rows = await connection.fetch(sql["adapter_list"], tenant_id, after, limit)
    return [from_row(AdapterSummary, row) for row in rows]


async def find_adapter(connection: Connection, tenant_id: str, name: str) -> Adapter:
    """Raises NotFound."""
    row = await connection.fetchrow(sql["adapter_find"], tenant_id, name)
    if row is None:
        raise NotFound(f"no adapter {name[:128]!r}", "adapter_not_found")
    return from_row(Adapter, row)
