"""Retirement of versions: new requests cannot use a retired version, and requests in flight can
still use it.

A gateway reports its catalog generation and its requests in flight in one database row. Once the
row shows a generation that includes the retirement, and no requests in flight with the version, the
gateway will never use the version again.
"""

from __future__ import annotations

import msgspec

from admin.adapters import aliases, versions
from admin.adapters.adapters import find_adapter
from store.database import Connection
from store.errors import Conflict
from store.queries import fetch_one, lock_catalog, sql


class Retirement(msgspec.Struct, frozen=True):
    generation: int
    """Catalog generation that includes the retirement. A gateway that has loaded it starts no new
    requests with the versions."""
    keys: list[str]
    """Retired versions in the form TENANT_ID/NAME/VERSION, as gateways report them in flight."""


class RetirementProgress(msgspec.Struct, frozen=True):
    is_known: bool
    """Whether every live gateway knows of the retirement."""
    in_flight: int


async def retire_version(
    connection: Connection, tenant_id: str, name: str, version: int
) -> Retirement:
    """Retires a version, or deletes it if it was rejected. Raises NotFound, or Conflict if an alias
    points to it."""
    await lock_catalog(connection)
    await versions.find_version(connection, tenant_id, name, version)
    for alias in await aliases.list_aliases(connection, tenant_id, name):
        if version in {alias.version, *(alias.canary or ())}:
            raise Conflict(
                f"alias {alias.alias!r} points to version {version}: promote another one first",
                "version_in_use",
            )
    return await retire_versions(connection, tenant_id, name, [version])


async def retire_adapter(connection: Connection, tenant_id: str, name: str) -> Retirement:
    """Retires an adapter's versions and deletes its aliases with their history. Raises NotFound."""
    await lock_catalog(connection)
    await find_adapter(connection, tenant_id, name)
    await connection.execute(sql["aliases_clear"], tenant_id, name)
    found = await versions.list_versions(connection, tenant_id, name)
    return await retire_versions(
        connection, tenant_id, name, [version.version for version in found]
    )


async def retire_versions(
    connection: Connection, tenant_id: str, name: str, numbers: list[int]
) -> Retirement:
    """Retires versions, and deletes rejected ones. No alias may point to the versions. The caller
    must hold the catalog's lock."""
    await connection.execute(sql["version_retire"], tenant_id, name, numbers)
    await connection.execute(sql["version_forget"], tenant_id, name, numbers)
    generation = await connection.fetchval(sql["catalog_generation"])
    return Retirement(generation, [f"{tenant_id}/{name}/{number}" for number in numbers])


async def retirement_progress(connection: Connection, retirement: Retirement) -> RetirementProgress:
    """Returns the progress of a retirement, from the last reports of live gateways."""
    asked = retirement.generation, retirement.keys
    return await fetch_one(connection, RetirementProgress, "retirement_progress", *asked)
