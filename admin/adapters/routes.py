"""Routes of adapters and their versions: list, show, retire.

A request with an admin key must name the tenant in the parameter `tenant`, except to list adapters.
"""

from __future__ import annotations

from typing import Annotated

import msgspec
from litestar import Controller, delete, get, post
from litestar.params import FromPath, FromQuery, QueryParameter

from admin.adapters import adapters, retirement, versions
from admin.adapters.adapters import AdapterSummaryView
from admin.adapters.schemas import MAX_VERSION, AdapterView, Retired, VersionView
from admin.http.entities import page
from admin.http.guards import ADAPTERS_WRITE, ADMIN, requires, tenant_for
from admin.http.parameters import After, Limit, TenantName
from admin.http.request import AdminRequest
from admin.schemas import Page, shown
from store.errors import NotFound

OWN = [requires(ADMIN, ADAPTERS_WRITE)]


class AdapterController(Controller):
    path = "/adapters"
    tags = ("adapters",)

    @get(guards=OWN)
    async def list_adapters(
        self,
        request: AdminRequest,
        tenant: TenantName = None,
        after: After = "",
        limit: Limit = 100,
    ) -> Page[AdapterSummaryView]:
        """Lists adapters by name. An admin key without `tenant` lists the adapters of all tenants
        by tenant and name. `after` is then TENANT/NAME."""
        async with request.reading() as connection:
            is_of_all = request.user.tenant_id is None and not tenant
            owner = None if is_of_all else await tenant_for(connection, request.user, tenant)
            found = await adapters.list_adapters(connection, owner, after, limit + 1)
        return page(found, limit)

    @get("/{name:str}", guards=OWN)
    async def show_adapter(
        self, request: AdminRequest, name: FromPath[str], tenant: TenantName = None
    ) -> AdapterView:
        async with request.with_tenant(tenant) as (connection, owner):
            adapter = await adapters.find_adapter(connection, owner.id, name)
            found = await versions.list_versions(connection, owner.id, name)
        return shown(AdapterView, adapter, versions=found)

    @delete("/{name:str}", guards=OWN, status_code=200)
    async def delete_adapter(
        self, request: AdminRequest, name: FromPath[str], tenant: TenantName = None
    ) -> Retired:
        """Deletes an adapter with its versions and aliases. Requests in flight continue."""
        async with request.with_tenant(tenant, changes=True) as (connection, owner):
            retired = await retirement.retire_adapter(connection, owner.id, name)
        return Retired(name, await request.plane.settle_retirement(retired))

    @get("/{name:str}/versions", guards=OWN)
    async def list_versions(
        self,
        request: AdminRequest,
        name: FromPath[str],
        tenant: TenantName = None,
        after: Annotated[int, QueryParameter(ge=0, le=MAX_VERSION)] = 0,
        limit: Limit = 100,
    ) -> Page[VersionView]:
        """Lists versions by number, including rejected ones with the reason."""
        async with request.with_tenant(tenant) as (connection, owner):
            await adapters.find_adapter(connection, owner.id, name)
            found = await versions.list_versions(connection, owner.id, name, after, limit + 1)
        return page(found, limit)

    @get("/{name:str}/versions/{version:int}", guards=OWN)
    async def show_version(
        self,
        request: AdminRequest,
        name: FromPath[str],
        version: FromPath[int],
        tenant: TenantName = None,
        verify: FromQuery[bool] = False,
    ) -> VersionView:
        """Shows a version. Its state in the store, `stored`, is checked by file sizes, or with
        `verify` by reading every byte. One version is verified at a time."""
        async with request.with_tenant(tenant) as (connection, owner):
            found = await versions.find_version(connection, owner.id, name, version)
        stored = await request.plane.inspect(found.digest, found.file_bytes, every_byte=verify)
        return msgspec.structs.replace(found, stored=stored)

    @delete("/{name:str}/versions/{version:int}", guards=OWN, status_code=200)
    async def delete_version(
        self,
        request: AdminRequest,
        name: FromPath[str],
        version: FromPath[int],
        tenant: TenantName = None,
    ) -> Retired:
        """Deletes a version. 409 if an alias points to it. Requests in flight continue."""
        async with request.with_tenant(tenant, changes=True) as (connection, owner):
            retired = await retirement.retire_version(connection, owner.id, name, version)
        return Retired(f"{name}@{version}", await request.plane.settle_retirement(retired))

    @post("/{name:str}/versions/{version:int}/template/approve", guards=[requires(ADMIN)])
    async def approve_template(
        self,
        request: AdminRequest,
        name: FromPath[str],
        version: FromPath[int],
        tenant: TenantName = None,
    ) -> VersionView:
        """Approves the chat template of a version, and of all other versions with the same text.
        Verified versions that waited for the approval become ready."""
        async with request.with_tenant(tenant, changes=True) as (connection, owner):
            found = await versions.find_version(connection, owner.id, name, version)
            if (template := found.serving.template) is None:
                raise NotFound(f"{name}@{version} has no chat template", "template_not_found")
            await versions.approve_template(connection, template.digest, request.user.id)
            return await versions.find_version(connection, owner.id, name, version)
