"""Defines the kinds of limits, their windows of time, and how much a request takes from each."""

from __future__ import annotations

import math
from collections.abc import Iterable
from datetime import UTC, datetime, timedelta
from enum import Enum, StrEnum
from typing import NamedTuple

from store.records import Price, Quota
from workers.wire.protocol import ServiceClass

FREE = Price(model="", input=0, cached_input=0, output=0)


class Span(Enum):
    """Length of a limit's window. A window is a minute, day or month of UTC, or all time."""

    MINUTE = "minute"
    DAY = "day"
    MONTH = "month"
    ALWAYS = "always"


class Kind(StrEnum):
    """Kind of limit. Its value is the name of the limit's field in store.records.Quota."""

    REQUESTS_PER_MINUTE = "requests_per_minute"
    TOKENS_PER_MINUTE = "tokens_per_minute"
    CONCURRENT_REQUESTS = "concurrent_requests"
    TOKENS_PER_DAY = "tokens_per_day"
    TOKENS_PER_MONTH = "tokens_per_month"
    SPEND_PER_DAY = "spend_per_day"
    SPEND_PER_MONTH = "spend_per_month"

    @property
    def span(self) -> Span:
        return _SPANS[self]

    @property
    def counts_requests(self) -> bool:
        """Whether the limit counts requests, so that each request counts as one."""
        return self in (Kind.REQUESTS_PER_MINUTE, Kind.CONCURRENT_REQUESTS)

    @property
    def counts_money(self) -> bool:
        return self in (Kind.SPEND_PER_DAY, Kind.SPEND_PER_MONTH)


_SPANS = {kind: Span(kind.partition("_per_")[2] or "always") for kind in Kind}
BUDGETS = tuple(kind for kind in Kind if kind.span in (Span.DAY, Span.MONTH))
"""Kinds of limits for a day or a month. The database counts their use from usage records. Their
order is the order of the bits of UsageRecord.leased."""


class Window(NamedTuple):
    """Time from `start` until before `end`, in seconds since 1970."""

    start: float
    end: float

    def holds(self, at: float) -> bool:
        return self.start <= at < self.end

    @property
    def name(self) -> str:
        """Start of the window, in the form that the database uses as the window's name."""
        if self.start == -math.inf:
            return "-infinity"
        return datetime.fromtimestamp(self.start, UTC).isoformat()


def window(span: Span, at: float) -> Window:
    """Returns the window that contains `at`, in seconds since 1970."""
    if span is Span.ALWAYS:
        return Window(-math.inf, math.inf)
    moment = datetime.fromtimestamp(at, UTC).replace(second=0, microsecond=0)
    if span is Span.MINUTE:
        end = moment + timedelta(minutes=1)
    elif span is Span.DAY:
        moment = moment.replace(hour=0, minute=0)
        end = moment + timedelta(days=1)
    else:
        moment = moment.replace(day=1, hour=0, minute=0)
        end = (moment + timedelta(days=31)).replace(day=1)
    return Window(moment.timestamp(), end.timestamp())


class Limit(NamedTuple):
    subject: str
    kind: Kind
    amount: int


def limits_of(quota: Quota) -> tuple[Limit, ...]:
    """Returns the limits that a quota sets."""
    found: list[Limit] = []
    for kind in Kind:
        amount: int | None = getattr(quota, kind.value)
        if amount is not None:
            found.append(Limit(quota.subject, kind, amount))
    return tuple(found)


class Service(NamedTuple):
    """Weight and service class of a tenant, which determine its share of a busy worker."""

    weight: int = 1
    service_class: ServiceClass = ServiceClass.STANDARD


ORDINARY = Service()


class Cost(NamedTuple):
    """Cost of a request in pico-dollars, by kind of token."""

    input: int
    """Cost of the prompt tokens that were not cached."""
    cached_input: int
    output: int


class Tariff(NamedTuple):
    """Prices of tokens, and the weight by which cached prompt tokens count toward quotas."""

    price: Price = FREE
    cached_weight: int = 100
    """Weight of a cached prompt token toward quotas, in percent of an uncached one."""

    def promise(self, kind: Kind, prompt_tokens: int, completion_tokens: int) -> int:
        """Returns the maximum amount that the tokens can take from a limit of tokens or money,
        assuming that none are cached."""
        if kind.counts_money:
            return prompt_tokens * self.price.input + completion_tokens * self.price.output
        return prompt_tokens + completion_tokens

    def metered(self, prompt_tokens: int, cached_tokens: int, completion_tokens: int) -> int:
        """Returns the number of tokens that count against quotas."""
        counted = -(-cached_tokens * self.cached_weight // 100)
        return prompt_tokens - cached_tokens + counted + completion_tokens

    def cost(self, prompt_tokens: int, cached_tokens: int, completion_tokens: int) -> Cost:
        price = self.price
        return Cost(
            (prompt_tokens - cached_tokens) * price.input,
            cached_tokens * price.cached_input,
            completion_tokens * price.output,
        )


def leased_bits(tenant_id: str, limits: Iterable[Limit]) -> int:
    """Returns a mask of the daily and monthly limits in `limits`. Bit n stands for the tenant's
    limit of kind `BUDGETS[n]`, and bit 4 + n for the API key's limit of that kind."""
    bits = 0
    for limit in limits:
        if limit.kind in BUDGETS:
            place = BUDGETS.index(limit.kind)
            bits |= 1 << (place if limit.subject == tenant_id else place + len(BUDGETS))
    return bits
