"""Routes of tenants: create, list, show, change, delete."""

from __future__ import annotations

import msgspec

from admin.http.entities import Entity
from admin.http.plane import AdminPlane
from admin.http.request import AdminRequest
from admin.quotas import quotas
from admin.quotas.schemas import quota_of
from admin.schemas import Deleted
from admin.tenants import tenants
from admin.tenants.schemas import TenantChange, TenantCreate, TenantView
from store.database import Connection
from store.records import Tenant

TENANTS = Entity("Tenant", "/tenants", "tenants", TenantView, tenants.find_tenant)
TENANTS.lists(text="Lists tenants by name.")(tenants.list_tenants)
TENANTS.shows(
    "/{tenant:str}",
    name="show_tenant",
    text="Shows a tenant by id or name. A deleted tenant can be found by id.",
)(tenants.find_past_or_present)


@TENANTS.creates()
async def create_tenant(
    request: AdminRequest, connection: Connection, data: TenantCreate
) -> Tenant:
    """Creates a tenant with a unique name and the limits of `default_tenant_quota`."""
    made = await tenants.create_tenant(connection, data.name, data.sharing_group)
    if (limits := request.plane.config.default_quota) is not None:
        await quotas.set_quota(connection, made.id, None, quota_of(made.id, limits))
    return made


@TENANTS.changes("PATCH", "/{tenant:str}")
async def change_tenant(connection: Connection, current: Tenant, data: TenantChange) -> Tenant:
    """Changes a tenant for future requests."""
    given = msgspec.structs.asdict(data)
    fields = {name: value for name, value in given.items() if value is not msgspec.UNSET}
    wanted = msgspec.structs.replace(current, **fields)
    return await tenants.change_tenant(connection, wanted) if fields else current


@TENANTS.changes("DELETE", "/{tenant:str}", then=AdminPlane.reap_now)
async def delete_tenant(connection: Connection, current: Tenant) -> Deleted:
    """Deletes the tenant. Its keys and names stop at once; its adapters, and the files that no
    other tenant has, are deleted afterwards."""
    await tenants.delete_tenant(connection, current)
    return Deleted(current.id)
