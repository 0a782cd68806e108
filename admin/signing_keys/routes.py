"""Routes of signing keys: register, list, show, revoke.

A request with an admin key must name the tenant in the parameter `tenant`.
"""

from __future__ import annotations

from typing import Annotated, Any, ClassVar

import msgspec

from admin.http.entities import Entity
from admin.http.guards import ADAPTERS_WRITE, ADMIN
from admin.schemas import EntityName
from admin.signing_keys import signing_keys
from admin.signing_keys.signing_keys import SigningKeyView
from store.database import Connection
from store.records import Caller


class SigningKeyCreate(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    example: ClassVar[dict[str, Any]] = {
        "name": "ci",
        "public_key": "ssh-ed25519 "
        "AAAAC3NzaC1lZDI1NTE5AAAAIDVnJTvNA4nBN9QkhXyTEJm8n/ZPXkcpECxk/G8sjLv7",
    }
    name: EntityName
    public_key: Annotated[str, msgspec.Meta(min_length=1, max_length=1024)]
    """Ed25519 public key in PEM, or in OpenSSH's format (`ssh-ed25519 ...`)."""


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
