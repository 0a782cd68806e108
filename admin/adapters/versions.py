"""Immutable versions of adapters. Uploads create them, and they are ready once they are verified.

Functions that write must be called in a transaction. The first write locks the catalog, so that
writers run one after another.
"""

from __future__ import annotations

from datetime import datetime
from typing import Any

import msgspec

from adapters.manifest import AdapterManifest
from admin.adapters import aliases
from admin.adapters.adapters import HEARD_S
from admin.adapters.schemas import MAX_VERSION, VersionView
from admin.signing_keys.signing_keys import check_signature
from store.database import Connection
from store.errors import Conflict, NotFound
from store.queries import fetch_all, fetch_one, from_row, lock_catalog, sql
from store.records import AdapterState, Quota, ServingData, VersionFields

MAX_REJECTED = 20
"""Maximum number of refused uploads that are kept for a tenant. Also the maximum number of versions
that failed verification."""
REJECTED_DAYS = 7
"""Days for which refused uploads, and versions that failed verification, are kept."""


class NewVersion(VersionFields, frozen=True, kw_only=True):
    """Columns of a version whose values come with its upload."""

    tenant_id: str
    base_name: str
    manifest: AdapterManifest
    serving: ServingData = ServingData()
    wanted_alias: str | None = None
    """Alias that will point to the version as soon as the version is ready."""
    uploaded_by: str | None = None
    """Id of the key that sends the upload."""
    signature: bytes | None = None


class RejectedUpload(msgspec.Struct, frozen=True):
    """Upload that was refused before it became a version."""

    name: str
    error: dict[str, Any]
    """Fields of the AdapterRejected: code, field, got, allowed and hint."""
    uploaded_by: str | None
    """Id of the key that sent the upload."""
    rejected_at: datetime


class RejectedUploadView(RejectedUpload, frozen=True):
    object: str = "upload.rejected"


async def add_version(
    connection: Connection, new: NewVersion, default_bytes: int | None = None
) -> tuple[int, bool]:
    """Adds a version, unless the adapter already has one with this content, base model and serving
    data. Returns the number of the version, and whether it is new.

    A new version waits for verification even if a version with the same content is verified, so
    that a tenant's upload never reveals other tenants' uploads. `default_bytes` is the limit of a
    tenant whose quota has no `adapter_bytes`. An existing version gets the
    signature and the alias of the upload. Raises AlreadyExists if a base model has the name,
    Conflict if the alias cannot be moved or the tenant's quota has no room, and the errors of
    `check_signature`.
    """
    await lock_catalog(connection)
    await ensure_adapter(connection, new.tenant_id, new.name)
    digest = new.manifest.digest
    signed_by = await check_signature(connection, new.tenant_id, digest, new.signature)
    row = await connection.fetchrow(
        sql["version_find_content"],
        *(new.tenant_id, new.name, new.base_name, digest, new.serving),
    )
    if row is not None:
        if signed_by is not None:
            place = new.tenant_id, new.name, row["version"]
            await connection.execute(sql["version_sign"], *place, signed_by, new.signature)
        await _want_alias(connection, new, row["version"], row["state"])
        return row["version"], False
    await check_holdings(connection, new.tenant_id, new.name, new.manifest, default_bytes)
    number = await connection.fetchval(sql["version_next"], new.tenant_id, new.name)
    values = msgspec.structs.astuple(new)
    await connection.execute(sql["version_insert"], number, digest, signed_by, *values)
    key = new.tenant_id, new.name, number
    await connection.execute(sql["version_prove"], *key, new.base_name)
    return number, True


async def ensure_adapter(connection: Connection, tenant_id: str, name: str) -> None:
    """Creates an adapter without versions, unless it exists. The caller must hold the catalog's
    lock. Raises NotFound if the tenant was deleted while its files were received."""
    if not await connection.fetchval(sql["adapter_ensure"], tenant_id, name):
        raise NotFound(f"no tenant {tenant_id!r}", "tenant_not_found", "tenant")


