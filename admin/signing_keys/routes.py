"""Routes of signing keys: register, list, show, revoke.

A request with an admin key must name the tenant in the parameter `tenant`.
"""

from __future__ import annotations

from admin.http.entities import Entity
from admin.http.guards import ADAPTERS_WRITE, ADMIN
from admin.signing_keys import signing_keys
from admin.signing_keys.schemas import SigningKeyCreate
from admin.signing_keys.signing_keys import SigningKeyView
from store.database import Connection
from store.records import Caller

SIGNING_KEYS = Entity(
    *("SigningKey", "/signing-keys", "signing keys", SigningKeyView),
    scopes=(ADMIN, ADAPTERS_WRITE),
)
SIGNING_KEYS.lists(
    name="list_signing_keys", text="Lists signing keys by id, including revoked ones."
)(signing_keys.list_keys)
SIGNING_KEYS.shows("/{signing_key_id:str}", name="show_signing_key", text="")(signing_keys.find_key)
SIGNING_KEYS.changes(
    "DELETE",
    "/{signing_key_id:str}",
    name="revoke_signing_key",
    text="Revokes a signing key permanently. Versions signed with it are still served, and show"
    "\nthat it is revoked.",
)(signing_keys.revoke_key)


@SIGNING_KEYS.changes("POST", status_code=201)
async def create_signing_key(
    connection: Connection, caller: Caller, tenant_id: str, data: SigningKeyCreate
) -> SigningKeyView:
    """Registers an ed25519 public key with which the tenant signs adapters. Once the tenant
    requires signatures, only an admin key may."""
    by_tenant = caller.tenant_id is not None
    return await signing_keys.add_key(
        connection, tenant_id, data.name, data.public_key, by_tenant=by_tenant
    )
