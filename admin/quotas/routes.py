"""Routes of the quotas of tenants and keys: show with current use, replace, remove."""

from __future__ import annotations

from litestar import Controller, delete, get, put
from litestar.params import FromPath, JSONBody

from admin.http import preconditions
from admin.http.guards import ADMIN, USAGE_READ, requires, tenant_for
from admin.http.preconditions import IfMatch, Tagged, etag, tagged
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
from admin.schemas import Deleted
from admin.tenants import tenants
from store.database import Connection
from store.errors import Invalid, NotFound
from store.records import ApiKey, Tenant

OWN = [requires(ADMIN, USAGE_READ)]


class OwnQuotaController(Controller):
    path = "/quota"
    tags = ("quotas",)

    @get(guards=OWN)
    async def show_own_quota(self, request: AdminRequest) -> TenantQuotaView:
        """Shows the quota of the key's tenant. 400 `tenant_missing` for an admin key."""
        async with request.reading() as connection:
            owner = await tenant_for(connection, request.user, None)
            return (await _show_tenants(connection, owner)).content


class TenantQuotaController(Controller):
    path = "/tenants/{tenant:str}/quota"
    tags = ("quotas",)

    @get(guards=OWN)
    async def show_quota(
        self, request: AdminRequest, tenant: FromPath[str]
    ) -> Tagged[TenantQuotaView]:
        """Shows a tenant's limits, and how much of each is used and left. The ETag covers only the
        limits."""
        async with request.reading() as connection:
            owner = await tenant_for(connection, request.user, tenant)
            return await _show_tenants(connection, owner)

    @put(guards=[requires(ADMIN)])
    async def set_quota(
        self,
        request: AdminRequest,
        tenant: FromPath[str],
        data: JSONBody[TenantLimits],
        if_match: IfMatch = None,
    ) -> Tagged[TenantQuotaView]:
        """Replaces a tenant's quota. 409 if its aliases pin more bytes than the new quota allows.
        Anything else that exceeds the new quota is kept, but nothing can be added."""
        async with request.transaction() as connection:
            owner = await tenants.find_tenant(connection, tenant)
            await preconditions.lock(connection, if_match, _limits, TenantLimits, owner.id, None)
            await quotas.set_quota(connection, owner.id, None, quota_of(owner.id, data))
            return await _show_tenants(connection, owner)

    @delete(guards=[requires(ADMIN)], status_code=200)
    async def clear_quota(
        self, request: AdminRequest, tenant: FromPath[str], if_match: IfMatch = None
    ) -> Deleted:
        """Removes all limits, and resets weight and class. 409 if aliases of the tenant are
        pinned."""
        async with request.transaction() as connection:
            owner = await tenants.find_tenant(connection, tenant)
            await preconditions.lock(connection, if_match, _limits, TenantLimits, owner.id, None)
            await quotas.clear_quota(connection, owner.id, None)
        return Deleted(owner.id)


class KeyQuotaController(Controller):
    path = "/keys/{key_id:str}/quota"
    tags = ("quotas",)

    @get(guards=OWN)
    async def show_quota(
        self, request: AdminRequest, key_id: FromPath[str]
    ) -> Tagged[KeyQuotaView]:
        """Shows a key's limits and their use. A tenant's key sees only its own quota."""
        async with request.reading() as connection:
            key, owner_id = await _find_key(connection, key_id, request.user)
            return await _show_keys(connection, key, owner_id)

    @put(guards=[requires(ADMIN)])
    async def set_quota(
        self,
        request: AdminRequest,
        key_id: FromPath[str],
        data: JSONBody[KeyLimits],
        if_match: IfMatch = None,
    ) -> Tagged[KeyQuotaView]:
        """Replaces a key's limits, which apply in addition to its tenant's limits. Keys that it was
        rotated from or to share its limits."""
        async with request.transaction() as connection:
            key, owner_id = await _find_key(connection, key_id, request.user)
            subject = key.quota_subject
            await preconditions.lock(connection, if_match, _limits, KeyLimits, owner_id, subject)
            await quotas.set_quota(connection, owner_id, subject, quota_of(subject, data))
            return await _show_keys(connection, key, owner_id)

    @delete(guards=[requires(ADMIN)], status_code=200)
    async def clear_quota(
        self, request: AdminRequest, key_id: FromPath[str], if_match: IfMatch = None
    ) -> Deleted:
        """Removes a key's own limits."""
        async with request.transaction() as connection:
            key, owner_id = await _find_key(connection, key_id, request.user)
            await preconditions.lock(
                connection, if_match, _limits, KeyLimits, owner_id, key.quota_subject
            )
            await quotas.clear_quota(connection, owner_id, key.quota_subject)
        return Deleted(key.id)


async def _find_key(connection: Connection, key_id: str, caller: ApiKey) -> tuple[ApiKey, str]:
    """Returns the key and its tenant's id. Raises NotFound if the key does not exist or the caller
    may not see it, and Invalid for an admin key."""
    if caller.tenant_id is not None and key_id != caller.id:
        raise NotFound(f"no key {key_id[:128]!r}", "key_not_found")
    key = await keys.get_key(connection, key_id)
    if key.tenant_id is None:
        raise Invalid("an admin key infers with no model and has no quota", "admin_key")
    return key, key.tenant_id


async def _limits(
    connection: Connection, kind: type[KeyLimits], tenant_id: str, key_id: str | None
) -> KeyLimits:
    return limits_of(kind, await quotas.find_quota(connection, tenant_id, key_id))


async def _show_tenants(connection: Connection, owner: Tenant) -> Tagged[TenantQuotaView]:
    quota = await quotas.find_quota(connection, owner.id, None)
    used = await quotas.limits_in_use(connection, quota)
    used |= await quotas.holdings_in_use(connection, quota)
    use = {name: UseView.of(name, each) for name, each in used.items()}
    view = limits_of(TenantQuotaView, quota, use=use)
    return tagged(view, etag(limits_of(TenantLimits, quota)))


async def _show_keys(connection: Connection, key: ApiKey, owner_id: str) -> Tagged[KeyQuotaView]:
    quota = await quotas.find_quota(connection, owner_id, key.quota_subject)
    used = await quotas.limits_in_use(connection, quota)
    use = {name: UseView.of(name, each) for name, each in used.items()}
    view = limits_of(KeyQuotaView, quota, use=use)
    return tagged(view, etag(limits_of(KeyLimits, quota)))
