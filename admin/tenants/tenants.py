"""Tenants: functions of a connection to records."""

from __future__ import annotations

from collections.abc import Collection

from admin.database import Connection
from admin.errors import AlreadyExists, NotFound
from admin.queries import from_row, sql
from admin.records import Tenant, random_base62


async def create_tenant(
    connection: Connection, name: str, sharing_group: str | None = None
) -> Tenant:
    """Raises AlreadyExists or Invalid for the name."""
    tenant_id = f"ten_{random_base62(12)}"
    row = await connection.fetchrow(sql["tenant_insert"], tenant_id, name, sharing_group)
    if row is None:
        raise AlreadyExists(f"a tenant named {name[:128]!r} already exists", param="name")
    return from_row(Tenant, row)


async def list_tenants(connection: Connection, after: str, limit: int) -> list[Tenant]:
    rows = await connection.fetch(sql["tenant_list"], after, limit)
    return [from_row(Tenant, row) for row in rows]


async def find_tenant(connection: Connection, reference: str) -> Tenant:
    """By id or name. Raises NotFound."""
    row = await connection.fetchrow(sql["tenant_find"], reference)
    if row is None:
        raise NotFound(f"no tenant {reference[:128]!r}", "tenant_not_found", "tenant")
    return from_row(Tenant, row)


async def find_deleted(connection: Connection, tenant_id: str) -> Tenant:
    """A tenant that was deleted, for as long as the audit log has it. Raises NotFound."""
    row = await connection.fetchrow(sql["tenant_find_deleted"], tenant_id)
    if row is None:
        raise NotFound(f"no tenant {tenant_id[:128]!r}", "tenant_not_found", "tenant")
    return from_row(Tenant, row)


async def names(connection: Connection, tenant_ids: Collection[str]) -> dict[str, str]:
    """By id; of deleted tenants too, for as long as the audit log has them."""
    rows = await connection.fetch(sql["tenant_names"], list(tenant_ids))
    return {row["id"]: row["name"] for row in rows}


async def set_sharing_group(
    connection: Connection, tenant: Tenant, sharing_group: str | None
) -> Tenant:
    """Sets the sharing group; None: the tenant shares none. Raises Invalid."""
    row = await connection.fetchrow(sql["tenant_set_sharing_group"], tenant.id, sharing_group)
    assert row is not None
    return from_row(Tenant, row)


async def delete_tenant(connection: Connection, tenant: Tenant) -> None:
    """With its keys and adapters."""
    await connection.execute(sql["quotas_lock"], tenant.id)
    await connection.execute(sql["tenant_delete"], tenant.id)
