"""Tenants: create, list, read, change, delete."""

from __future__ import annotations

from typing import Annotated

from litestar import Controller, delete, get, patch, post
from litestar.params import FromPath, FromQuery, JSONBody, QueryParameter

from admin import contents, tenants
from admin.guards import ADMIN, requires
from admin.request import AdminRequest
from admin.schemas import Deleted, Page, TenantChange, TenantCreate, TenantView, page


class TenantController(Controller):
    path = "/tenants"

    @post(guards=[requires(ADMIN)])
    async def create_tenant(
        self, request: AdminRequest, data: JSONBody[TenantCreate]
    ) -> TenantView:
        """A name is taken once."""
        async with request.transaction() as connection:
            tenant = await tenants.create_tenant(connection, data.name, data.sharing_group)
        return TenantView.of(tenant)

    @get(guards=[requires(ADMIN)])
    async def list_tenants(
        self,
        request: AdminRequest,
        after: FromQuery[str] = "",
        limit: Annotated[int, QueryParameter(ge=1, le=1000)] = 100,
    ) -> Page[TenantView]:
        """By name."""
        async with request.reading() as connection:
            found = await tenants.list_tenants(connection, after, limit + 1)
        return page([TenantView.of(tenant) for tenant in found], limit)

    @get("/{tenant:str}", guards=[requires(ADMIN)])
    async def show_tenant(self, request: AdminRequest, tenant: FromPath[str]) -> TenantView:
        """By id or name."""
        async with request.reading() as connection:
            return TenantView.of(await tenants.find_tenant(connection, tenant))

    @patch("/{tenant:str}", guards=[requires(ADMIN)])
    async def change_tenant(
        self, request: AdminRequest, tenant: FromPath[str], data: JSONBody[TenantChange]
    ) -> TenantView:
        """409 if its aliases pin more bytes already."""
        async with request.transaction() as connection:
            found = await tenants.find_tenant(connection, tenant)
            changed = await tenants.set_pin_bytes(connection, found, data.pin_bytes)
        return TenantView.of(changed)

    @delete("/{tenant:str}", guards=[requires(ADMIN)], status_code=200)
    async def delete_tenant(self, request: AdminRequest, tenant: FromPath[str]) -> Deleted:
        """With its keys, its adapters and the files nobody else has."""
        async with request.transaction() as connection:
            doomed = await tenants.find_tenant(connection, tenant)
            await contents.leave_tenant(connection, doomed.id)
            await tenants.delete_tenant(connection, doomed)
        await request.plane.reaper.reap()
        return Deleted(doomed.id)
