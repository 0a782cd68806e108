"""Guards that check the caller's key and the scopes of each route. The key is looked up on every
call.

A test checks that every route has a guard of this file.
"""

from __future__ import annotations

import hmac
from datetime import UTC, datetime
from typing import cast

from litestar.handlers import BaseRouteHandler
from litestar.types import HTTPScope

from admin.keys.lookup import KeyLookup
from admin.tenants import tenants
from store.database import Connection
from store.errors import Invalid, NotFound
from store.records import ApiKey, Caller, Tenant, hash_key, parse_key
from web.errors import Forbidden, Unauthenticated
from web.guards import INCORRECT, Guard, HttpConnection
from web.held_bytes import held_body
from web.request_head import bearer_key, check_address

ADMIN = "admin"
ADAPTERS_WRITE = "adapters:write"
USAGE_READ = "usage:read"
OPERATOR = "admin"
"""Owner, in the body budget, of request bodies sent with an admin key, which has no tenant."""
_NO_HASH = bytes(32)


def requires(*scopes: str, changes_rows: bool = True) -> Guard:
    """Returns a guard that accepts keys with one of the scopes, and stores the caller as
    `request.user`. Calls with tenants' keys are rate limited. A call counts as a change, unless it
    is a GET or HEAD or `changes_rows` is false."""

    async def guard(connection: HttpConnection, _handler: BaseRouteHandler) -> None:
        plane = connection.app.state.admin
        header = connection.headers.get("authorization")
        with plane.refused_keys.noting(connection.scope, header):
            key = await authenticate(plane.key_lookup, plane.config.pepper, header)
            check_address(key, connection.scope)
            caller = key.caller
            if caller.scopes.isdisjoint(scopes):
                raise Forbidden(f"This API key lacks the scope {' or '.join(scopes)}.")
        if caller.tenant_id is not None:
            is_read = cast(HTTPScope, connection.scope)["method"] in ("GET", "HEAD")
            plane.tenant_rates.take(caller.tenant_id, is_write=changes_rows and not is_read)
        plane.key_uses.note(key.id)
        held_body(connection.scope).charge(caller.tenant_id or OPERATOR)
        connection.scope["user"] = caller

    guard.__dict__["scopes"] = scopes
    return guard


async def authenticate(lookup: KeyLookup, pepper: bytes, authorization: str | None) -> ApiKey:
    """Returns the valid key in an Authorization header. Raises Unauthenticated if it has none."""
    text = bearer_key(authorization) or ""
    key_id = parse_key(text)
    if key_id is None:
        raise Unauthenticated("Give an API key in the header 'Authorization: Bearer lpx_...'.")
    key = await lookup.find(key_id)
    # An unknown id is compared too, so that refusing it takes as long as refusing a known id.
    matches = hmac.compare_digest(hash_key(text, pepper), key.hash if key else _NO_HASH)
    if key is None or not matches or not key.is_live(datetime.now(UTC)):
        raise Unauthenticated(INCORRECT)
    return key


async def tenant_for(connection: Connection, caller: Caller, reference: str | None) -> Tenant:
    """Returns the tenant that the caller refers to. A tenant's key can only refer to its own
    tenant.

    Raises NotFound for another tenant, as if it did not exist. Raises Invalid if an admin key is
    used without a `reference`.
    """
    if caller.tenant_id is None:
        if not reference:
            raise Invalid("an admin key must say whose: give 'tenant'", "tenant_missing", "tenant")
        return await tenants.find_tenant(connection, reference)
    own = await tenants.find_tenant(connection, caller.tenant_id)
    if reference and reference not in (own.id, own.name):
        raise NotFound(f"no tenant {reference[:128]!r}", "tenant_not_found", "tenant")
    return own
