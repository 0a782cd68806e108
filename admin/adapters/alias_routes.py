"""Routes of aliases: point to a version or a canary, roll back, pin.

A request with an admin key must name the tenant in the parameter `tenant`.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager

from litestar import Controller, delete, get, post, put
from litestar.params import FromPath, JSONBody

from admin.adapters import aliases
from admin.adapters.schemas import AliasSet, AliasView
from admin.http import preconditions
from admin.http.entities import changing_of, reading_of
from admin.http.guards import ADAPTERS_WRITE, ADMIN, requires
from admin.http.parameters import TenantName
from admin.http.preconditions import IfMatch, Tagged, tagged
from admin.http.request import AdminRequest
from admin.schemas import Deleted, shown
from store.database import Connection
from store.errors import Invalid
from store.records import CanaryPolicy, Tenant


class AliasController(Controller):
    path = "/adapters/{name:str}/aliases/{alias:str}"
    tags = ("adapters",)
    guards = (requires(ADMIN, ADAPTERS_WRITE),)

    @get()
    async def show_alias(
        self,
        request: AdminRequest,
        name: FromPath[str],
        alias: FromPath[str],
        tenant: TenantName = None,
    ) -> Tagged[AliasView]:
        """Shows an alias with its history."""
        async with reading_of(request, tenant) as (connection, owner):
            return tagged(await _describe(connection, owner, name, alias))

    @put()
    async def set_alias(
        self,
        request: AdminRequest,
        name: FromPath[str],
        alias: FromPath[str],
        data: JSONBody[AliasSet],
        tenant: TenantName = None,
        if_match: IfMatch = None,
    ) -> Tagged[AliasView]:
        """Promotes a version or starts a canary in one step, for every later request."""
        async with _changing(request, name, alias, tenant, if_match) as (connection, owner):
            key = (connection, owner.id, name, alias)
            options = {"completions_only": data.completions_only}
            if data.version is not None and data.canary is None and not data.policy:
                await aliases.set_alias(*key, data.version, request.user.id, **options)
            elif data.canary is not None and data.version is None:
                policy = data.policy if isinstance(data.policy, CanaryPolicy | None) else _DEFAULT
                await aliases.set_canary(*key, data.canary, policy, request.user.id, **options)
            else:
                raise Invalid("give a version, or a canary set with or without a policy")
            return tagged(await _describe(connection, owner, name, alias))

    @delete(status_code=200)
    async def delete_alias(
        self,
        request: AdminRequest,
        name: FromPath[str],
        alias: FromPath[str],
        tenant: TenantName = None,
        if_match: IfMatch = None,
    ) -> Deleted:
        """Deletes an alias. 409 for `prod`, which is deleted with its adapter."""
        async with _changing(request, name, alias, tenant, if_match) as (connection, owner):
            await aliases.delete_alias(connection, owner.id, name, alias, request.user.id)
        return Deleted(f"{name}@{alias}")

    @post("/rollback", status_code=200)
    async def roll_back(
        self,
        request: AdminRequest,
        name: FromPath[str],
        alias: FromPath[str],
        tenant: TenantName = None,
        if_match: IfMatch = None,
    ) -> Tagged[AliasView]:
        """Undoes the alias's last move, by restoring the previous version or canary. A second call
        undoes the first, so clients that may repeat the request should send If-Match."""
        async with _changing(request, name, alias, tenant, if_match) as (connection, owner):
            await aliases.roll_back(connection, owner.id, name, alias, request.user.id)
            return tagged(await _describe(connection, owner, name, alias))

    @put("/pin")
    async def pin(
        self,
        request: AdminRequest,
        name: FromPath[str],
        alias: FromPath[str],
        tenant: TenantName = None,
        if_match: IfMatch = None,
    ) -> Tagged[AliasView]:
        """Pins the alias, so that the versions to which it points, now or later, stay on the
        device. 409 if the quota does not allow it."""
        async with _changing(request, name, alias, tenant, if_match) as (connection, owner):
            await aliases.pin_alias(connection, owner.id, name, alias, pinned=True)
            return tagged(await _describe(connection, owner, name, alias))

    @delete("/pin", status_code=200)
    async def unpin(
        self,
        request: AdminRequest,
        name: FromPath[str],
        alias: FromPath[str],
        tenant: TenantName = None,
        if_match: IfMatch = None,
    ) -> Tagged[AliasView]:
        """Unpins the alias: its versions may be evicted from the device."""
        async with _changing(request, name, alias, tenant, if_match) as (connection, owner):
            await aliases.pin_alias(connection, owner.id, name, alias, pinned=False)
            return tagged(await _describe(connection, owner, name, alias))


_DEFAULT = CanaryPolicy()


@asynccontextmanager
async def _changing(
    request: AdminRequest, name: str, alias: str, tenant: str | None, if_match: str | None
) -> AsyncGenerator[tuple[Connection, Tenant]]:
    """Opens a transaction that changes the alias. Raises PreconditionFailed if `if_match` does not
    match. Yields the connection and the alias's tenant."""
    async with changing_of(request, tenant) as (connection, owner):
        await preconditions.lock(connection, if_match, _describe, owner, name, alias)
        yield connection, owner


async def _describe(connection: Connection, tenant: Tenant, name: str, alias: str) -> AliasView:
    current = await aliases.find_alias(connection, tenant.id, name, alias)
    history = await aliases.alias_history(connection, tenant.id, name, alias)
    return shown(AliasView, current, history=history)
