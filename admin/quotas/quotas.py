"""Quotas of tenants and of their keys: functions of a connection to records.

Gateways keep requests within them (gateway/quota_types.py); what a tenant has in the store is kept
within them here. Every writing function wants a transaction of its caller's.
"""

from __future__ import annotations

from datetime import datetime

import msgspec

from admin.adapters.aliases import check_pins
from admin.database import Connection
from admin.queries import from_row, sql
from admin.records import Quota


class QuotaDetails(Quota, frozen=True, kw_only=True):
    pin_bytes: int = 0
    """Bytes of adapters that a tenant's pinned aliases may keep on the device."""
    updated_at: datetime | None = None
    """None: there are no limits."""


class LimitUse(msgspec.Struct, frozen=True):
    """Use of a limit that is set. Money is in pico-dollars."""

    limit: int
    used: int
    """By requests whose usage is loaded."""
    held: int = 0
    """By gateways: promised to requests, used by them and not loaded yet, or ready to be given."""
    ends_at: datetime | None = None
    """When the limit is whole again; None: it is of all times."""

    @property
    def left(self) -> int:
        return max(self.limit - self.used - self.held, 0)


async def find_quota(connection: Connection, tenant_id: str, key_id: str | None) -> QuotaDetails:
    """key_id None: of the tenant as a whole. Without limits if none were set."""
    row = await connection.fetchrow(sql["quota_find"], key_id or tenant_id)
    found = from_row(QuotaDetails, row) if row else QuotaDetails(key_id or tenant_id)
    if key_id is not None:
        return found
    pins = await connection.fetchrow(sql["pinned_bytes"], tenant_id)
    assert pins is not None
    return msgspec.structs.replace(found, pin_bytes=pins["allowed"])


async def set_quota(
    connection: Connection, tenant_id: str, key_id: str | None, quota: QuotaDetails
) -> None:
    """All limits at once. Raises Conflict if more bytes are pinned than may be."""
    limits = msgspec.structs.replace(quota, pin_bytes=0, updated_at=None)
    if limits == QuotaDetails(limits.subject):
        # Pins are the tenant's own: without other limits there is one change, and one row of audit.
        await connection.execute(sql["quota_delete"], limits.subject)
    else:
        await connection.execute(
            sql["quota_put"],
            *(tenant_id, key_id, quota.requests_per_minute, quota.tokens_per_minute),
            *(quota.concurrent_requests, quota.tokens_per_day, quota.tokens_per_month),
            *(quota.spend_per_day, quota.spend_per_month, quota.adapters, quota.adapter_bytes),
            *(quota.cached_weight, quota.weight, quota.service_class),
        )
    if key_id is None:
        await _set_pin_bytes(connection, tenant_id, quota.pin_bytes)


async def clear_quota(connection: Connection, tenant_id: str, key_id: str | None) -> None:
    """No limits any more, and nothing may be pinned. Raises Conflict if something is."""
    await connection.execute(sql["quota_delete"], key_id or tenant_id)
    if key_id is None:
        await _set_pin_bytes(connection, tenant_id, 0)


async def _set_pin_bytes(connection: Connection, tenant_id: str, pin_bytes: int) -> None:
    await connection.execute(sql["quota_set_pin_bytes"], tenant_id, pin_bytes)
    await check_pins(connection, tenant_id)


async def limits_in_use(connection: Connection, quota: QuotaDetails) -> dict[str, LimitUse]:
    """By name, of the limits that are set and are the gateways' to keep."""
    found: dict[str, LimitUse] = {}
    for row in await connection.fetch(sql["quota_use"], quota.subject):
        limit = getattr(quota, row["kind"])
        if limit is not None:
            found[row["kind"]] = LimitUse(limit, int(row["used"]), int(row["held"]), row["ends_at"])
    return found


async def holdings_in_use(connection: Connection, quota: QuotaDetails) -> dict[str, LimitUse]:
    """By name, of the limits of a tenant on what it has."""
    held = await connection.fetchrow(sql["adapters_held"], quota.subject, "", "")
    pins = await connection.fetchrow(sql["pinned_bytes"], quota.subject)
    assert held is not None and pins is not None
    found = {"pin_bytes": LimitUse(pins["allowed"], pins["used"])}
    if quota.adapters is not None:
        found["adapters"] = LimitUse(quota.adapters, held["adapters"])
    if quota.adapter_bytes is not None:
        found["adapter_bytes"] = LimitUse(quota.adapter_bytes, held["bytes"])
    return found
