"""Creates the rate limit headers of answers, and the errors of requests that exceed a limit. An
error contains the seconds after which the client should retry."""

from __future__ import annotations

import math
from collections.abc import Sequence

from gateway.exceptions import QuotaExceeded
from gateway.limits.quota import Hold, QuotaWindow
from gateway.quota_types import BUDGETS, Kind

SLOT_FREES_S = 1.0
"""Seconds after which a client should retry if it has too many concurrent requests. This is a
guess, because the time at which one of these requests ends is unknown."""
DOLLAR = 10**12
"""Pico-dollars in a dollar."""

_NAMES = {Kind.REQUESTS_PER_MINUTE: "requests", Kind.TOKENS_PER_MINUTE: "tokens"}


def is_shown(kind: Kind) -> bool:
    """Returns whether `x-ratelimit-*` headers show limits of this kind."""
    return kind in _NAMES


def rate_limit_headers(quotas: Sequence[QuotaWindow], now: float) -> dict[str, str]:
    """Returns OpenAI's `x-ratelimit-*` headers. If the tenant and the key both have a limit, shows
    the limit with less remaining. Amounts leased by other gateways count as used."""
    tightest: dict[str, QuotaWindow] = {}
    for quota in quotas:
        name = _NAMES.get(quota.kind)
        if name and (name not in tightest or quota.left < tightest[name].left):
            tightest[name] = quota
    headers: dict[str, str] = {}
    for name, quota in tightest.items():
        headers[f"x-ratelimit-limit-{name}"] = str(quota.limit)
        headers[f"x-ratelimit-remaining-{name}"] = str(min(quota.left, quota.limit))
        headers[f"x-ratelimit-reset-{name}"] = duration(quota.window.end - now)
    return headers


def exceeded(hold: Hold, now: float) -> QuotaExceeded:
    """Returns the error for a request that is refused because the limit of `hold` has less left
    than the request needs."""
    quota = hold.quota
    is_budget = quota.kind in BUDGETS
    frees_in_s = SLOT_FREES_S
    if quota.window.end < math.inf:
        frees_in_s = max(0.0, quota.window.end - now)
    is_possible = hold.amount <= quota.limit
    subject = "tenant" if quota.key[0].startswith("ten_") else "API key"
    shown = [_shown(quota.kind, each) for each in (quota.limit, quota.left, hold.amount)]
    message = (
        f"The limit {quota.kind.value} of this {subject} is {shown[0]}; {shown[1]} of it is "
        f"left and this request needs {shown[2]}. "
    )
    if not is_possible:
        message += "It can never be served: ask for less at a time."
    elif quota.kind is Kind.CONCURRENT_REQUESTS:
        message += "It frees when a request under way ends."
    else:
        message += f"It frees in {duration(frees_in_s)}."
    return QuotaExceeded(
        message,
        param=quota.kind.value,
        code="insufficient_quota" if is_budget else "rate_limit_exceeded",
        retry_after_s=frees_in_s if is_possible else None,
        should_retry=None if is_possible and not is_budget else False,
    )


def duration(seconds: float) -> str:
    """Formats seconds as OpenAI does, rounded up, for example `6m0s`, `12s` or `250ms`."""
    if seconds < 1:
        return f"{max(0, math.ceil(seconds * 1000))}ms"
    whole = math.ceil(seconds)
    hours, minutes = whole // 3600, whole // 60 % 60
    parts = [f"{hours}h"] if hours else []
    if hours or minutes:
        parts.append(f"{minutes}m")
    return "".join([*parts, f"{whole % 60}s"])


def _shown(kind: Kind, amount: int) -> str:
    if not kind.counts_money:
        return str(amount)
    whole, rest = divmod(amount, DOLLAR)
    return f"${whole}.{rest // 10**6:06}"
