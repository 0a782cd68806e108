"""Routes of the quotas of tenants and keys: show with current use, replace, remove."""

from __future__ import annotations

from admin.http.entities import Entity
from admin.http.guards import ADMIN, USAGE_READ, tenant_for
from admin.http.request import AdminRequest
from admin.keys import keys
from admin.quotas import quotas
from admin.quotas.schemas import (
    KeyLimits,
    KeyQuotaView,
    TenantLimits,
    TenantQuotaView,
    UseView,
    limits_of,
    quota_of,
)
from admin.schemas import Deleted, shown
from store.database import Connection
from store.errors import Invalid, NotFound
from store.records import ApiKey, Caller

_OWN = (ADMIN, USAGE_READ)


async def _of_tenant(
    request: AdminRequest, connection: Connection, tenant_id: str
) -> TenantQuotaView:
    quota = await quotas.find_quota(connection, tenant_id, None)
    used = await quotas.limits_in_use(connection, quota)
    default_bytes = request.plane.config.default_adapter_bytes
    used |= await quotas.holdings_in_use(connection, quota, default_bytes)
    return limits_of(TenantQuotaView, quota, use=UseView.of_each(used))


async def _of_key(connection: Connection, caller: Caller, key_id: str) -> KeyQuotaView:
    key = await _find_key(connection, caller, key_id)
    quota = await quotas.find_quota(connection, key.tenant_id or "", key.quota_subject)
    used = await quotas.limits_in_use(connection, quota)
    return limits_of(KeyQuotaView, quota, use=UseView.of_each(used))


OWN_QUOTA = Entity("OwnQuota", "/quota", "quotas", TenantQuotaView, scopes=_OWN)
TENANT_QUOTAS = Entity(
    *("TenantQuota", "/tenants/{tenant:str}/quota", "quotas", TenantQuotaView, _of_tenant),
    covers=lambda view: shown(TenantLimits, view),
)
TENANT_QUOTAS.shows(
    name="show_quota",
    text="Shows a tenant's limits, and how much of each is used and left. The ETag covers only the"
    "\nlimits.",
    scopes=_OWN,
)(_of_tenant)
KEY_QUOTAS = Entity(
    *("KeyQuota", "/keys/{key_id:str}/quota", "quotas", KeyQuotaView, _of_key),
    covers=lambda view: shown(KeyLimits, view),
)
KEY_QUOTAS.shows(
    name="show_quota",
    text="Shows a key's limits and their use. A tenant's key sees only its own quota.",
    scopes=_OWN,
)(_of_key)


@OWN_QUOTA.shows()
async def show_own_quota(
    request: AdminRequest, connection: Connection, caller: Caller
) -> TenantQuotaView:
    """Shows the quota of the key's tenant. 400 `tenant_missing` for an admin key."""
    owner = await tenant_for(connection, caller, None)
    return await _of_tenant(request, connection, owner.id)


@TENANT_QUOTAS.changes("PUT", name="set_quota")
async def set_tenant_quota(
    request: AdminRequest, connection: Connection, tenant_id: str, data: TenantLimits
) -> TenantQuotaView:
    """Replaces a tenant's quota. 409 if its aliases pin more bytes than the new quota allows.
    Anything else that exceeds the new quota is kept, but nothing can be added."""
    await quotas.set_quota(connection, tenant_id, None, quota_of(tenant_id, data))
    return await _of_tenant(request, connection, tenant_id)


@TENANT_QUOTAS.changes("DELETE", name="clear_quota")
async def clear_tenant_quota(connection: Connection, tenant_id: str) -> Deleted:
    """Removes all limits, and resets weight and class. 409 if aliases of the tenant are
    pinned."""
    await quotas.clear_quota(connection, tenant_id, None)
    return Deleted(tenant_id)


@KEY_QUOTAS.changes("PUT", name="set_quota")
async def set_key_quota(
    connection: Connection, caller: Caller, key_id: str, data: KeyLimits
) -> KeyQuotaView:
    """Replaces a key's limits, which apply in addition to its tenant's limits. Keys that it was
    rotated from or to share its limits."""
    key = await _find_key(connection, caller, key_id)
    subject = key.quota_subject
    await quotas.set_quota(connection, key.tenant_id or "", subject, quota_of(subject, data))
    return await _of_key(connection, caller, key_id)


@KEY_QUOTAS.changes("DELETE", name="clear_quota")
async def clear_key_quota(connection: Connection, caller: Caller, key_id: str) -> Deleted:
    """Removes a key's own limits."""
    key = await _find_key(connection, caller, key_id)
    await quotas.clear_quota(connection, key.tenant_id or "", key.quota_subject)
    return Deleted(key_id)


async def _find_key(connection: Connection, caller: Caller, key_id: str) -> ApiKey:
    """Returns a tenant's key, whose quota is stored under `quota_subject`. Raises NotFound if the
    key does not exist or the caller may not see it, and Invalid for an admin key."""
    if caller.tenant_id is not None and key_id != caller.id:
        raise NotFound(f"no key {key_id[:128]!r}", "key_not_found")
    key = await keys.get_key(connection, key_id)
    if key.tenant_id is None:
        raise Invalid("an admin key infers with no model and has no quota", "admin_key")
    return key
