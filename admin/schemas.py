"""The bodies of the admin plane. Unknown fields are refused by name."""

from __future__ import annotations

from datetime import datetime
from typing import Annotated, Any, Generic, TypeVar

import msgspec

from admin.records import AdapterVersion, ApiKey, BaseModel, Tenant

T = TypeVar("T")


class Page(msgspec.Struct, Generic[T], frozen=True):
    data: list[T]
    has_more: bool
    """Then ask again with `after` = the last one's name (a key's id)."""
    object: str = "list"


def page(found: list[T], limit: int) -> Page[T]:
    """`found` was asked for with one more than `limit`."""
    return Page(data=found[:limit], has_more=len(found) > limit)


class TenantCreate(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    name: str
    sharing_group: str | None = None


class KeyCreate(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    scopes: frozenset[str] | None = None
    """Default: all a tenant's key can have, or admin for an admin key."""
    name: Annotated[str, msgspec.Meta(max_length=128)] = ""
    expires_at: Annotated[datetime, msgspec.Meta(tz=True)] | None = None


class KeyView(msgspec.Struct, frozen=True):
    """A key without its secret."""

    id: str
    tenant_id: str | None
    name: str
    scopes: list[str]
    created_at: datetime | None
    expires_at: datetime | None
    revoked_at: datetime | None
    object: str = "api_key"

    @classmethod
    def of(cls, key: ApiKey) -> KeyView:
        return cls(
            id=key.id,
            tenant_id=key.tenant_id,
            name=key.name,
            scopes=sorted(key.scopes),
            created_at=key.created_at,
            expires_at=key.expires_at,
            revoked_at=key.revoked_at,
        )


class KeyCreated(msgspec.Struct, frozen=True):
    """The only answer that ever holds the secret."""

    key: str
    record: KeyView
    object: str = "api_key.created"


class TenantView(msgspec.Struct, frozen=True):
    id: str
    name: str
    sharing_group: str | None
    created_at: datetime | None
    object: str = "tenant"

    @classmethod
    def of(cls, tenant: Tenant) -> TenantView:
        return cls(tenant.id, tenant.name, tenant.sharing_group, tenant.created_at)


class ModelRegister(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    name: str
    digest: Annotated[str, msgspec.Meta(pattern="^[0-9a-f]{64}$")]
    """Of a model in the store."""
    max_model_len: Annotated[int, msgspec.Meta(ge=1)] | None = None
    """Tokens of prompt and answer; default and upper bound: what the model was made for."""


class ModelView(msgspec.Struct, frozen=True):
    name: str
    digest: str
    model_type: str
    max_model_len: int
    created_at: datetime
    object: str = "model"

    @classmethod
    def of(cls, model: BaseModel) -> ModelView:
        return cls(
            name=model.name,
            digest=model.digest,
            model_type=model.shape.model_type,
            max_model_len=model.max_model_len,
            created_at=model.created_at,
        )


class VersionView(msgspec.Struct, frozen=True):
    name: str
    version: int
    state: str
    model: str | None
    digest: str | None
    max_rank: int | None
    num_parameters: int | None
    file_bytes: int | None
    warnings: list[str]
    error: dict[str, Any] | None
    created_at: datetime
    aliases: list[str] = []
    object: str = "adapter.version"

    @classmethod
    def of(cls, version: AdapterVersion, aliases: list[str] | None = None) -> VersionView:
        manifest = version.manifest
        return cls(
            name=version.name,
            version=version.version,
            state=version.state,
            model=version.base_name,
            digest=version.digest,
            max_rank=manifest.max_rank if manifest else None,
            num_parameters=manifest.num_parameters if manifest else None,
            file_bytes=manifest.file_bytes if manifest else None,
            warnings=list(manifest.warnings) if manifest else [],
            error=version.error,
            created_at=version.created_at,
            aliases=aliases or [],
        )


class AdapterView(msgspec.Struct, frozen=True):
    name: str
    tenant: str
    created_at: datetime
    aliases: dict[str, int]
    versions: list[VersionView]
    object: str = "adapter"


class AliasSet(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    version: Annotated[int, msgspec.Meta(ge=1, le=2**31 - 1)]


class AliasMoveView(msgspec.Struct, frozen=True):
    version: int
    previous: int | None
    changed_by: str | None
    changed_at: datetime


class AliasView(msgspec.Struct, frozen=True):
    name: str
    alias: str
    version: int
    history: list[AliasMoveView] = []
    """Newest first."""
    object: str = "adapter.alias"


class Deleted(msgspec.Struct, frozen=True):
    id: str
    deleted: bool = True
    object: str = "deleted"
