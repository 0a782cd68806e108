"""Tenants and their keys: functions of a connection to records."""

from __future__ import annotations

from datetime import datetime

from admin.aliases import check_pins
from admin.database import Connection
from admin.errors import NotFound
from admin.queries import from_row, sql
from admin.records import ADMIN_SCOPES, ApiKey, Tenant, hash_key, new_key, random_base62


async def create_tenant(
    connection: Connection, name: str, sharing_group: str | None = None
) -> Tenant:
    """Raises AlreadyExists or Invalid for the name."""
    tenant_id = f"ten_{random_base62(12)}"
    row = await connection.fetchrow(sql["tenant_insert"], tenant_id, name, sharing_group)
    assert row is not None
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


async def set_pin_bytes(connection: Connection, tenant: Tenant, pin_bytes: int) -> Tenant:
    """In a transaction of the caller's. Raises Conflict if more is pinned already."""
    row = await connection.fetchrow(sql["tenant_set_pin_bytes"], tenant.id, pin_bytes)
    assert row is not None
    await check_pins(connection, tenant.id)
    return from_row(Tenant, row)


async def delete_tenant(connection: Connection, tenant: Tenant) -> None:
    """With its keys and adapters."""
    await connection.execute(sql["tenant_delete"], tenant.id)


async def create_key(
    connection: Connection,
    pepper: bytes,
    tenant_id: str | None,
    scopes: frozenset[str] = ADMIN_SCOPES,
    name: str = "",
    expires_at: datetime | None = None,
) -> tuple[ApiKey, str]:
    """The record, and the key's text, which is kept nowhere. `tenant_id` None: an admin key."""
    key = new_key()
    row = await connection.fetchrow(
        sql["key_insert"],
        key.id,
        tenant_id,
        hash_key(key.text, pepper),
        sorted(scopes),
        expires_at,
        name,
    )
    assert row is not None
    return from_row(ApiKey, row), key.text


async def find_key(connection: Connection, key_id: str) -> ApiKey | None:
    row = await connection.fetchrow(sql["key_find"], key_id)
    return from_row(ApiKey, row) if row else None


async def list_keys(
    connection: Connection, tenant_id: str | None, after: str, limit: int
) -> list[ApiKey]:
    """Revoked and expired ones too. `tenant_id` None: the admin keys."""
    if tenant_id is None:
        rows = await connection.fetch(sql["key_list_admin"], after, limit)
    else:
        rows = await connection.fetch(sql["key_list"], tenant_id, after, limit)
    return [from_row(ApiKey, row) for row in rows]


async def revoke_key(connection: Connection, key_id: str) -> ApiKey:
    """Once and for all; a second time changes nothing. Raises NotFound."""
    row = await connection.fetchrow(sql["key_revoke"], key_id)
    if row is None:
        raise NotFound(f"no key {key_id[:128]!r}", "key_not_found")
    return from_row(ApiKey, row)
