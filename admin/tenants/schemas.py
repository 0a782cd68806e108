"""The bodies of tenants."""

from __future__ import annotations

from datetime import datetime
from typing import Any, ClassVar

import msgspec

from admin.records import Tenant
from admin.schemas import EntityName, shown


class TenantCreate(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    example: ClassVar[dict[str, Any]] = {"name": "acme", "sharing_group": "family"}
    name: EntityName
    """Not like a tenant's id."""
    sharing_group: EntityName | None = None


class TenantChange(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What is left out stays."""

    example: ClassVar[dict[str, Any]] = {"sharing_group": "family"}

    sharing_group: EntityName | msgspec.UnsetType | None = msgspec.UNSET
    """Tenants of one group share cached prefixes; null: the tenant shares none."""


class TenantView(msgspec.Struct, frozen=True):
    id: str
    name: str
    sharing_group: str | None
    created_at: datetime | None
    deleted_at: datetime | None = None
    """When the tenant was deleted; its usage is kept."""
    object: str = "tenant"

    @classmethod
    def of(cls, tenant: Tenant) -> TenantView:
        return shown(cls, tenant)
