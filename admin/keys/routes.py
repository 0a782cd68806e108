"""Routes of API keys: create and rotate (text shown once), list, show, revoke."""

from __future__ import annotations

import ipaddress
from datetime import UTC, datetime

import msgspec

from admin.http.entities import Entity
from admin.http.request import AdminRequest
from admin.keys import keys
from admin.keys.keys import KeyDetails
from admin.keys.schemas import KeyCreate, KeyCreated, KeyRotate, KeyView
from admin.tenants import tenants
from store.database import Connection
from store.errors import Invalid
from store.records import ADMIN_SCOPES, TENANT_SCOPES, ApiKey, new_key, plain_model

KEYS = Entity(
    *("Key", "/", "keys", KeyView, keys.get_key),
    covers=lambda view: msgspec.structs.replace(view, last_used_at=None),
)


def _with_text(record: bytes, seed: bytes) -> bytes:
    """Returns the answer with the key's text, which is derived from the seed, not stored."""
    made = {"key": new_key(seed).text, "record": msgspec.Raw(record), "object": "api_key.created"}
    return msgspec.json.encode(made)


KEYS.lists(
    "/tenants/{tenant:str}/keys",
    text="Lists a tenant's keys by id, including revoked and expired ones.",
)(keys.list_keys)
KEYS.shows(
    "/keys/{key_id:str}",
    name="show_key",
    text="Shows a key without its text. The ETag does not cover its last use.",
)(keys.get_key)


@KEYS.creates("/tenants/{tenant:str}/keys", answer=KeyCreated, finish=_with_text)
async def create_key(
    request: AdminRequest, connection: Connection, tenant: str, data: KeyCreate, seed: bytes
) -> ApiKey:
    """Creates a key of a tenant. Only this answer contains the key's text."""
    rights = _rights(data, TENANT_SCOPES)
    owner = await tenants.find_tenant(connection, tenant)
    pepper = request.plane.config.pepper
    return (await keys.issue_key(connection, pepper, owner.id, rights, seed=seed))[0]


@KEYS.creates("/keys", answer=KeyCreated, finish=_with_text)
async def create_admin_key(
    request: AdminRequest, connection: Connection, data: KeyCreate, seed: bytes
) -> ApiKey:
    """Creates an admin key, which can manage but cannot be used for inference."""
    if data.models is not None:
        raise Invalid("an admin key infers with no model", "invalid_models", "models")
    rights, pepper = _rights(data, ADMIN_SCOPES), request.plane.config.pepper
    return (await keys.issue_key(connection, pepper, None, rights, seed=seed))[0]


@KEYS.lists("/keys")
async def list_admin_keys(connection: Connection, after: str, limit: int) -> list[KeyDetails]:
    return await keys.list_keys(connection, None, after, limit)


@KEYS.creates("/keys/{key_id:str}/rotate", is_change=True, answer=KeyCreated, finish=_with_text)
async def rotate_key(
    request: AdminRequest, connection: Connection, key_id: str, data: KeyRotate, seed: bytes
) -> ApiKey:
    """Creates a key with the same rights, whose text only this answer contains. The old key
    expires after `overlap_s` seconds."""
    _check_ahead(data.expires_at)
    rotated = key_id, data.overlap_s, data.expires_at, seed
    return (await keys.rotate_key(connection, request.plane.config.pepper, *rotated))[0]


@KEYS.changes("DELETE", "/keys/{key_id:str}")
async def revoke_key(connection: Connection, key_id: str) -> KeyDetails:
    """Revokes a key permanently. Its record is kept. No gateway accepts the key if the answer's
    header `loraplex-gateways-behind` is 0. Otherwise that many gateways may accept it until
    they load the catalog, for at most `catalog_stale_s`."""
    return await keys.revoke_key(connection, key_id)


def _rights(data: KeyCreate, allowed: frozenset[str]) -> KeyCreate:
    """Returns the rights of a new key from a request's body. Raises Invalid, for example if the
    body has a scope that is not in `allowed`."""
    scopes = allowed if data.scopes is None else data.scopes
    if not scopes or not scopes <= allowed:
        raise Invalid(f"scopes can be {', '.join(sorted(allowed))}", "invalid_scope", "scopes")
    _check_ahead(data.expires_at)
    if data.expires_at and data.not_before and data.expires_at <= data.not_before:
        raise Invalid("expires_at is not after not_before", "invalid_expiry", "expires_at")
    return msgspec.structs.replace(
        data,
        scopes=scopes,
        models=None if data.models is None else frozenset(map(plain_model, data.models)),
        cidrs=None if data.cidrs is None else tuple(map(_network, data.cidrs)),
    )


def _check_ahead(expires_at: datetime | None) -> None:
    if expires_at is not None and expires_at <= datetime.now(UTC):
        raise Invalid("expires_at has passed", "invalid_expiry", "expires_at")


def _network(text: str) -> str:
    try:
        return str(ipaddress.ip_network(text))
    except ValueError as error:
        raise Invalid(str(error), "invalid_cidr", "cidrs") from None
