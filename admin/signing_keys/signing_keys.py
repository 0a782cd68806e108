"""Public keys with which a tenant signs its adapters: register, list, revoke, check a signature.

Functions that write must be called in a transaction.
"""

from __future__ import annotations

import base64
import binascii
from datetime import datetime

import msgspec

from adapters.format.signature import SIGNATURE_BYTES, KeyRefused, is_signed, read_public_key
from store.database import Connection
from store.errors import AlreadyExists, Conflict, Invalid, NotFound
from store.queries import fetch_all, fetch_one, lock_catalog, sql
from store.records import random_base62
from web.errors import Forbidden

MAX_KEYS = 32
"""Maximum number of signing keys of a tenant, including revoked ones, because a signature is
compared with each key."""


class SigningKey(msgspec.Struct, frozen=True):
    id: str
    name: str
    public_key: str
    """Base64 of the 32 bytes of an ed25519 key."""
    created_at: datetime
    revoked_at: datetime | None
    versions: int
    """Number of versions that the key has signed."""


class SigningKeyView(SigningKey, frozen=True):
    object: str = "signing_key"


async def add_key(
    connection: Connection, tenant_id: str, name: str, public_key: str, *, by_tenant: bool
) -> SigningKeyView:
    """Registers a public key.

    `by_tenant` is whether the request was made with a key of the tenant. Once the tenant requires
    signatures, only an admin may add keys, because otherwise a stolen API key would suffice to
    sign. Raises Invalid, Forbidden, AlreadyExists and Conflict.
    """
    await lock_catalog(connection)
    try:
        raw = read_public_key(public_key)
    except KeyRefused as error:
        raise Invalid(f"public_key: {error}", "invalid_public_key", "public_key") from None
    if by_tenant and await connection.fetchval(sql["signature_required"], tenant_id):
        raise Forbidden("This tenant requires signatures: only an admin key may add signing keys.")
    if len(await list_keys(connection, tenant_id, "", None)) >= MAX_KEYS:
        raise Conflict(f"a tenant has at most {MAX_KEYS} signing keys", "too_many_signing_keys")
    values = f"sig_{random_base62(12)}", tenant_id, name, raw
    taken = AlreadyExists("this public key is already registered", param="public_key")
    return await fetch_one(connection, SigningKeyView, "signing_key_insert", *values, missing=taken)


async def list_keys(
    connection: Connection, tenant_id: str, after: str, limit: int | None
) -> list[SigningKeyView]:
    """Returns signing keys by id, beginning after the id `after` and including revoked ones.
    Returns all of them if `limit` is None."""
    return await fetch_all(
        connection, SigningKeyView, "signing_key_list", tenant_id, after, limit, None
    )


async def find_key(connection: Connection, tenant_id: str, signing_key_id: str) -> SigningKeyView:
    """Returns a key. Raises NotFound."""
    missing = NotFound(f"no signing key {signing_key_id[:128]!r}", "signing_key_not_found")
    place = tenant_id, "", None, signing_key_id
    return await fetch_one(connection, SigningKeyView, "signing_key_list", *place, missing=missing)


async def revoke_key(connection: Connection, tenant_id: str, signing_key_id: str) -> SigningKeyView:
    """Revokes a key permanently. Revoking it again has no effect. Raises NotFound."""
    await lock_catalog(connection)
    await find_key(connection, tenant_id, signing_key_id)
    await connection.execute(sql["signing_key_revoke"], tenant_id, signing_key_id)
    return await find_key(connection, tenant_id, signing_key_id)


def parse_signature(text: str | None, field: str = "signature") -> bytes | None:
    """Decodes a signature from the base64 text of a form's field. Raises Invalid."""
    if text is None:
        return None
    try:
        raw = base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError):
        raw = b""
    if len(raw) != SIGNATURE_BYTES:
        raise Invalid(
            f"{field}: not the base64 of {SIGNATURE_BYTES} bytes",
            "signature_invalid",
            field,
        )
    return raw


async def check_signature(
    connection: Connection, tenant_id: str, digest: str, signature: bytes | None
) -> str | None:
    """Returns the id of the key that signed the content, or None if the content is not signed.

    Raises Invalid if the signature is not by one of the tenant's keys or the key is revoked, and
    Forbidden if there is no signature and the tenant requires one. The caller must hold the
    catalog's lock.
    """
    if signature is None:
        if await connection.fetchval(sql["signature_required"], tenant_id):
            raise Forbidden(
                "This tenant requires signed adapters: push with --sign KEYFILE (the field"
                " signature).",
                "signature_required",
            )
        return None
    for key in await list_keys(connection, tenant_id, "", None):
        if is_signed(base64.b64decode(key.public_key), signature, digest):
            if key.revoked_at is not None:
                message = f"signature: made with the key {key.name!r} ({key.id}), which is revoked"
                raise Invalid(message, "signing_key_revoked", "signature")
            return key.id
    raise Invalid(
        f"signature: made with none of the tenant's signing keys, or of another content than"
        f" {digest}",
        "signature_invalid",
        "signature",
    )
