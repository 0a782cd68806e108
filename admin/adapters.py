"""Adapters, their immutable versions and the aliases that point to them.

Every writing function wants a transaction of its caller's. The first write takes the catalog's
lock, so writers follow one another.
"""

from __future__ import annotations

from datetime import datetime
from typing import Any

import msgspec

from adapters.manifest import AdapterManifest
from admin.database import Connection
from admin.errors import Conflict, NotFound
from admin.queries import from_row, sql
from admin.records import AdapterState, AdapterVersion, Alias

PRODUCTION = "prod"
"""The alias a plain name means."""


class Adapter(msgspec.Struct, frozen=True):
    name: str
    created_at: datetime


class AliasMove(msgspec.Struct, frozen=True):
    """One line of an alias's history."""

    version: int
    previous: int | None
    changed_by: str | None
    """Id of the key."""
    changed_at: datetime


async def add_version(
    connection: Connection, tenant_id: str, name: str, base_name: str, manifest: AdapterManifest
) -> tuple[AdapterVersion, bool]:
    """The ready version with this content, and whether it is new.

    The first ready version of an adapter becomes `prod`. Raises AlreadyExists if a base model
    bears the name.
    """
    await connection.execute(sql["adapter_ensure"], tenant_id, name)
    row = await connection.fetchrow(
        sql["version_find_content"], tenant_id, name, base_name, manifest.digest
    )
    if row is not None:
        return from_row(AdapterVersion, row), False
    version = await _insert(
        connection, tenant_id, name, AdapterState.READY, base_name=base_name, manifest=manifest
    )
    if await find_alias(connection, tenant_id, name, PRODUCTION) is None:
        await _point(connection, tenant_id, name, PRODUCTION, version.version, None, None)
    return version, True


async def add_rejected(
    connection: Connection, tenant_id: str, name: str, error: dict[str, Any]
) -> AdapterVersion:
    """All that stays of a refused upload. Raises AlreadyExists as `add_version`."""
    await connection.execute(sql["adapter_ensure"], tenant_id, name)
    return await _insert(connection, tenant_id, name, AdapterState.REJECTED, error=error)


async def _insert(
    connection: Connection,
    tenant_id: str,
    name: str,
    state: AdapterState,
    *,
    base_name: str | None = None,
    manifest: AdapterManifest | None = None,
    error: dict[str, Any] | None = None,
) -> AdapterVersion:
    number = await connection.fetchval(sql["adapter_next_version"], tenant_id, name)
    digest = manifest.digest if manifest else None
    row = await connection.fetchrow(
        sql["version_insert"],
        *(tenant_id, name, number, state, digest, base_name, manifest, error),
    )
    assert row is not None
    return from_row(AdapterVersion, row)


async def list_adapters(
    connection: Connection, tenant_id: str, after: str, limit: int
) -> list[Adapter]:
    rows = await connection.fetch(sql["adapter_list"], tenant_id, after, limit)
    return [from_row(Adapter, row) for row in rows]


async def find_adapter(connection: Connection, tenant_id: str, name: str) -> Adapter:
    """Raises NotFound."""
    row = await connection.fetchrow(sql["adapter_find"], tenant_id, name)
    if row is None:
        raise NotFound(f"no adapter {name[:128]!r}", "adapter_not_found")
    return from_row(Adapter, row)


async def list_versions(connection: Connection, tenant_id: str, name: str) -> list[AdapterVersion]:
    rows = await connection.fetch(sql["version_list"], tenant_id, name)
    return [from_row(AdapterVersion, row) for row in rows]


async def find_version(
    connection: Connection, tenant_id: str, name: str, version: int
) -> AdapterVersion:
    """Raises NotFound."""
    row = await connection.fetchrow(sql["version_find"], tenant_id, name, version)
    if row is None:
        raise NotFound(f"no version {version} of adapter {name[:128]!r}", "version_not_found")
    return from_row(AdapterVersion, row)


async def list_aliases(connection: Connection, tenant_id: str, name: str) -> list[Alias]:
    return [
        from_row(Alias, row) for row in await connection.fetch(sql["alias_list"], tenant_id, name)
    ]


async def find_alias(connection: Connection, tenant_id: str, name: str, alias: str) -> Alias | None:
    row = await connection.fetchrow(sql["alias_find"], tenant_id, name, alias)
    return from_row(Alias, row) if row else None


async def alias_history(
    connection: Connection, tenant_id: str, name: str, alias: str
) -> list[AliasMove]:
    """The last hundred moves, newest first."""
    rows = await connection.fetch(sql["alias_history"], tenant_id, name, alias)
    return [from_row(AliasMove, row) for row in rows]


async def set_alias(
    connection: Connection,
    tenant_id: str,
    name: str,
    alias: str,
    version: int,
    changed_by: str | None = None,
) -> Alias:
    """Points `alias` to a ready version. Raises NotFound, Conflict (not ready), Invalid."""
    await connection.fetchval(sql["catalog_lock"])
    target = await find_version(connection, tenant_id, name, version)
    if target.state is not AdapterState.READY:
        raise Conflict(f"version {version} is {target.state}, not ready", "version_not_ready")
    before = await find_alias(connection, tenant_id, name, alias)
    if before is None or before.version != version:
        previous = before.version if before else None
        await _point(connection, tenant_id, name, alias, version, previous, changed_by)
    return Alias(tenant_id=tenant_id, name=name, alias=alias, version=version)


async def _point(
    connection: Connection,
    tenant_id: str,
    name: str,
    alias: str,
    version: int,
    previous: int | None,
    changed_by: str | None,
) -> None:
    await connection.execute(sql["alias_set"], tenant_id, name, alias, version)
    await connection.execute(
        sql["alias_history_insert"], tenant_id, name, alias, version, previous, changed_by
    )


async def delete_version(
    connection: Connection, tenant_id: str, name: str, version: int
) -> AdapterVersion:
    """Raises NotFound, Conflict (an alias points to it)."""
    await connection.fetchval(sql["catalog_lock"])
    doomed = await find_version(connection, tenant_id, name, version)
    aliases = await list_aliases(connection, tenant_id, name)
    if pointing := [alias.alias for alias in aliases if alias.version == version]:
        raise Conflict(
            f"alias {pointing[0]!r} points to version {version}: promote another one first",
            "version_in_use",
        )
    await connection.execute(sql["version_delete"], tenant_id, name, version)
    return doomed


async def delete_adapter(connection: Connection, tenant_id: str, name: str) -> list[AdapterVersion]:
    """With all versions and aliases. Raises NotFound."""
    await connection.fetchval(sql["catalog_lock"])
    await find_adapter(connection, tenant_id, name)
    versions = await list_versions(connection, tenant_id, name)
    await connection.execute(sql["adapter_delete"], tenant_id, name)
    return versions


async def digests_of_tenant(connection: Connection, tenant_id: str) -> set[str]:
    """Contents of all the tenant's versions; none is added while the caller's transaction lasts."""
    await connection.fetchval(sql["catalog_lock"])
    rows = await connection.fetch(sql["digests_of_tenant"], tenant_id)
    return {row["digest"] for row in rows}


async def unused_digests(connection: Connection, digests: set[str]) -> set[str]:
    """Those that no version has; nobody can add one while the caller's transaction lasts."""
    await connection.fetchval(sql["catalog_lock"])
    rows = await connection.fetch(sql["digests_in_use"], sorted(digests))
    return digests - {row["digest"] for row in rows}
