"""API keys to tenants, from memory alone."""

from __future__ import annotations

from datetime import datetime

from admin.records import ApiKey, hash_key, parse_key
from gateway.catalog.catalog import CatalogView
from gateway.catalog.principal import Principal
from gateway.exceptions import Forbidden, Unauthenticated

INCORRECT = "Incorrect API key provided."


def authenticate(
    view: CatalogView, pepper: bytes, authorization: str | None, now: datetime
) -> ApiKey:
    """The valid key of an Authorization header. Raises Unauthenticated in the same words, whatever
    is wrong with it.

    Keys are found by their keyed hash, never compared: a client that lacks any part of a key cannot
    choose what is looked up, so the time of a refusal says nothing about the key.
    """
    key = view.keys_by_hash.get(hash_key(_bearer(authorization), pepper))
    if key is None or not key.is_live(now):
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
        raise Unauthenticated(
            "Give your API key in the header 'Authorization: Bearer lpx_...', or 'x-api-key'."
        )
    return text


def is_valid(view: CatalogView, key_id: str, now: datetime) -> bool:
    """Whether the key is live and its tenant exists. A key's scopes never change."""
    key = view.keys.get(key_id)
    return key is not None and key.is_live(now) and key.tenant_id in view.tenants


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
