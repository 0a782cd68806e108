"""Aliases: point to a version or a canary set, roll back, pin.

An admin key says whose with `tenant`.
"""

from __future__ import annotations

from typing import Annotated

from litestar import Controller, Response, delete, get, post, put
from litestar.params import FromPath, FromQuery, HeaderParameter, JSONBody

from admin import aliases
from admin.adapter_views import AliasSet, AliasView
from admin.describe import describe_alias
from admin.errors import Invalid
from admin.guards import ADAPTERS_WRITE, ADMIN, requires, tenant_for
from admin.records import CanaryPolicy
from admin.request import AdminRequest
from admin.schemas import Deleted

OWN = [requires(ADMIN, ADAPTERS_WRITE)]
IfMatch = Annotated[str | None, HeaderParameter(name="If-Match")]


class AliasController(Controller):
    path = "/adapters/{name:str}/aliases/{alias:str}"

    @get(guards=OWN)
    async def show_alias(
        self,
        request: AdminRequest,
        name: FromPath[str],
        alias: FromPath[str],
        tenant: FromQuery[str | None] = None,
    ) -> Response[AliasView]:
        """With its history."""
        async with request.reading() as connection:
            owner = await tenant_for(connection, request.user, tenant)
            return _answer(await describe_alias(connection, owner, name, alias))

    @put(guards=OWN)
    async def set_alias(
        self,
        request: AdminRequest,
        name: FromPath[str],
        alias: FromPath[str],
        data: JSONBody[AliasSet],
        tenant: FromQuery[str | None] = None,
        if_match: IfMatch = None,
    ) -> Response[AliasView]:
        """Promote a version or start a canary: in one step, for every request from then on."""
        expected = _parse_etag(if_match)
        async with request.transaction() as connection:
            owner = await tenant_for(connection, request.user, tenant)
            key = (connection, owner.id, name, alias)
            if data.version is not None and data.canary is None and not data.policy:
                await aliases.set_alias(*key, data.version, request.user.id, expected=expected)
            elif data.canary is not None and data.version is None:
                policy = data.policy if isinstance(data.policy, CanaryPolicy | None) else _DEFAULT
                await aliases.set_canary(
                    *key, data.canary, policy, request.user.id, expected=expected
                )
            else:
                raise Invalid("give a version, or a canary set with or without a policy")
            return _answer(await describe_alias(connection, owner, name, alias))

    @delete(guards=OWN, status_code=200)
    async def delete_alias(
        self,
        request: AdminRequest,
        name: FromPath[str],
        alias: FromPath[str],
        tenant: FromQuery[str | None] = None,
    ) -> Deleted:
        """409 for `prod`, which goes with the adapter."""
        async with request.transaction() as connection:
            owner = await tenant_for(connection, request.user, tenant)
            await aliases.delete_alias(connection, owner.id, name, alias, request.user.id)
        return Deleted(f"{name}@{alias}")

    @post("/rollback", guards=OWN, status_code=200)
    async def roll_back(
        self,
        request: AdminRequest,
        name: FromPath[str],
        alias: FromPath[str],
        tenant: FromQuery[str | None] = None,
    ) -> Response[AliasView]:
        """Undo the last move: back to the version or canary set before it."""
        async with request.transaction() as connection:
            owner = await tenant_for(connection, request.user, tenant)
            await aliases.roll_back(connection, owner.id, name, alias, request.user.id)
            return _answer(await describe_alias(connection, owner, name, alias))

    @put("/pin", guards=OWN)
    async def pin(
        self,
        request: AdminRequest,
        name: FromPath[str],
        alias: FromPath[str],
        tenant: FromQuery[str | None] = None,
    ) -> Response[AliasView]:
        """Keep what it points to on the device, now and after every move; 409 beyond the quota."""
        return await _pin(request, name, alias, tenant, True)

    @delete("/pin", guards=OWN, status_code=200)
    async def unpin(
        self,
        request: AdminRequest,
        name: FromPath[str],
        alias: FromPath[str],
        tenant: FromQuery[str | None] = None,
    ) -> Response[AliasView]:
        return await _pin(request, name, alias, tenant, False)


_DEFAULT = CanaryPolicy()


async def _pin(
    request: AdminRequest, name: str, alias: str, tenant: str | None, pinned: bool
) -> Response[AliasView]:
    async with request.transaction() as connection:
        owner = await tenant_for(connection, request.user, tenant)
        await aliases.pin_alias(connection, owner.id, name, alias, pinned)
        return _answer(await describe_alias(connection, owner, name, alias))


def _answer(view: AliasView) -> Response[AliasView]:
    return Response(view, headers={"etag": f'"{view.change}"'})


def _parse_etag(given: str | None) -> int | None:
    """The `change` that an If-Match header asks for. Raises Invalid."""
    if given is None:
        return None
    if not given.strip('"').isdecimal():
        raise Invalid("If-Match takes the ETag of the alias", "invalid_etag", "If-Match")
    return int(given.strip('"'))
