"""Request and response bodies of tenants."""

from __future__ import annotations

from datetime import datetime
from typing import Any, ClassVar

import msgspec

from admin.schemas import EntityName


class TenantCreate(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    example: ClassVar[dict[str, Any]] = {"name": "acme", "sharing_group": "family"}
    name: EntityName
    """Name of the tenant. Must not have the form of a tenant's id."""
    sharing_group: EntityName | None = None


class TenantChange(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Changes of a tenant. Omitted fields keep their values."""

    example: ClassVar[dict[str, Any]] = {"sharing_group": "family"}

    sharing_group: EntityName | msgspec.UnsetType | None = msgspec.UNSET
    """Tenants of one group share cached prefixes. null shares with no other tenant."""
    require_signature: bool | msgspec.UnsetType = msgspec.UNSET
    """Whether only adapters signed with one of the tenant's keys are accepted."""


class TenantView(msgspec.Struct, frozen=True):
    id: str
    name: str
    sharing_group: str | None
    require_signature: bool
    """Whether only adapters signed with one of the tenant's keys are accepted."""
    created_at: datetime | None
    deleted_at: datetime | None = None
    """Time at which the tenant was deleted. Its usage is kept."""
    object: str = "tenant"
