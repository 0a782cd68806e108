"""Authenticates API keys without querying the database."""

from __future__ import annotations

from datetime import datetime

import msgspec

from gateway.catalog.view import CatalogView
from gateway.quota_types import ORDINARY, Limit, Service
from store.records import ApiKey, Tenant, hash_key, parse_key
from web.errors import Forbidden, Unauthenticated
from web.guards import INCORRECT
from web.headers import bearer_key


class Principal(msgspec.Struct, frozen=True):
    """Caller of a request: a tenant and one of its keys, with what the catalog says about them when
    the request begins. The whole request is limited and served by that."""

    tenant: Tenant
    key: ApiKey
    limits: tuple[Limit, ...] = ()
    """Limits of the tenant and of the key."""
    service: Service = ORDINARY
    cached_weight: int = 100
    """Weight of a cached prompt token toward quotas, in percent of an uncached one."""

    @property
    def cache_domain(self) -> str:
        """Domain within which cached prefixes are shared."""
        group = self.tenant.sharing_group
        return f"tenant:{self.tenant.id}" if group is None else f"group:{group}"

    def may_use(self, model: str) -> bool:
        """Returns whether the key's list of models allows the model. Does not check whether the
        tenant has such a model."""
        return self.key.may_use(model.removeprefix(f"{self.tenant.name}/"))


def authenticate(
    view: CatalogView, pepper: bytes, authorization: str | None, now: datetime
) -> ApiKey:
    """Returns the valid key of an Authorization header. Raises Unauthenticated with the same
    message for every fault.

    A key is looked up by its keyed hash, and key texts are never compared. A client without the
    whole key cannot choose the hash that is looked up, so the time that a refusal takes reveals
    nothing about the key.
    """
    key = view.keys_by_hash.get(hash_key(_bearer(authorization), pepper))
    if key is None or not key.is_live(now):
        raise Unauthenticated(INCORRECT)
    return key


def may_be_newer(view: CatalogView, authorization: str | None) -> bool:
    """Returns whether the header's key may be newer than the view, because it is well formed and
    its id is not in the view."""
    key_id = parse_key(_bearer(authorization))
    return key_id is not None and key_id not in view.keys


def _bearer(authorization: str | None) -> str:
    """Returns the text of the key in an Authorization header. Raises Unauthenticated if the header
    has no key."""
    text = bearer_key(authorization)
    if text is None:
        raise Unauthenticated(
            "Give your API key in the header 'Authorization: Bearer lpx_...', or 'x-api-key'."
        )
    return text


def is_valid(view: CatalogView, key_id: str, now: datetime) -> bool:
    """Returns whether the key and its tenant exist, and the key is valid at the time `now`. Does
    not check the key's scopes, because they never change."""
    key = view.keys.get(key_id)
    return key is not None and key.is_live(now) and key.tenant_id in view.tenants


def authorize(view: CatalogView, key: ApiKey, scope: str) -> Principal:
    """Returns the caller. Raises Forbidden unless the key belongs to a tenant and has the scope."""
    tenant = view.tenants.get(key.tenant_id) if key.tenant_id else None
    if tenant is None or scope not in key.scopes:
        raise Forbidden(f"This API key lacks the scope '{scope}' for this.")
    limits, service, cached_weight = view.terms_of(tenant.id, key.quota_subject)
    return Principal(tenant, key, limits, service, cached_weight)
