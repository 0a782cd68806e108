"""Tenants, keys, models and adapters as the database holds them. Frozen; torch-free.

An API key reads `lpx_<id>_<secret><crc>`: 12, 43 and 6 characters of base62. The CRC-32 covers
everything before it, so a mistyped or made-up key is refused without a look-up.
"""

from __future__ import annotations

import hashlib
import hmac
import re
import secrets
import zlib
from datetime import datetime
from enum import StrEnum
from typing import Any

import msgspec

from adapters.manifest import AdapterManifest, BaseModelShape

BASE62 = "0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz"
KEY_PATTERN = re.compile(r"lpx_([0-9A-Za-z]{12})_[0-9A-Za-z]{43}([0-9A-Za-z]{6})", re.ASCII)
TENANT_SCOPES = frozenset({"inference", "adapters:write", "usage:read"})
ADMIN_SCOPES = frozenset({"admin"})


class NewKey(msgspec.Struct, frozen=True):
    """A key as its owner sees it, once. `text` is the secret; `id` may be shown and stored."""

    id: str
    text: str


def new_key() -> NewKey:
    """Draws a key of 256 random bits."""
    key_id = random_base62(12)
    body = f"lpx_{key_id}_{random_base62(43)}"
    return NewKey(id=key_id, text=body + _checksum(body))


def parse_key(text: str) -> str | None:
    """The key's id if form and checksum are right, else None; it may never have been issued."""
    found = KEY_PATTERN.fullmatch(text)
    if found is None or _checksum(text[:-6]) != found.group(2):
        return None
    return found.group(1)


def hash_key(text: str, pepper: bytes) -> bytes:
    """HMAC-SHA-256 of the whole key: 32 bytes. Compare with `hmac.compare_digest`."""
    return hmac.digest(pepper, text.encode(), hashlib.sha256)


def random_base62(length: int) -> str:
    return "".join(secrets.choice(BASE62) for _ in range(length))


def _checksum(body: str) -> str:
    rest, digits = zlib.crc32(body.encode()), ""
    for _ in range(6):
        rest, digit = divmod(rest, 62)
        digits = BASE62[digit] + digits
    return digits


class AdapterState(StrEnum):
    UPLOADING = "uploading"
    VALIDATING = "validating"
    PROVING = "proving"
    READY = "ready"
    REJECTED = "rejected"


class Tenant(msgspec.Struct, frozen=True):
    id: str
    """`ten_` and 12 random characters; never used again: a deleted tenant leaves nothing."""
    name: str
    """Unique; what people write, also in `tenant/adapter`."""
    sharing_group: str | None = None
    """Tenants of one group share cached prefixes; None: shared with nobody."""
    created_at: datetime | None = None


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
    name: str = ""
    created_at: datetime | None = None

    def is_live(self, now: datetime) -> bool:
        return self.revoked_at is None and (self.expires_at is None or now < self.expires_at)


class BaseModel(msgspec.Struct, frozen=True):
    name: str
    digest: str
    shape: BaseModelShape
    max_model_len: int
    created_at: datetime


class AdapterVersion(msgspec.Struct, frozen=True):
    """Immutable but for `state`. Digest, base and manifest are there in every ready version."""

    tenant_id: str
    name: str
    version: int
    state: AdapterState
    created_at: datetime
    digest: str | None = None
    base_name: str | None = None
    """Served name of the base model."""
    manifest: AdapterManifest | None = None
    error: dict[str, Any] | None = None
    """Why it was rejected: {code, field, got, allowed, hint}."""


class Alias(msgspec.Struct, frozen=True):
    tenant_id: str
    name: str
    alias: str
    version: int


class CatalogSnapshot(msgspec.Struct, frozen=True):
    """All the gateway needs to serve without a query on the request path, as of `generation`."""

    generation: int
    tenants: tuple[Tenant, ...]
    keys: tuple[ApiKey, ...]
    models: tuple[BaseModel, ...]
    versions: tuple[AdapterVersion, ...]
    """Ready versions only."""
    aliases: tuple[Alias, ...]