async def _want_alias(
    connection: Connection, new: NewVersion, version: int, state: AdapterState
) -> None:
    """Applies the alias of an upload whose version already exists. Points the alias to the version
    if the version is ready, otherwise records the alias for later."""
    if new.wanted_alias is None:
        return
    if state == AdapterState.READY:
        alias = (new.tenant_id, new.name, new.wanted_alias)
        await aliases.set_alias(connection, *alias, version, new.uploaded_by)
    else:
        key = (new.tenant_id, new.name, version)
        await connection.execute(sql["version_want_alias"], *key, new.wanted_alias, new.uploaded_by)


async def add_rejected(
    connection: Connection,
    tenant_id: str,
    name: str,
    error: dict[str, Any],
    key_id: str | None = None,
) -> None:
    """Records the reason of a refused upload. Keeps only the tenant's newest refused uploads."""
    await connection.execute(
        sql["rejected_upload_add"], tenant_id, name, error, key_id, MAX_REJECTED
    )


async def list_rejected(connection: Connection, tenant_id: str) -> list[RejectedUploadView]:
    """Returns the refused uploads of a tenant, newest first."""
    return await fetch_all(connection, RejectedUploadView, "rejected_upload_list", tenant_id)


async def prune_rejected(connection: Connection) -> None:
    """Deletes the refused uploads, and the versions that failed verification, that are too old or
    exceed the maximum number. Changes the catalog only if it deletes versions."""
    await connection.execute(sql["rejected_uploads_prune"], REJECTED_DAYS)
    rows = await connection.fetch(sql["rejected_versions_to_prune"], REJECTED_DAYS, MAX_REJECTED)
    for row in rows:
        key = (row["tenant_id"], row["name"], row["version"])
        await connection.execute(sql["version_delete"], *key)


async def list_versions(
    connection: Connection, tenant_id: str, name: str, after: int = 0, limit: int | None = None
) -> list[VersionView]:
    """Returns an adapter's versions by number, beginning after the number `after`. Returns all of
    them if `limit` is None."""
    place = tenant_id, name, after, limit, None
    return await fetch_all(connection, VersionView, "version_list", *place, HEARD_S)


async def find_version(
    connection: Connection, tenant_id: str, name: str, version: int
) -> VersionView:
    """Returns a version. Raises NotFound."""
    missing = NotFound(f"no version {version} of adapter {name[:128]!r}", "version_not_found")
    if not 0 < version <= MAX_VERSION:
        raise missing
    args = tenant_id, name, 0, None, version, HEARD_S
    return await fetch_one(connection, VersionView, "version_list", *args, missing=missing)


async def approve_template(connection: Connection, digest: str, key_id: str | None) -> None:
    """Approves the chat template with this digest for all tenants. Versions that waited for the
    approval become ready."""
    await connection.execute(sql["template_approve"], digest, key_id)


async def check_holdings(
    connection: Connection,
    tenant_id: str,
    name: str,
    manifest: AdapterManifest,
    default_bytes: int | None = None,
) -> None:
    """Raises Conflict if the tenant's quota has no room for a version with this adapter name and
    content. `default_bytes` applies if the quota has no `adapter_bytes`. The caller must hold the
    catalog's lock."""
    row = await connection.fetchrow(sql["quota_find"], tenant_id)
    quota = None if row is None else from_row(Quota, row)
    max_adapters = None if quota is None else quota.adapters
    max_bytes = (
        default_bytes if quota is None or quota.adapter_bytes is None else quota.adapter_bytes
    )
    if max_adapters is None and max_bytes is None:
        return
    await connection.execute(sql["holdings_store"], tenant_id)
    held = await connection.fetchrow(sql["adapters_held"], tenant_id, name, manifest.digest)
    assert held is not None
    asked = {
        "adapters": (max_adapters, held["adapters"], 0 if held["has_name"] else 1),
        "adapter_bytes": (
            max_bytes,
            held["bytes"],
            0 if held["has_content"] else manifest.file_bytes,
        ),
    }
    for limit, (allowed, used, more) in asked.items():
        if allowed is not None and more > 0 and used + more > allowed:
            raise Conflict(
                f"this tenant may have {allowed} {limit} and has {used}, {more} more do not fit:"
                " delete what is not needed, or have an admin raise the limit",
                "adapter_quota_exceeded",
                limit,
                {"limit": limit, "allowed": allowed, "used": used, "asked": more},
            )
