"""API keys to tenants, from memory alone. Each route declares a guard of this file."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

import msgspec
from litestar.connection import ASGIConnection
from litestar.handlers import BaseRouteHandler

from admin.client_address import client_address
from admin.records import ApiKey, Tenant, hash_key, parse_key
from gateway.exceptions import Forbidden, Overloaded, Unauthenticated
from gateway.headers import find_header

if TYPE_CHECKING:
    from gateway.app import Gateway
    from gateway.catalog.catalog import CatalogView

Connection = ASGIConnection[Any, Any, Any, Any]
Guard = Callable[[Connection, BaseRouteHandler], Awaitable[None]]

INFERENCE = "inference"
INCORRECT = "Incorrect API key provided."
CHARGE = "request_charge"
"""Key of a request's state: its RequestCharge, where its tenant or key has limits."""
UNCONFIRMED = "This API key is not known yet, and the gateway cannot reach its database to look."


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
    """The valid key of an Authorization header. Raises Unauthenticated in the same words, whatever
    is wrong with it.

    Keys are found by their keyed hash, never compared: who lacks any part of a key cannot choose
    what is looked up, so the time it takes says nothing of what was right.
    """
    key = view.keys_by_hash.get(hash_key(_bearer(authorization), pepper))
    if key is None or not key.is_live(datetime.now(UTC)):
        raise Unauthenticated(INCORRECT)
    return key


def may_be_newer(view: CatalogView, authorization: str | None) -> bool:
    """Whether the header's key is well formed and its id not in the view."""
    key_id = parse_key(_bearer(authorization))
    return key_id is not None and key_id not in view.keys


def _bearer(authorization: str | None) -> str:
    """Raises Unauthenticated."""
    scheme, _, text = (authorization or "").partition(" ")
    text = text.strip()
    if scheme.lower() != "bearer" or not text:
        raise Unauthenticated("Give your API key in the header 'Authorization: Bearer lpx_...'.")
    return text


def check_address(key: ApiKey, address: str | None) -> None:
    """Raises Forbidden unless the key may be used from the client's address."""
    if not key.may_come_from(address):
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
    """Lets tenant keys with the scope pass, for one of the requests that their limits allow, and
    leaves their Principal as `request.user`."""

    async def guard(connection: Connection, _handler: BaseRouteHandler) -> None:
        gateway: Gateway = connection.app.state["gateway"]
        view = gateway.catalog.current
        header = find_header(connection.scope, b"authorization")
        try:
            key = authenticate(view, gateway.config.pepper, header)
        except Unauthenticated as error:
            if gateway.catalog.unconfirmed_s == 0 or not may_be_newer(view, header):
                raise
            raise Overloaded(UNCONFIRMED, code="key_unconfirmed") from error
        check_address(key, client_address(connection.scope))
        principal = connection.scope["user"] = authorize(view, key, scope)
        gateway.key_uses.note(key.id)
        charge = gateway.admission.charge(view, principal)
        if charge is not None:
            # Known before it is taken: a refusal, too, tells what is left.
            connection.scope["state"][CHARGE] = charge
            await charge.take()

    return guard
