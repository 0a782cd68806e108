"""Percentiles of histograms."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

import msgspec

from store.gateway_load import Latencies


class Percentiles(msgspec.Struct, frozen=True):
    """Percentiles in seconds. Their precision is limited by the bounds of the histogram's
    buckets."""

    p50: float
    p95: float
    p99: float


def merged(parts: Iterable[Latencies]) -> Latencies:
    counts = Counter[float]()
    for part in parts:
        for bound, number in part:
            counts[bound] += number
    return sorted(counts.items())


def percentiles(latencies: Latencies) -> Percentiles | None:
    """Returns the percentiles, or None if nothing was counted."""
    if not any(number for _, number in latencies):
        return None
    p50, p95, p99 = (round(_quantile(latencies, share), 6) for share in (0.5, 0.95, 0.99))
    return Percentiles(p50, p95, p99)


def _quantile(latencies: Latencies, share: float) -> float:
    """Returns a quantile, interpolated within its bucket as in Prometheus."""
    left = share * sum(number for _, number in latencies)
    lower = 0.0
    for bound, number in latencies:
        if number and left <= number:
            return lower + (bound - lower) * left / number
        left -= number
        lower = bound
    return lower
