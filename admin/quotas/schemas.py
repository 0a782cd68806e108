"""Request and response bodies of quotas. An omitted limit is not enforced, except `pin_bytes`,
which is 0 if it is omitted."""

from __future__ import annotations

from datetime import datetime
from decimal import Decimal
from typing import Annotated, Any, ClassVar, TypeVar

import msgspec

from admin.quotas.quotas import LimitUse, QuotaDetails
from store.money import PICO, count_dollars, format_dollars
from store.records import ServiceClassName

MAX_DOLLARS = 9_000_000
SPENDS = ("spend_per_day", "spend_per_month")

Count = Annotated[int, msgspec.Meta(ge=0, le=1 << 50)]


class KeyLimits(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Limits of a key. Minutes, days and months begin by the UTC clock. 0 allows nothing."""

    example: ClassVar[dict[str, Any]] = {"requests_per_minute": 60, "spend_per_day": "5.00"}

    requests_per_minute: Count | None = None
    tokens_per_minute: Count | None = None
    """Tokens of prompts and answers."""
    concurrent_requests: Count | None = None
    tokens_per_day: Count | None = None
    tokens_per_month: Count | None = None
    spend_per_day: Decimal | None = None
    """Dollars, such as "12.50". At most 9,000,000, with at most 12 decimals."""
    spend_per_month: Decimal | None = None


class TenantLimits(KeyLimits, frozen=True, kw_only=True):
    """Limits of all keys of a tenant together."""

    example: ClassVar[dict[str, Any]] = {
        "tokens_per_day": 2_000_000,
        "spend_per_month": "250.00",
        "adapters": 20,
    }

    adapters: Count | None = None
    """Number of adapter names."""
    adapter_bytes: Count | None = None
    """Bytes of all versions. Each content counts once."""
    cached_weight: Annotated[int, msgspec.Meta(ge=0, le=100)] = 100
    """Weight of a cached prompt token toward token limits, in percent of an uncached one. Also
    applies to the limits of the tenant's keys."""
    weight: Annotated[int, msgspec.Meta(ge=1, le=1000)] = 1
    """Share of a busy worker, relative to other tenants of its class."""
    service_class: ServiceClassName = msgspec.field(default="standard", name="class")
    """Urgency of answers. Each class has a share of a busy worker."""
    pin_bytes: Count = 0
    """Bytes of adapters that pinned aliases may keep on the device."""


class UseView(msgspec.Struct, frozen=True):
    """Use of a limit, in dollars for money. `used` is the amount in usage reports. `held` is leased
    to gateways: reserved, used but not reported yet, or ready for requests."""

    limit: int | str
    used: int | str
    held: int | str
    left: int | str
    ends_at: datetime | None
    """Time at which the limit is renewed."""

    @classmethod
    def of(cls, name: str, use: LimitUse) -> UseView:
        amounts = (use.limit, use.used, use.held, use.left)
        if name in SPENDS:
            return cls(*(format_dollars(amount, PICO) for amount in amounts), ends_at=use.ends_at)
        return cls(*amounts, ends_at=use.ends_at)

    @classmethod
    def of_each(cls, used: dict[str, LimitUse]) -> dict[str, UseView]:
        return {name: cls.of(name, use) for name, use in used.items()}


class KeyQuotaView(KeyLimits, frozen=True, kw_only=True):
    use: dict[str, UseView]
    """Use of each limit that is set."""
    updated_at: datetime | None
    object: str = "key.quota"


class TenantQuotaView(TenantLimits, frozen=True, kw_only=True):
    use: dict[str, UseView]
    """Use of each limit that is set, and of the default of `adapter_bytes`."""
    updated_at: datetime | None
    object: str = "tenant.quota"


L = TypeVar("L", bound=KeyLimits)


def limits_of(kind: type[L], quota: QuotaDetails, **more: Any) -> L:
    """Returns a quota as the body `kind`. `more` contains the body's other fields."""
    known = QuotaDetails.__struct_fields__
    values = {name: getattr(quota, name) for name in kind.__struct_fields__ if name in known}
    for name in SPENDS:
        if values[name] is not None:
            values[name] = Decimal(format_dollars(values[name], PICO))
    return kind(**values | more)


def quota_of(subject: str, limits: KeyLimits) -> QuotaDetails:
    """Returns the quota with the limits of a body. Raises Invalid for dollars that are out of
    range."""
    values = msgspec.structs.asdict(limits)
    for name in SPENDS:
        if values[name] is not None:
            values[name] = count_dollars(values[name], PICO, MAX_DOLLARS, name)
    return QuotaDetails(subject=subject, **values)
