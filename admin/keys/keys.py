"""API keys: create, find, rotate, revoke."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime, timedelta

import msgspec

from admin.keys.schemas import KeyCreate
from admin.schemas import shown
from store.database import Connection
from store.errors import Conflict, NotFound
from store.queries import fetch_all, fetch_one, from_row, lock_catalog, sql
from store.records import ADMIN_SCOPES, ApiKey, hash_key, new_key


class KeyDetails(ApiKey, frozen=True):
    last_used_at: datetime | None = None
    """Time of the key's last use, accurate to the minute."""


async def create_key(
    connection: Connection,
    pepper: bytes,
    tenant_id: str | None,
    scopes: frozenset[str] = ADMIN_SCOPES,
    name: str = "",
) -> tuple[ApiKey, str]:
    """Creates a key restricted only by its scopes. Returns the record and the key's text."""
    return await issue_key(connection, pepper, tenant_id, KeyCreate(scopes, name))


async def issue_key(
    connection: Connection,
    pepper: bytes,
    tenant_id: str | None,
    rights: KeyCreate,
    replaces: str | None = None,
    seed: bytes | None = None,
) -> tuple[ApiKey, str]:
    """Creates a tenant's key, or an admin key if `tenant_id` is None. Returns the record and the
    key's text. The text is not stored. It is derived from `seed`, or random if `seed` is None."""
    key = new_key(seed)
    values = msgspec.to_builtins(rights, order="deterministic", builtin_types=(datetime,)).values()
    own = key.id, tenant_id, hash_key(key.text, pepper), replaces
    return await fetch_one(connection, ApiKey, "key_insert", *own, *values), key.text


async def find_key(connection: Connection, key_id: str) -> KeyDetails | None:
    row = await connection.fetchrow(sql["key_find"], key_id)
    return from_row(KeyDetails, row) if row else None


async def find_shown_keys(connection: Connection, ids: Sequence[str]) -> dict[str, ApiKey]:
    """Returns the keys with these ids that exist, by id. Includes keys of tenants whose rows the
    connection may not read, because a request's tenant is known only from its key."""
    return {key.id: key for key in await fetch_all(connection, ApiKey, "keys_shown", ids)}


async def get_key(connection: Connection, key_id: str) -> KeyDetails:
    """Returns a key. Raises NotFound."""
    missing = NotFound(f"no key {key_id[:128]!r}", "key_not_found")
    return await fetch_one(connection, KeyDetails, "key_find", key_id, missing=missing)


async def list_keys(
    connection: Connection, tenant_id: str | None, after: str, limit: int
) -> list[KeyDetails]:
    """Returns up to `limit` keys of a tenant, or admin keys if `tenant_id` is None, by id,
    beginning after the id `after`. Includes revoked and expired keys."""
    return await fetch_all(connection, KeyDetails, "key_list", tenant_id, after, limit)


async def rotate_key(
    connection: Connection,
    pepper: bytes,
    key_id: str,
    overlap_s: int,
    expires_at: datetime | None = None,
    seed: bytes | None = None,
) -> tuple[ApiKey, str]:
    """Creates a key with the rights of a valid key, and lets the old key expire in `overlap_s`
    seconds. Both keys share their limits and the use of these limits.

    The new key expires at `expires_at`, by default when the old key was to expire. Must be called
    in a transaction. Raises NotFound, or Conflict if the old key is not valid.
    """
    await lock_catalog(connection)
    old, now = await get_key(connection, key_id), datetime.now(UTC)
    if not old.is_live(now):
        raise Conflict("only a key that is valid now can be rotated", "key_not_live")
    rights = shown(KeyCreate, old, not_before=None, expires_at=expires_at or old.expires_at)
    made = await issue_key(connection, pepper, old.tenant_id, rights, old.id, seed)
    await connection.execute(sql["key_end"], old.id, now + timedelta(seconds=overlap_s))
    return made


async def revoke_key(connection: Connection, key_id: str) -> KeyDetails:
    """Revokes a key permanently. Revoking it again has no effect.

    Must be called in a transaction. Raises NotFound. Raises Conflict for the last valid
    admin key that never expires, because without it no key could be created.
    """
    await lock_catalog(connection)
    key = await get_key(connection, key_id)
    is_admin = key.tenant_id is None and key.is_live(datetime.now(UTC))
    if is_admin and not await connection.fetchval(sql["admin_key_beside"], key_id):
        raise Conflict(
            "this is the last admin key without an expiry; make another before you revoke it",
            "last_admin_key",
        )
    await connection.execute(sql["key_revoke"], key_id)
    return await get_key(connection, key_id)
