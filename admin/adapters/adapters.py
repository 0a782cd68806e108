"""Adapters of tenants by name. Versions and aliases are in other modules."""

from __future__ import annotations

from collections.abc import Collection
from datetime import datetime

import msgspec

from store.database import Connection
from store.errors import NotFound
from store.queries import fetch_all, fetch_one, sql

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
    """Names of the pinned aliases."""


class Adapter(AdapterFields, frozen=True):
    contents: dict[int, str]
    """Digest of the content of each version that an alias points to."""
    states: dict[str, int]
    """Number of versions in each state."""
    last_state: str
    """State of the newest version."""


class TierView(msgspec.Struct, frozen=True):
    worker: str
    tier: str
    """Tier of the adapter: device, host, or loading."""


class ContentTier(TierView, frozen=True):
    """Location of a content on a worker."""

    digest: str


async def list_adapters(
    connection: Connection, tenant_id: str | None, after: tuple[str, str], limit: int
) -> list[Adapter]:
    """Returns adapters by tenant and name in one query. `tenant_id` None selects all tenants."""
    return await fetch_all(connection, Adapter, "adapter_list", tenant_id, *after, limit, None)


async def content_tiers(connection: Connection, digests: Collection[str]) -> list[ContentTier]:
    """Returns where workers have these contents, from recent reports that the connection may
    see."""
    return await fetch_all(connection, ContentTier, "content_tiers", list(digests), HEARD_S)


async def content_names(connection: Connection, digests: Collection[str]) -> dict[str, list[str]]:
    """Returns for each content the names of its versions, in the form TENANT/NAME@VERSION."""
    names: dict[str, list[str]] = {digest: [] for digest in digests}
    for row in await connection.fetch(sql["content_names"], list(digests)):
        names[row["digest"]].append(row["name"])
    return names


async def find_adapter(connection: Connection, tenant_id: str, name: str) -> Adapter:
    """Returns an adapter by name. Raises NotFound."""
    missing = NotFound(f"no adapter {name[:128]!r}", "adapter_not_found")
    args = tenant_id, "", "", 1, name
    return await fetch_one(connection, Adapter, "adapter_list", *args, missing=missing)
