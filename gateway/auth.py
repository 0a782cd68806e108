"""API keys to tenants, from memory alone. Each route declares a guard of this file."""

from __future__ import annotations

import hmac
from collections.abc import Awaitable, Callable
from datetime import UTC, datetime
from typing import Any

import msgspec
from litestar.connection import ASGIConnection
from litestar.handlers import BaseRouteHandler

from admin.records import ApiKey, Tenant, hash_key, parse_key
from gateway.catalog import CatalogView
from gateway.errors import Forbidden, Unauthenticated

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
        view: CatalogView = connection.app.state.gateway.catalog.current
        pepper: bytes = connection.app.state.gateway.config.pepper
        key = authenticate(view, pepper, connection.headers.get("authorization"))
        connection.scope["user"] = authorize(view, key, scope)

    return guard
