"""Routes of tenants: create, list, show, change, delete."""

from __future__ import annotations

import msgspec
from litestar import Controller, Response, delete, get, patch, post
from litestar.params import FromPath, JSONBody

from admin.http.entities import read_page
from admin.http.guards import ADMIN, requires
from admin.http.idempotency import IdempotencyKey, once
from admin.http.parameters import After, Limit
from admin.http.preconditions import IfMatch, Tagged, locked, tagged
from admin.http.request import AdminRequest
from admin.quotas import quotas
from admin.quotas.schemas import quota_of
from admin.schemas import Deleted, Page
from admin.tenants import tenants
from admin.tenants.schemas import TenantChange, TenantCreate, TenantView
from store.database import Connection
from store.queries import lock_catalog
from store.records import Tenant


class TenantController(Controller):
    path = "/tenants"
    tags = ("tenants",)
    guards = (requires(ADMIN),)

    @post()
    async def create_tenant(
        self,
        request: AdminRequest,
        data: JSONBody[TenantCreate],
        idempotency_key: IdempotencyKey = None,
    ) -> Response[TenantView]:
        """Creates a tenant with a unique name and the limits of `default_tenant_quota`."""

        async def create(connection: Connection, _seed: bytes) -> TenantView:
            made = await tenants.create_tenant(connection, data.name, data.sharing_group)
            if (limits := request.plane.config.default_quota) is not None:
                quota = quota_of(made.id, limits)
                await quotas.set_quota(connection, made.id, None, quota)
            return TenantView.of(made)

        return await once(request, idempotency_key, create)

    @get()
    async def list_tenants(
        self, request: AdminRequest, after: After = "", limit: Limit = 100
    ) -> Page[TenantView]:
        """Lists tenants by name."""
        return await read_page(request, limit, TenantView.of, tenants.list_tenants, after)

    @get("/{tenant:str}")
    async def show_tenant(self, request: AdminRequest, tenant: FromPath[str]) -> Tagged[TenantView]:
        """Shows a tenant by id or name. A deleted tenant can be found by id."""
        async with request.reading() as connection:
            found = await tenants.find_past_or_present(connection, tenant)
        return tagged(TenantView.of(found))

    @patch("/{tenant:str}")
    async def change_tenant(
        self,
        request: AdminRequest,
        tenant: FromPath[str],
        data: JSONBody[TenantChange],
        if_match: IfMatch = None,
    ) -> Tagged[TenantView]:
        """Changes a tenant for future requests."""
        async with request.transaction() as connection:
            changed = await _locked(connection, if_match, tenant)
            given = msgspec.structs.asdict(data)
            fields = {name: value for name, value in given.items() if value is not msgspec.UNSET}
            if fields:
                wanted = msgspec.structs.replace(changed, **fields)
                changed = await tenants.change_tenant(connection, wanted)
        return tagged(TenantView.of(changed))

    @delete("/{tenant:str}", status_code=200)
    async def delete_tenant(
        self, request: AdminRequest, tenant: FromPath[str], if_match: IfMatch = None
    ) -> Deleted:
        """Deletes the tenant. Its keys and names stop at once; its adapters, and the files that no
        other tenant has, are deleted afterwards."""
        async with request.transaction() as connection:
            doomed = await _locked(connection, if_match, tenant)
            await lock_catalog(connection)
            await tenants.delete_tenant(connection, doomed)
        await request.plane.reap_now()
        return Deleted(doomed.id)


async def _locked(connection: Connection, if_match: str | None, reference: str) -> Tenant:
    return await locked(connection, if_match, TenantView.of, tenants.find_tenant, reference)
