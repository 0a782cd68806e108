"""Routes of signing keys: register, list, show, revoke.

A request with an admin key must name the tenant in the parameter `tenant`.
"""

from __future__ import annotations

from litestar import Controller, delete, get, post
from litestar.params import FromPath, JSONBody

from admin.http.entities import changing_of, page, reading_of
from admin.http.guards import ADAPTERS_WRITE, ADMIN, requires
from admin.http.parameters import After, Limit, TenantName
from admin.http.request import AdminRequest
from admin.schemas import Page
from admin.signing_keys import signing_keys
from admin.signing_keys.schemas import SigningKeyCreate
from admin.signing_keys.signing_keys import SigningKeyView


class SigningKeyController(Controller):
    path = "/signing-keys"
    tags = ("signing keys",)
    guards = (requires(ADMIN, ADAPTERS_WRITE),)

    @post()
    async def create_signing_key(
        self, request: AdminRequest, data: JSONBody[SigningKeyCreate], tenant: TenantName = None
    ) -> SigningKeyView:
        """Registers an ed25519 public key with which the tenant signs adapters. Once the tenant
        requires signatures, only an admin key may."""
        async with changing_of(request, tenant) as (connection, owner):
            by_tenant = request.user.tenant_id is not None
            return await signing_keys.add_key(
                connection, owner.id, data.name, data.public_key, by_tenant=by_tenant
            )

    @get()
    async def list_signing_keys(
        self,
        request: AdminRequest,
        tenant: TenantName = None,
        after: After = "",
        limit: Limit = 100,
    ) -> Page[SigningKeyView]:
        """Lists signing keys by id, including revoked ones."""
        async with reading_of(request, tenant) as (connection, owner):
            found = await signing_keys.list_keys(connection, owner.id, after, limit + 1)
        return page(found, limit)

    @get("/{signing_key_id:str}")
    async def show_signing_key(
        self, request: AdminRequest, signing_key_id: FromPath[str], tenant: TenantName = None
    ) -> SigningKeyView:
        async with reading_of(request, tenant) as (connection, owner):
            return await signing_keys.find_key(connection, owner.id, signing_key_id)

    @delete("/{signing_key_id:str}", status_code=200)
    async def revoke_signing_key(
        self, request: AdminRequest, signing_key_id: FromPath[str], tenant: TenantName = None
    ) -> SigningKeyView:
        """Revokes a signing key permanently. Versions signed with it are still served, and show
        that it is revoked."""
        async with changing_of(request, tenant) as (connection, owner):
            return await signing_keys.revoke_key(connection, owner.id, signing_key_id)
