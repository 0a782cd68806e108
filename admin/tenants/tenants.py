"""Tenants: create, find, change, delete."""

from __future__ import annotations

from collections.abc import Collection
from datetime import datetime

from store.database import Connection
from store.errors import AlreadyExists, NotFound
from store.queries import fetch_all, fetch_one, sql
from store.records import Tenant, random_base62


class PastTenant(Tenant, frozen=True):
    deleted_at: datetime | None = None
    """Time at which the tenant was deleted. None if the tenant exists."""


async def create_tenant(
    connection: Connection, name: str, sharing_group: str | None = None
) -> Tenant:
    """Creates a tenant. Raises AlreadyExists, or Invalid if the name has a wrong form."""
    tenant_id = f"ten_{random_base62(12)}"
    taken = AlreadyExists(f"a tenant named {name[:128]!r} already exists", param="name")
    values = tenant_id, name, sharing_group
    return await fetch_one(connection, Tenant, "tenant_insert", *values, missing=taken)


async def list_tenants(connection: Connection, after: str, limit: int) -> list[Tenant]:
    return await fetch_all(connection, Tenant, "tenant_list", after, limit)


async def find_tenant(connection: Connection, tenant: str) -> Tenant:
    """Returns a tenant by id or name. Raises NotFound."""
    missing = _missing(tenant)
    return await fetch_one(connection, Tenant, "tenant_find", tenant, missing=missing)


async def find_past_or_present(connection: Connection, tenant: str) -> PastTenant:
    """Returns a tenant by id or name. Finds a deleted tenant by its id, as long as its deletion is
    still in the audit log. Raises NotFound."""
    query, missing = "tenant_find_past_or_present", _missing(tenant)
    return await fetch_one(connection, PastTenant, query, tenant, missing=missing)


def _missing(reference: str) -> NotFound:
    return NotFound(f"no tenant {reference[:128]!r}", "tenant_not_found", "tenant")


async def names(connection: Connection, tenant_ids: Collection[str]) -> dict[str, str]:
    """Returns tenants' names by id, also of deleted tenants whose deletion is in the audit log."""
    rows = await connection.fetch(sql["tenant_names"], list(tenant_ids))
    return {row["id"]: row["name"] for row in rows}


async def change_tenant(connection: Connection, tenant: Tenant) -> Tenant:
    """Stores the sharing group and `require_signature` of the tenant. Raises Invalid."""
    values = tenant.id, tenant.sharing_group, tenant.require_signature
    return await fetch_one(connection, Tenant, "tenant_change", *values)


async def delete_tenant(connection: Connection, tenant: Tenant) -> None:
    """Deletes a tenant's keys and limits, and frees its name. The reaper deletes its adapters."""
    await connection.execute(sql["quotas_lock"], tenant.id)
    await connection.execute(sql["tenant_delete"], tenant.id)
    await connection.execute(sql["tenant_delete_keys"], tenant.id)
