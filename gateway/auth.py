"""API keys to tenants, from memory alone. Each route declares a guard of this file."""

from __future__ import annotations

import hmac
from collections.abc import Awaitable, Callable
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

import msgspec
from litestar.connection import ASGIConnection
from litestar.handlers import BaseRouteHandler

from admin.records import ApiKey, Tenant, hash_key, parse_key
from gateway.errors import Forbidden, Unauthenticated

if TYPE_CHECKING:
    from gateway.app import Gateway
    from gateway.catalog import CatalogView

Connection = ASGIConnection[Any, Any, Any, Any]
Guard = Callable[[Connection, BaseRouteHandler], Awaitable[None]]

INFERENCE = "inference"
NO_HASH = bytes(32)


class Principal(msgspec.Struct, frozen=True):
    """Who asks."""

    tenant: Tenant
    key: ApiKey

    @property
    def cache_domain(self) -> str:
        """Inside one, cached prefixes are shared."""
        group = self.tenant.sharing_group
        return f"tenant:{self.tenant.id}" if group is None else f"group:{group}"

    def may_use(self, model: str) -> bool:
        """Whether the key's list has it; the tenant may lack it none the less."""
        return self.key.may_use(model.removeprefix(f"{self.tenant.name}/"))


def authenticate(view: CatalogView, pepper: bytes, authorization: str | None) -> ApiKey:
    """The valid key of an Authorization header; Unauthenticated, whatever is wrong with it."""
    scheme, _, text = (authorization or "").partition(" ")
    text = text.strip()
    if scheme.lower() != "bearer" or not text:
        raise Unauthenticated("Give your API key in the header 'Authorization: Bearer lpx_...'.")
    key_id = parse_key(text)
    key = view.keys.get(key_id) if key_id else None
    # An unknown id costs what a known one does.
    matches = key_id is not None and hmac.compare_digest(
        hash_key(text, pepper), key.hash if key else NO_HASH
    )
    if key is None or not matches or not key.is_live(datetime.now(UTC)):
        raise Unauthenticated("Incorrect API key provided.")
    return key


def check_address(key: ApiKey, host: str | None) -> None:
    """Forbidden unless the key may be used from there. `host` is the peer of the connection, or
    who a trusted proxy says it speaks for: gateway/server.py decides."""
    if not key.may_come_from(host):
        raise Forbidden("This API key may not be used from this address.", code="ip_not_allowed")


def authorize(view: CatalogView, key: ApiKey, scope: str) -> Principal:
    """Forbidden unless it is a tenant's key with the scope: an admin key does no inference."""
    tenant = view.tenants.get(key.tenant_id) if key.tenant_id else None
    if tenant is None or scope not in key.scopes:
        raise Forbidden(f"This API key lacks the scope '{scope}' for this.")
    return Principal(tenant=tenant, key=key)


async def public(_connection: Connection, _handler: BaseRouteHandler) -> None:
    """The guard of routes that need no key."""


def requires(scope: str) -> Guard:
    """Lets tenant keys with the scope pass and leaves their Principal as `request.user`."""

    async def guard(connection: Connection, _handler: BaseRouteHandler) -> None:
        gateway: Gateway = connection.app.state.gateway
        view = gateway.catalog.current
        key = authenticate(view, gateway.config.pepper, connection.headers.get("authorization"))
        check_address(key, connection.client.host if connection.client else None)
        connection.scope["user"] = authorize(view, key, scope)
        gateway.key_uses.note(key.id)

    return guard
