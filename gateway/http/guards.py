"""Guard of routes that a tenant's key with a scope may call. Other routes are public."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from functools import partial
from typing import Any

from litestar.handlers import BaseRouteHandler

from gateway.catalog.auth import authenticate, authorize, may_be_newer
from gateway.limits.admission import RequestCharge
from gateway.limits.tenant_load import MAX_DELAY_S
from gateway.requests.services import Gateway
from store.errors import ApiError
from store.records import ApiKey
from web.body_budget import held_body
from web.client_address import check_address
from web.error_answers import CLOSES
from web.errors import Forbidden, Overloaded, Unauthenticated
from web.guards import Guard, HttpConnection
from web.headers import ON_ANSWER, announced_bytes, find_header

INFERENCE = "inference"
CHARGE = "request_charge"
"""Key in a request's state for its RequestCharge."""
UNCONFIRMED = "This API key is not known yet, and the gateway cannot reach its database to look."


def find_key(gateway: Gateway, scope: Any, authorization: str | None) -> ApiKey:
    """Returns the valid key of an Authorization header. Raises Unauthenticated, or Forbidden if the
    key may not be used from the client's address."""
    view, now = gateway.catalog.current, gateway.clock.moment
    key = authenticate(view, gateway.config.pepper, authorization, now)
    check_address(key, scope)
    return key


def _authorization(scope: Any) -> str | None:
    """Returns the `authorization` header, made from Anthropic's `x-api-key` if it is missing."""
    given = find_header(scope, b"authorization")
    if given is None and (key := find_header(scope, b"x-api-key")) is not None:
        return f"Bearer {key}"
    return given


def requires(scope: str, *, on_worker: bool = False) -> Guard:
    """Returns a guard that accepts a tenant's key with the scope, charges the request to the key's
    and the tenant's limits, and stores the Principal as `request.user`. `on_worker`: whether a
    worker runs the request, so that it also counts as a concurrent request."""

    async def guard(connection: HttpConnection, _handler: BaseRouteHandler) -> None:
        gateway: Gateway = connection.app.state["gateway"]
        view = gateway.catalog.current
        header = _authorization(connection.scope)
        try:
            key = find_key(gateway, connection.scope, header)
            principal = authorize(view, key, scope)
        except (Unauthenticated, Forbidden) as error:
            is_unknown = isinstance(error, Unauthenticated)
            if is_unknown and gateway.catalog.unconfirmed_s > 0 and may_be_newer(view, header):
                raise Overloaded(UNCONFIRMED, code="key_unconfirmed") from error
            gateway.refused_keys.note(connection.scope, header, error)
            raise
        connection.scope["user"] = principal
        gateway.key_uses.note(key.id)
        body = held_body(connection.scope)
        body.charge(principal.tenant.id)
        # The charge is stored before it is made, so that a refusal also reports the limits.
        charge = gateway.admission.charge(principal, body)
        state = connection.scope["state"]
        state[CHARGE] = charge
        state[ON_ANSWER] = partial(_settle, charge)
        try:
            await charge.take(announced_bytes(connection.scope), on_worker=on_worker)
        except ApiError:
            # A delayed refusal keeps the body in memory, so it is delayed only if there is room.
            if body.excess is None:
                await _wait_for_turn(gateway, principal.tenant.id, state)
            raise

    return guard


def _settle(charge: RequestCharge, status: int, is_ours: bool) -> Mapping[str, str]:
    """Settles the charge of a request when its answer begins. Returns the headers that report the
    caller's limits."""
    charge.settle(status, is_ours=is_ours)
    return charge.headers()


async def _wait_for_turn(gateway: Gateway, tenant_id: str, state: dict[str, Any]) -> None:
    """Delays the refusal of a request whose body is not read, to limit the tenant's rate of such
    refusals. If the delay is `MAX_DELAY_S`, the connection is closed after the refusal."""
    delay_s = gateway.refusals.delay_s(tenant_id)
    if delay_s >= MAX_DELAY_S:
        state[CLOSES] = True
    if delay_s:
        await asyncio.sleep(delay_s)
