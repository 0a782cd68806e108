"""Tenants, keys, models and adapters as the database holds them. Frozen; torch-free."""

from __future__ import annotations

from datetime import datetime
from enum import StrEnum

import msgspec

from adapters.manifest import BaseModelShape


class AdapterState(StrEnum):
    UPLOADING = "uploading"
    VALIDATING = "validating"
    PROVING = "proving"
    READY = "ready"
    REJECTED = "rejected"


class Tenant(msgspec.Struct, frozen=True):
    id: str
    name: str
    sharing_group: str | None = None


class ApiKey(msgspec.Struct, frozen=True):
    """id is the public part of the key; only a keyed hash of the whole is kept."""

    id: str
    tenant_id: str | None
    """None: an admin key, which cannot infer."""
    hash: bytes
    scopes: frozenset[str]
    """inference, adapters:write, usage:read (tenant keys); admin (admin keys)."""
    expires_at: datetime | None = None
    revoked_at: datetime | None = None


class BaseModel(msgspec.Struct, frozen=True):
    name: str
    digest: str
    shape: BaseModelShape
    max_model_len: int
    created_at: datetime


class AdapterVersion(msgspec.Struct, frozen=True):
    tenant_id: str
    name: str
    version: int
    digest: str
    base_name: str
    """Served name of the base model."""
    state: AdapterState
    created_at: datetime


class Alias(msgspec.Struct, frozen=True):
    tenant_id: str
    name: str
    alias: str
    version: int


class CatalogSnapshot(msgspec.Struct, frozen=True):
    """Everything the gateway needs to serve without a query on the request path, as of `generation`."""

    generation: int
    tenants: tuple[Tenant, ...]
    keys: tuple[ApiKey, ...]
    models: tuple[BaseModel, ...]
    versions: tuple[AdapterVersion, ...]
    """Ready versions only."""
    aliases: tuple[Alias, ...]
