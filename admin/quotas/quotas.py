"""Quotas of tenants and of their keys.

Gateways enforce the limits on requests (gateway/quota_types.py). This module enforces the limits on
a tenant's adapters. Functions that write must be called in a transaction.
"""

from __future__ import annotations

from datetime import datetime

import msgspec

from admin.adapters.aliases import check_pins
from admin.schemas import shown
from store.database import Connection
from store.queries import from_row, sql
from store.records import Quota


class QuotaDetails(Quota, frozen=True, kw_only=True):
    pin_bytes: int = 0
    """Bytes of adapters that a tenant's pinned aliases may keep on the device."""
    updated_at: datetime | None = None
    """Time of the last change. None if no limits are set."""


class LimitUse(msgspec.Struct, frozen=True):
    """Use of a limit. Amounts of money are in pico-dollars."""

    limit: int
    used: int
    """Amount used by requests whose usage has been loaded into the database."""
    held: int = 0
    """Amount leased to gateways. It is reserved for running requests, used by requests whose usage
    is not loaded yet, or still available at a gateway."""
    ends_at: datetime | None = None
    """Time at which the limit is renewed. None if it is never renewed."""

    @property
    def left(self) -> int:
        return max(self.limit - self.used - self.held, 0)


async def find_quota(connection: Connection, tenant_id: str, key_id: str | None) -> QuotaDetails:
    """Returns the quota of a key, or of the tenant as a whole if `key_id` is None. Returns a quota
    without limits if none are set."""
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
    """Replaces all limits of a tenant or key. Raises Conflict if pins exceed the new quota."""
    limits = msgspec.structs.replace(quota, pin_bytes=0, updated_at=None)
    if limits == QuotaDetails(limits.subject):
        # `pin_bytes` is stored with the tenant. A quota that sets nothing else needs no row of its
        # own, so setting it is one change and one row of the audit log.
        await connection.execute(sql["quota_delete"], limits.subject)
    else:
        values = msgspec.structs.astuple(shown(Quota, quota))
        await connection.execute(sql["quota_put"], tenant_id, key_id, *values)
    if key_id is None:
        await _set_pin_bytes(connection, tenant_id, quota.pin_bytes)


async def clear_quota(connection: Connection, tenant_id: str, key_id: str | None) -> None:
    """Removes all limits of a key, or of the tenant as a whole if `key_id` is None. A tenant
    without limits may pin no adapters, so this raises Conflict if an alias of the tenant is
    pinned."""
    await connection.execute(sql["quota_delete"], key_id or tenant_id)
    if key_id is None:
        await _set_pin_bytes(connection, tenant_id, 0)


async def _set_pin_bytes(connection: Connection, tenant_id: str, pin_bytes: int) -> None:
    await connection.execute(sql["quota_set_pin_bytes"], tenant_id, pin_bytes)
    await check_pins(connection, tenant_id)


async def limits_in_use(connection: Connection, quota: QuotaDetails) -> dict[str, LimitUse]:
    """Returns the use of each limit that gateways enforce, by the limit's name."""
    found: dict[str, LimitUse] = {}
    for row in await connection.fetch(sql["quota_use"], quota.subject):
        limit = getattr(quota, row["kind"])
        if limit is not None:
            found[row["kind"]] = LimitUse(limit, int(row["used"]), int(row["held"]), row["ends_at"])
    return found


async def holdings_in_use(
    connection: Connection, quota: QuotaDetails, default_bytes: int | None
) -> dict[str, LimitUse]:
    """Returns the use of each of a tenant's limits on adapters, by the limit's name.
    `default_bytes` is the limit of a tenant without `adapter_bytes`, or None for no limit."""
    held = await connection.fetchrow(sql["adapters_held"], quota.subject, "", "")
    pins = await connection.fetchrow(sql["pinned_bytes"], quota.subject)
    assert held is not None and pins is not None
    found = {"pin_bytes": LimitUse(pins["allowed"], pins["used"])}
    if quota.adapters is not None:
        found["adapters"] = LimitUse(quota.adapters, held["adapters"])
    most_bytes = default_bytes if quota.adapter_bytes is None else quota.adapter_bytes
    if most_bytes is not None:
        found["adapter_bytes"] = LimitUse(most_bytes, held["bytes"])
    return found
