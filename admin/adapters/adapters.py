"""Adapters of tenants by name. Versions and aliases are in other modules."""

from __future__ import annotations

from collections.abc import Collection
from datetime import datetime

import msgspec

from store.database import Connection
from store.errors import NotFound
from store.queries import fetch_all, fetch_one, sql
from store.records import Tenant

HEARD_S = 5.0
"""Seconds after which a worker's report is no longer used."""


class AdapterFields(msgspec.Struct, frozen=True):
    name: str
    tenant: str
    """Name of the tenant."""
    created_at: datetime
    aliases: dict[str, int]
    """Version that each alias points to. For a canary, this is the stable version."""
    canaries: dict[str, dict[int, int]]
    """Weight of each version, for each alias with a canary."""
    pinned: list[str]


class TierView(msgspec.Struct, frozen=True):
    worker: str
    tier: str
    """Tier of the adapter: device, host, or loading."""


class VersionTierView(TierView, frozen=True):
    version: int


class AdapterSummaryView(AdapterFields, frozen=True):
    """List entry of an adapter."""

    states: dict[str, int]
    """Number of versions in each state."""
    last_state: str
    """State of the newest version."""
    tiers: list[VersionTierView]
    """Tier, on each worker, of each version that an alias points to. Empty unless the caller has an
    admin key."""
    object: str = "adapter.summary"


async def list_adapters(
    connection: Connection, tenant: Tenant | None, after: str, limit: int
) -> list[AdapterSummaryView]:
    """Returns up to `limit` adapters by name, beginning after the name `after`. If `tenant` is
    None, returns adapters of all tenants, by tenant and name, and `after` is TENANT/NAME."""
    owner, _, name = after.rpartition("/")
    args = (tenant.id, tenant.name, name) if tenant else (None, owner, name)
    return await fetch_all(
        connection, AdapterSummaryView, "adapter_list", *args, limit, None, HEARD_S
    )


async def content_names(connection: Connection, digests: Collection[str]) -> dict[str, list[str]]:
    """Returns a map from each content digest to the names (TENANT/NAME@VERSION) of the ready
    versions that have this content."""
    names: dict[str, list[str]] = {digest: [] for digest in digests}
    for row in await connection.fetch(sql["content_names"], list(digests)):
        names[row["digest"]].append(row["name"])
    return names


async def find_adapter(connection: Connection, tenant_id: str, name: str) -> AdapterFields:
    """Returns an adapter by name. Raises NotFound."""
    missing = NotFound(f"no adapter {name[:128]!r}", "adapter_not_found")
    args = tenant_id, "", "", 1, name, HEARD_S
    return await fetch_one(connection, AdapterFields, "adapter_list", *args, missing=missing)
