"""Adapters: versions, aliases, delete. An admin key says whose with `tenant`."""

from __future__ import annotations

from typing import Annotated

from litestar import Controller, delete, get, put
from litestar.params import FromPath, FromQuery, JSONBody, Parameter

from admin import adapters
from admin.database import Connection
from admin.errors import NotFound
from admin.guards import ADAPTERS_WRITE, ADMIN, requires, tenant_for
from admin.records import AdapterVersion, Alias
from admin.request import AdminRequest
from admin.schemas import (
    AdapterView,
    AliasMoveView,
    AliasSet,
    AliasView,
    Deleted,
    Page,
    VersionView,
    page,
)

OWN = [requires(ADMIN, ADAPTERS_WRITE)]


class AdapterController(Controller):
    path = "/adapters"

    @get(guards=OWN)
    async def list_adapters(
        self,
        request: AdminRequest,
        tenant: FromQuery[str | None] = None,
        after: FromQuery[str] = "",
        limit: Annotated[FromQuery[int], Parameter(ge=1, le=1000)] = 100,
    ) -> Page[AdapterView]:
        async with request.plane.database.acquire() as connection:
            owner = await tenant_for(connection, request.user, tenant)
            found = await adapters.list_adapters(connection, owner.id, after, limit + 1)
            shown = [
                await _describe(connection, owner.id, owner.name, adapter) for adapter in found
            ]
        return page(shown, limit)

    @get("/{name:str}", guards=OWN)
    async def show_adapter(
        self, request: AdminRequest, name: FromPath[str], tenant: FromQuery[str | None] = None
    ) -> AdapterView:
        async with request.plane.database.acquire() as connection:
            owner = await tenant_for(connection, request.user, tenant)
            adapter = await adapters.find_adapter(connection, owner.id, name)
            return await _describe(connection, owner.id, owner.name, adapter)

    @delete("/{name:str}", guards=OWN, status_code=200)
    async def delete_adapter(
        self, request: AdminRequest, name: FromPath[str], tenant: FromQuery[str | None] = None
    ) -> Deleted:
        """With all its versions and aliases. Answers that run go on."""
        async with request.plane.database.transaction() as connection:
            owner = await tenant_for(connection, request.user, tenant)
            doomed = await adapters.delete_adapter(connection, owner.id, name)
        await request.plane.discard_unused({v.digest for v in doomed if v.digest})
        return Deleted(name)

    @get("/{name:str}/versions", guards=OWN)
    async def list_versions(
        self, request: AdminRequest, name: FromPath[str], tenant: FromQuery[str | None] = None
    ) -> Page[VersionView]:
        """Rejected ones too, with the reason."""
        async with request.plane.database.acquire() as connection:
            owner = await tenant_for(connection, request.user, tenant)
            adapter = await adapters.find_adapter(connection, owner.id, name)
            shown = await _describe(connection, owner.id, owner.name, adapter)
        return Page(data=shown.versions, has_more=False)

    @get("/{name:str}/versions/{version:int}", guards=OWN)
    async def show_version(
        self,
        request: AdminRequest,
        name: FromPath[str],
        version: FromPath[int],
        tenant: FromQuery[str | None] = None,
    ) -> VersionView:
        async with request.plane.database.acquire() as connection:
            owner = await tenant_for(connection, request.user, tenant)
            found = await adapters.find_version(connection, owner.id, name, version)
            return _view(found, await adapters.list_aliases(connection, owner.id, name))

    @delete("/{name:str}/versions/{version:int}", guards=OWN, status_code=200)
    async def delete_version(
        self,
        request: AdminRequest,
        name: FromPath[str],
        version: FromPath[int],
        tenant: FromQuery[str | None] = None,
    ) -> Deleted:
        """409 while an alias points to it."""
        async with request.plane.database.transaction() as connection:
            owner = await tenant_for(connection, request.user, tenant)
            doomed = await adapters.delete_version(connection, owner.id, name, version)
        if doomed.digest:
            await request.plane.discard_unused({doomed.digest})
        return Deleted(f"{name}@{version}")

    @get("/{name:str}/aliases/{alias:str}", guards=OWN)
    async def show_alias(
        self,
        request: AdminRequest,
        name: FromPath[str],
        alias: FromPath[str],
        tenant: FromQuery[str | None] = None,
    ) -> AliasView:
        """With its history."""
        async with request.plane.database.acquire() as connection:
            owner = await tenant_for(connection, request.user, tenant)
            current = await adapters.find_alias(connection, owner.id, name, alias)
            history = await adapters.alias_history(connection, owner.id, name, alias)
        return _alias_view(current, history)

    @put("/{name:str}/aliases/{alias:str}", guards=OWN)
    async def set_alias(
        self,
        request: AdminRequest,
        name: FromPath[str],
        alias: FromPath[str],
        data: JSONBody[AliasSet],
        tenant: FromQuery[str | None] = None,
    ) -> AliasView:
        """Promote or roll back: in one step, for every request from then on."""
        async with request.plane.database.transaction() as connection:
            owner = await tenant_for(connection, request.user, tenant)
            current = await adapters.set_alias(
                connection, owner.id, name, alias, data.version, request.user.id
            )
            history = await adapters.alias_history(connection, owner.id, name, alias)
        return _alias_view(current, history)


async def _describe(
    connection: Connection, tenant_id: str, tenant_name: str, adapter: adapters.Adapter
) -> AdapterView:
    aliases = await adapters.list_aliases(connection, tenant_id, adapter.name)
    versions = await adapters.list_versions(connection, tenant_id, adapter.name)
    return AdapterView(
        name=adapter.name,
        tenant=tenant_name,
        created_at=adapter.created_at,
        aliases={alias.alias: alias.version for alias in aliases},
        versions=[_view(version, aliases) for version in versions],
    )


def _view(version: AdapterVersion, aliases: list[Alias]) -> VersionView:
    names = [alias.alias for alias in aliases if alias.version == version.version]
    return VersionView.of(version, names)


def _alias_view(current: Alias | None, history: list[adapters.AliasMove]) -> AliasView:
    if current is None:
        raise NotFound("no such alias", "alias_not_found")
    moves = [AliasMoveView(m.version, m.previous, m.changed_by, m.changed_at) for m in history]
    return AliasView(current.name, current.alias, current.version, moves)
