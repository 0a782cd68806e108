"""Adapters as names: what a tenant has. Their versions and aliases have modules of their own."""

from __future__ import annotations

from collections.abc import Collection
from datetime import datetime

import msgspec

from admin.database import Connection
from admin.errors import NotFound
from admin.queries import fetch_all, fetch_one, sql

HEARD_S = 5.0
"""What a worker said longer ago is not told."""


class Adapter(msgspec.Struct, frozen=True):
    name: str
    created_at: datetime
    tenant: str
    """Its name."""
    aliases: dict[str, int]
    """Alias to version; of a canary set the stable one."""
    pinned: list[str]
    """Aliases."""
    canaries: dict[str, dict[int, int]]
    """Alias to version to weight, of those that split requests."""
    contents: dict[int, str]
    """The digest of each version that an alias points to."""
    states: dict[str, int]
    """Number of versions in each state."""
    last_state: str
    """State of the newest version."""


class ContentTier(msgspec.Struct, frozen=True):
    """Where a worker has a content: device, host, or loading on its way there."""

    digest: str
    worker: str
    tier: str


async def list_adapters(
    connection: Connection, tenant_id: str | None, after: tuple[str, str], limit: int
) -> list[Adapter]:
    """By tenant and name, in one query; None: those of all tenants."""
    return await fetch_all(connection, Adapter, "adapter_list", tenant_id, *after, limit, None)


async def content_tiers(connection: Connection, digests: Collection[str]) -> list[ContentTier]:
    """By worker, of those that are heard of and that the connection sees."""
    return await fetch_all(connection, ContentTier, "content_tiers", list(digests), HEARD_S)


async def content_names(connection: Connection, digests: Collection[str]) -> dict[str, list[str]]:
    """TENANT/NAME@VERSION of the versions with each content."""
    names: dict[str, list[str]] = {digest: [] for digest in digests}
    for row in await connection.fetch(sql["content_names"], list(digests)):
        names[row["digest"]].append(row["name"])
    return names


async def find_adapter(connection: Connection, tenant_id: str, name: str) -> Adapter:
    """Raises NotFound."""
    missing = NotFound(f"no adapter {name[:128]!r}", "adapter_not_found")
    args = tenant_id, "", "", 1, name
    return await fetch_one(connection, Adapter, "adapter_list", *args, missing=missing)
