"""Routes of API keys: create and rotate (text shown once), list, show, revoke."""

from __future__ import annotations

import ipaddress
from datetime import UTC, datetime

import msgspec
from litestar import Controller, Response, delete, get, post
from litestar.params import FromPath, JSONBody

from admin.http.entities import page, read_page, reading_of
from admin.http.guards import ADMIN, requires
from admin.http.idempotency import IdempotencyKey, once
from admin.http.parameters import After, Limit
from admin.http.preconditions import IfMatch, Tagged, etag, locked, tagged
from admin.http.request import AdminRequest
from admin.keys import keys
from admin.keys.keys import KeyRights
from admin.keys.schemas import KeyCreate, KeyCreated, KeyRotate, KeyView
from admin.schemas import Page, shown
from admin.tenants import tenants
from store.database import Connection
from store.errors import Invalid
from store.records import ADMIN_SCOPES, TENANT_SCOPES, ApiKey, new_key, plain_model


class KeyController(Controller):
    path = "/"
    tags = ("keys",)
    guards = (requires(ADMIN),)

    @post("/tenants/{tenant:str}/keys")
    async def create_key(
        self,
        request: AdminRequest,
        tenant: FromPath[str],
        data: JSONBody[KeyCreate],
        idempotency_key: IdempotencyKey = None,
    ) -> Response[KeyCreated]:
        """Creates a key of a tenant. Only this answer contains the key's text."""
        return await _create(request, idempotency_key, data, tenant)

    @get("/tenants/{tenant:str}/keys")
    async def list_keys(
        self,
        request: AdminRequest,
        tenant: FromPath[str],
        after: After = "",
        limit: Limit = 100,
    ) -> Page[KeyView]:
        """Lists a tenant's keys by id, including revoked and expired ones."""
        async with reading_of(request, tenant) as (connection, owner):
            found = await keys.list_keys(connection, owner.id, after, limit + 1)
        return page([KeyView.of(key) for key in found], limit)

    @post("/keys")
    async def create_admin_key(
        self,
        request: AdminRequest,
        data: JSONBody[KeyCreate],
        idempotency_key: IdempotencyKey = None,
    ) -> Response[KeyCreated]:
        """Creates an admin key, which can manage but cannot be used for inference."""
        if data.models is not None:
            raise Invalid("an admin key infers with no model", "invalid_models", "models")
        return await _create(request, idempotency_key, data, None)

    @get("/keys")
    async def list_admin_keys(
        self, request: AdminRequest, after: After = "", limit: Limit = 100
    ) -> Page[KeyView]:
        return await read_page(request, limit, KeyView.of, keys.list_keys, None, after)

    @get("/keys/{key_id:str}")
    async def show_key(self, request: AdminRequest, key_id: FromPath[str]) -> Tagged[KeyView]:
        """Shows a key without its text. The ETag does not cover its last use."""
        async with request.reading() as connection:
            return _tagged(await keys.get_key(connection, key_id))

    @post("/keys/{key_id:str}/rotate")
    async def rotate_key(
        self,
        request: AdminRequest,
        key_id: FromPath[str],
        data: JSONBody[KeyRotate],
        idempotency_key: IdempotencyKey = None,
        if_match: IfMatch = None,
    ) -> Response[KeyCreated]:
        """Creates a key with the same rights, whose text only this answer contains. The old key
        expires after `overlap_s` seconds."""

        async def create(connection: Connection, seed: bytes) -> KeyView:
            _check_ahead(data.expires_at)
            await locked(connection, if_match, _without_use, keys.get_key, key_id)
            pepper = request.plane.config.pepper
            made = await keys.rotate_key(
                connection, pepper, key_id, data.overlap_s, data.expires_at, seed
            )
            return KeyView.of(made[0])

        return await once(request, idempotency_key, create, _with_text)

    @delete("/keys/{key_id:str}", status_code=200)
    async def revoke_key(
        self, request: AdminRequest, key_id: FromPath[str], if_match: IfMatch = None
    ) -> Tagged[KeyView]:
        """Revokes a key permanently. Its record is kept. No gateway accepts the key if the answer's
        header `loraplex-gateways-behind` is 0. Otherwise that many gateways may accept it until
        they load the catalog, for at most `catalog_stale_s`."""
        async with request.transaction() as connection:
            await locked(connection, if_match, _without_use, keys.get_key, key_id)
            revoked = await keys.revoke_key(connection, key_id)
        return _tagged(revoked)


async def _create(
    request: AdminRequest, idempotency_key: str | None, data: KeyCreate, tenant: str | None
) -> Response[KeyCreated]:
    """Creates a key of the tenant, or an admin key if `tenant` is None."""

    async def create(connection: Connection, seed: bytes) -> KeyView:
        rights = _rights(data, ADMIN_SCOPES if tenant is None else TENANT_SCOPES)
        owner_id = None
        if tenant is not None:
            owner_id = (await tenants.find_tenant(connection, tenant)).id
        pepper = request.plane.config.pepper
        made = await keys.issue_key(connection, pepper, owner_id, rights, seed=seed)
        return KeyView.of(made[0])

    return await once(request, idempotency_key, create, _with_text)


def _with_text(record: bytes, seed: bytes) -> bytes:
    """Returns the answer with the key's text, which is derived from the seed, not stored."""
    made = {"key": new_key(seed).text, "record": msgspec.Raw(record), "object": "api_key.created"}
    return msgspec.json.encode(made)


def _without_use(key: ApiKey) -> KeyView:
    """Returns a key's view without the time of its last use, which the ETag does not cover."""
    return msgspec.structs.replace(KeyView.of(key), last_used_at=None)


def _tagged(key: ApiKey) -> Tagged[KeyView]:
    return tagged(KeyView.of(key), etag(_without_use(key)))


def _rights(data: KeyCreate, allowed: frozenset[str]) -> KeyRights:
    """Returns the rights of a new key from a request's body. Raises Invalid, for example if the
    body has a scope that is not in `allowed`."""
    scopes = allowed if data.scopes is None else data.scopes
    if not scopes or not scopes <= allowed:
        raise Invalid(f"scopes can be {', '.join(sorted(allowed))}", "invalid_scope", "scopes")
    _check_ahead(data.expires_at)
    if data.expires_at and data.not_before and data.expires_at <= data.not_before:
        raise Invalid("expires_at is not after not_before", "invalid_expiry", "expires_at")
    return shown(
        KeyRights,
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
