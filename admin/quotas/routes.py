"""Routes of the quotas of tenants and keys: show with current use, replace, remove."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any, NamedTuple

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
from store.database import Connection
from store.errors import Invalid, NotFound
from store.records import Caller

OWN = [requires(ADMIN, USAGE_READ)]


class OwnQuotaController(Controller):
    path = "/quota"
    tags = ("quotas",)

    @get(guards=OWN)
    async def show_own_quota(self, request: AdminRequest) -> TenantQuotaView:
        """Shows the quota of the key's tenant. 400 `tenant_missing` for an admin key."""
        async with request.reading() as connection:
            holder = await _tenant(connection, request.user, None)
            return (await _show(request, connection, holder)).content


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
            holder = await _tenant(connection, request.user, tenant)
            return await _show(request, connection, holder)

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
        return await _set(request, _tenant, tenant, data, if_match)

    @delete(guards=[requires(ADMIN)], status_code=200)
    async def clear_quota(
        self, request: AdminRequest, tenant: FromPath[str], if_match: IfMatch = None
    ) -> Deleted:
        """Removes all limits, and resets weight and class. 409 if aliases of the tenant are
        pinned."""
        return await _clear(request, _tenant, tenant, if_match)


class KeyQuotaController(Controller):
    path = "/keys/{key_id:str}/quota"
    tags = ("quotas",)

    @get(guards=OWN)
    async def show_quota(
        self, request: AdminRequest, key_id: FromPath[str]
    ) -> Tagged[KeyQuotaView]:
        """Shows a key's limits and their use. A tenant's key sees only its own quota."""
        async with request.reading() as connection:
            holder = await _key(connection, request.user, key_id)
            return await _show(request, connection, holder)

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
        return await _set(request, _key, key_id, data, if_match)

    @delete(guards=[requires(ADMIN)], status_code=200)
    async def clear_quota(
        self, request: AdminRequest, key_id: FromPath[str], if_match: IfMatch = None
    ) -> Deleted:
        """Removes a key's own limits."""
        return await _clear(request, _key, key_id, if_match)


class _Holder(NamedTuple):
    """Tenant or key that a quota belongs to."""

    id: str
    tenant_id: str
    subject: str
    """Id under which the limits are stored: the tenant's id, or the key's `ApiKey.quota_subject`,
    which a key shares with the keys that it was rotated from."""
    limits: type[KeyLimits]
    view: type[KeyQuotaView | TenantQuotaView]

    @property
    def place(self) -> tuple[str, str | None]:
        """Arguments that the functions of `quotas` need: the tenant's id, and the subject of a
        key's quota, or None for the tenant's own quota."""
        return self.tenant_id, None if self.subject == self.tenant_id else self.subject


_Find = Callable[[Connection, Caller, str], Awaitable[_Holder]]


async def _tenant(connection: Connection, caller: Caller, reference: str | None) -> _Holder:
    owner = await tenant_for(connection, caller, reference)
    return _Holder(owner.id, owner.id, owner.id, TenantLimits, TenantQuotaView)


async def _key(connection: Connection, caller: Caller, key_id: str) -> _Holder:
    """Returns the holder of a key's quota. Raises NotFound if the key does not exist or the caller
    may not see it, and Invalid for an admin key."""
    if caller.tenant_id is not None and key_id != caller.id:
        raise NotFound(f"no key {key_id[:128]!r}", "key_not_found")
    key = await keys.get_key(connection, key_id)
    if key.tenant_id is None:
        raise Invalid("an admin key infers with no model and has no quota", "admin_key")
    return _Holder(key.id, key.tenant_id, key.quota_subject, KeyLimits, KeyQuotaView)


async def _limits(connection: Connection, holder: _Holder) -> KeyLimits:
    return limits_of(holder.limits, await quotas.find_quota(connection, *holder.place))


async def _show(request: AdminRequest, connection: Connection, holder: _Holder) -> Tagged[Any]:
    quota = await quotas.find_quota(connection, *holder.place)
    used = await quotas.limits_in_use(connection, quota)
    if holder.limits is TenantLimits:
        default_bytes = request.plane.config.default_adapter_bytes
        used |= await quotas.holdings_in_use(connection, quota, default_bytes)
    use = {name: UseView.of(name, each) for name, each in used.items()}
    return tagged(limits_of(holder.view, quota, use=use), etag(limits_of(holder.limits, quota)))


async def _set(
    request: AdminRequest, find: _Find, reference: str, data: KeyLimits, if_match: str | None
) -> Tagged[Any]:
    async with request.transaction() as connection:
        holder = await find(connection, request.user, reference)
        await preconditions.lock(connection, if_match, _limits, holder)
        await quotas.set_quota(connection, *holder.place, quota_of(holder.subject, data))
        return await _show(request, connection, holder)


async def _clear(
    request: AdminRequest, find: _Find, reference: str, if_match: str | None
) -> Deleted:
    async with request.transaction() as connection:
        holder = await find(connection, request.user, reference)
        await preconditions.lock(connection, if_match, _limits, holder)
        await quotas.clear_quota(connection, *holder.place)
    return Deleted(holder.id)
