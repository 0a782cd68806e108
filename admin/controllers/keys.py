"""API keys: create (shown once), list, revoke."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Annotated

from litestar import Controller, delete, get, post
from litestar.params import FromPath, FromQuery, JSONBody, Parameter

from admin import tenants
from admin.errors import Invalid
from admin.guards import ADMIN, requires
from admin.records import ADMIN_SCOPES, TENANT_SCOPES, Tenant
from admin.request import AdminRequest
from admin.schemas import KeyCreate, KeyCreated, KeyView, Page, page


class KeyController(Controller):
    path = "/"

    @post("/tenants/{tenant:str}/keys", guards=[requires(ADMIN)])
    async def create_key(
        self, request: AdminRequest, tenant: FromPath[str], data: JSONBody[KeyCreate]
    ) -> KeyCreated:
        """A key of a tenant. Its text is in this answer and nowhere else."""
        async with request.plane.database.acquire() as connection:
            owner = await tenants.find_tenant(connection, tenant)
        return await create(request, owner, data, TENANT_SCOPES)

    @get("/tenants/{tenant:str}/keys", guards=[requires(ADMIN)])
    async def list_keys(
        self,
        request: AdminRequest,
        tenant: FromPath[str],
        after: FromQuery[str] = "",
        limit: Annotated[FromQuery[int], Parameter(ge=1, le=1000)] = 100,
    ) -> Page[KeyView]:
        """By id, revoked and expired ones too."""
        async with request.plane.database.acquire() as connection:
            owner = await tenants.find_tenant(connection, tenant)
            keys = await tenants.list_keys(connection, owner.id, after, limit + 1)
        return page([KeyView.of(key) for key in keys], limit)

    @post("/keys", guards=[requires(ADMIN)])
    async def create_admin_key(
        self, request: AdminRequest, data: JSONBody[KeyCreate]
    ) -> KeyCreated:
        """An admin key: it manages, it does not infer."""
        return await create(request, None, data, ADMIN_SCOPES)

    @get("/keys", guards=[requires(ADMIN)])
    async def list_admin_keys(
        self,
        request: AdminRequest,
        after: FromQuery[str] = "",
        limit: Annotated[FromQuery[int], Parameter(ge=1, le=1000)] = 100,
    ) -> Page[KeyView]:
        async with request.plane.database.acquire() as connection:
            keys = await tenants.list_keys(connection, None, after, limit + 1)
        return page([KeyView.of(key) for key in keys], limit)

    @delete("/keys/{key_id:str}", guards=[requires(ADMIN)], status_code=200)
    async def revoke_key(self, request: AdminRequest, key_id: FromPath[str]) -> KeyView:
        """For good. The record stays."""
        async with request.plane.database.transaction() as connection:
            return KeyView.of(await tenants.revoke_key(connection, key_id))


async def create(
    request: AdminRequest, owner: Tenant | None, data: JSONBody[KeyCreate], allowed: frozenset[str]
) -> KeyCreated:
    """Raises Invalid for a scope its kind of key cannot have and for an expiry that has passed."""
    scopes = allowed if data.scopes is None else data.scopes
    if not scopes or not scopes <= allowed:
        raise Invalid(f"scopes can be {', '.join(sorted(allowed))}", "invalid_scope", "scopes")
    if data.expires_at is not None and data.expires_at <= datetime.now(UTC):
        raise Invalid("expires_at has passed", "invalid_expiry", "expires_at")
    async with request.plane.database.transaction() as connection:
        key, text = await tenants.create_key(
            connection,
            request.plane.config.pepper,
            owner.id if owner else None,
            scopes,
            data.name,
            data.expires_at,
        )
    return KeyCreated(key=text, record=KeyView.of(key))
