"""The bodies of the admin plane. Unknown fields are refused by name."""

from __future__ import annotations

from datetime import datetime
from typing import Annotated, Generic, TypeVar

import msgspec

from admin.keys.keys import KeyDetails
from admin.records import ApiKey, BaseModel, Residency, Tenant
from admin.workers.workers import ModelState

T = TypeVar("T")


class Page(msgspec.Struct, Generic[T], frozen=True):
    data: list[T]
    has_more: bool
    """Then ask again with `after` = the last one's name (a key's id)."""
    object: str = "list"


def page(found: list[T], limit: int) -> Page[T]:
    """`found` was asked for with one more than `limit`."""
    return Page(data=found[:limit], has_more=len(found) > limit)


EntityName = Annotated[str, msgspec.Meta(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,127}\Z")]
AliasName = Annotated[str, msgspec.Meta(pattern=r"^(?![0-9]+\Z)[A-Za-z0-9][A-Za-z0-9._-]{0,63}\Z")]


class TenantCreate(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    name: EntityName
    """Not like a tenant's id."""
    sharing_group: EntityName | None = None


class TenantChange(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What is left out stays."""

    sharing_group: EntityName | msgspec.UnsetType | None = msgspec.UNSET
    """Tenants of one group share cached prefixes; null: with nobody."""


Moment = Annotated[datetime, msgspec.Meta(tz=True)]
ModelName = Annotated[
    str,
    msgspec.Meta(
        pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,127}(@(\*|[A-Za-z0-9][A-Za-z0-9._-]{0,63}))?\Z",
    ),
]


class KeyCreate(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    scopes: frozenset[str] | None = None
    """Default: all a tenant's key can have, or admin for an admin key."""
    name: Annotated[str, msgspec.Meta(max_length=128)] = ""
    not_before: Moment | None = None
    expires_at: Moment | None = None
    models: Annotated[frozenset[ModelName], msgspec.Meta(min_length=1, max_length=256)] | None = (
        None
    )
    """What it may infer with: `bot` (its alias prod), `bot@staging`, `bot@7`, `bot@*` (all of
    them), or a base model. Default: all that the tenant may. Any other name is unknown to it."""
    cidrs: (
        Annotated[
            tuple[Annotated[str, msgspec.Meta(max_length=49)], ...],
            msgspec.Meta(min_length=1, max_length=64),
        ]
        | None
    ) = None
    """Networks, such as 10.0.0.0/8, that its users are in. Default: anywhere."""


class KeyRotate(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    overlap_s: Annotated[int, msgspec.Meta(ge=0, le=30 * 86400)] = 3600
    """How long the old key goes on."""
    expires_at: Moment | None = None
    """Of the new key; default: that of the old one."""


class KeyView(msgspec.Struct, frozen=True):
    """A key without its secret."""

    id: str
    tenant_id: str | None
    name: str
    scopes: list[str]
    created_at: datetime | None
    not_before: datetime | None
    expires_at: datetime | None
    revoked_at: datetime | None
    models: list[str] | None
    cidrs: list[str] | None
    replaces: str | None
    """Id of the key that it was rotated from."""
    last_used_at: datetime | None
    """To the minute."""
    object: str = "api_key"

    @classmethod
    def of(cls, key: ApiKey) -> KeyView:
        return cls(
            id=key.id,
            tenant_id=key.tenant_id,
            name=key.name,
            scopes=sorted(key.scopes),
            created_at=key.created_at,
            not_before=key.not_before,
            expires_at=key.expires_at,
            revoked_at=key.revoked_at,
            models=None if key.models is None else sorted(key.models),
            cidrs=None if key.cidrs is None else list(key.cidrs),
            replaces=key.replaces,
            last_used_at=key.last_used_at if isinstance(key, KeyDetails) else None,
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
        return cls(
            id=tenant.id,
            name=tenant.name,
            sharing_group=tenant.sharing_group,
            created_at=tenant.created_at,
        )


Digest = Annotated[str, msgspec.Meta(pattern=r"^[0-9a-f]{64}\Z")]
Length = Annotated[int, msgspec.Meta(ge=1, le=2**31 - 1)]


class ModelRegister(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    name: EntityName
    digest: Digest
    """Of a model in the store."""
    max_model_len: Length | None = None
    """Tokens of prompt and answer; default and upper bound: what the model was made for."""


class ModelChange(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What is left out stays."""

    digest: Digest | None = None
    """Other weights, while no adapter is bound to those there are."""
    max_model_len: Length | None = None
    residency: Residency | None = None
    """Whether it is to be on devices: as it is asked for, always, or not at all."""


class ModelView(msgspec.Struct, frozen=True):
    name: str
    digest: str
    model_type: str
    max_model_len: int
    residency: Residency
    created_at: datetime
    object: str = "model"

    @classmethod
    def of(cls, model: BaseModel) -> ModelView:
        return cls(
            name=model.name,
            digest=model.digest,
            model_type=model.shape.model_type,
            max_model_len=model.max_model_len,
            residency=model.residency,
            created_at=model.created_at,
        )


class ModelDetails(ModelView, frozen=True, kw_only=True):
    workers: list[ModelState]
    """Where it is. For admin keys; others see no worker."""

    @classmethod
    def with_states(cls, model: BaseModel, workers: list[ModelState]) -> ModelDetails:
        return cls(**msgspec.structs.asdict(ModelView.of(model)), workers=workers)


class Deleted(msgspec.Struct, frozen=True):
    id: str
    deleted: bool = True
    object: str = "deleted"
