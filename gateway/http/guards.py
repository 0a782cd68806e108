"""The guards that each route declares: public, or a tenant's key with a scope."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

from litestar.connection import ASGIConnection
from litestar.handlers import BaseRouteHandler

from admin.client_address import client_address
from gateway.catalog.auth import authenticate, authorize, check_address, may_be_newer
from gateway.exceptions import Overloaded, Unauthenticated
from gateway.headers import find_header
from gateway.http.services import Gateway

Connection = ASGIConnection[Any, Any, Any, Any]
Guard = Callable[[Connection, BaseRouteHandler], Awaitable[None]]

INFERENCE = "inference"
CHARGE = "request_charge"
"""Key of a request's state: its RequestCharge, where its tenant or key has limits."""
UNCONFIRMED = "This API key is not known yet, and the gateway cannot reach its database to look."


async def public(_connection: Connection, _handler: BaseRouteHandler) -> None:
    """The guard of a route that needs no key."""


def _authorization(scope: Any) -> str | None:
    """The header with the key; Anthropic's clients give it as `x-api-key`."""
    given = find_header(scope, b"authorization")
    if given is None and (key := find_header(scope, b"x-api-key")) is not None:
        return f"Bearer {key}"
    return given


def requires(scope: str) -> Guard:
    """A guard that lets a tenant's key with the scope pass, takes one of the requests that its
    limits allow, and leaves its Principal as `request.user`."""

    async def guard(connection: Connection, _handler: BaseRouteHandler) -> None:
        gateway: Gateway = connection.app.state["gateway"]
        view = gateway.catalog.current
        header = _authorization(connection.scope)
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
