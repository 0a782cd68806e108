"""Request and response bodies of API keys."""

from __future__ import annotations

from datetime import datetime
from typing import Annotated, Any, ClassVar

import msgspec

from admin.schemas import shown
from store.records import ApiKey

Moment = Annotated[datetime, msgspec.Meta(tz=True)]
ModelName = Annotated[
    str,
    msgspec.Meta(
        pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,127}(@(\*|[A-Za-z0-9][A-Za-z0-9._-]{0,63}))?$(?!\n)",
    ),
]


class KeyCreate(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    example: ClassVar[dict[str, Any]] = {
        "name": "ci",
        "scopes": ["inference"],
        "models": ["bot@staging"],
    }
    scopes: frozenset[str] | None = None
    """Scopes of the key. Default: all scopes of a tenant's key, or `admin` for an admin key."""
    name: Annotated[str, msgspec.Meta(max_length=128)] = ""
    not_before: Moment | None = None
    expires_at: Moment | None = None
    models: Annotated[frozenset[ModelName], msgspec.Meta(min_length=1, max_length=256)] | None = (
        None
    )
    """Models for inference: `bot` (its alias prod), `bot@staging`, `bot@7`, `bot@*` (all of them),
    or a base model. Default: all of the tenant's. Other models do not exist for the key."""
    cidrs: (
        Annotated[
            tuple[Annotated[str, msgspec.Meta(max_length=49)], ...],
            msgspec.Meta(min_length=1, max_length=64),
        ]
        | None
    ) = None
    """Client networks, such as 10.0.0.0/8. Default: any."""


class KeyRotate(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    example: ClassVar[dict[str, Any]] = {"overlap_s": 3600}
    overlap_s: Annotated[int, msgspec.Meta(ge=0, le=30 * 86400)] = 3600
    """Seconds for which the old key stays valid."""
    expires_at: Moment | None = None
    """Time at which the new key expires. Default: when the old key would have expired."""


class KeyView(msgspec.Struct, frozen=True):
    """API key without its secret."""

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
    """Id of the key that this key was rotated from."""
    last_used_at: datetime | None
    """Time of the last use, accurate to the minute."""
    object: str = "api_key"

    @classmethod
    def of(cls, key: ApiKey) -> KeyView:
        return shown(
            cls,
            key,
            scopes=sorted(key.scopes),
            models=None if key.models is None else sorted(key.models),
            cidrs=None if key.cidrs is None else list(key.cidrs),
            last_used_at=getattr(key, "last_used_at", None),
        )


class KeyCreated(msgspec.Struct, frozen=True):
    """New key. Only this answer contains the secret."""

    key: str
    record: KeyView
    object: str = "api_key.created"
