"""Combines counters into histograms of the OpenTelemetry SDK, because `telemetry.tallies` exports
each histogram as several counters."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any, cast

from opentelemetry.sdk.metrics import Exemplar
from opentelemetry.sdk.metrics.export import (
    Histogram,
    HistogramDataPoint,
    Metric,
    MetricsData,
    ResourceMetrics,
    ScopeMetrics,
    Sum,
)

from telemetry.tallies import LE
from telemetry.tallies import Histogram as Tally

VLLM = "vllm"
"""Prefix of metric names. On the metrics page, a colon follows it (`vllm:`). In OpenTelemetry, a
dot follows it, because the API allows no colons in names."""
BUCKET, PARTS = "_bucket", ("_sum", "_count")

Traced = Mapping[str, Tally]
"""Histograms whose exemplars are shown, by name."""


def _page_name(name: str) -> str:
    return name.replace(f"{VLLM}.", f"{VLLM}:", 1) if name.startswith(f"{VLLM}.") else name


def with_histograms(data: MetricsData, traced: Traced) -> MetricsData:
    """Returns the metrics under the names that they have on /metrics. Combines the counters
    `X_bucket`, `X_sum` and `X_count` into the histogram X."""
    return MetricsData(
        [
            ResourceMetrics(
                resource.resource,
                [
                    ScopeMetrics(scope.scope, list(_metrics(scope.metrics, traced)), "")
                    for scope in resource.scope_metrics
                ],
                "",
            )
            for resource in data.resource_metrics
        ]
    )


def _metrics(given: Sequence[Metric], traced: Traced) -> Iterator[Metric]:
    found = {metric.name: metric for metric in given}
    for name, metric in found.items():
        base, suffix = next(
            ((name.removesuffix(end), end) for end in (BUCKET, *PARTS) if name.endswith(end)),
            (name, ""),
        )
        if not suffix or base + BUCKET not in found:
            yield Metric(_page_name(name), metric.description, metric.unit, metric.data)
        elif suffix == BUCKET and base + PARTS[0] in found:
            sums = found[base + PARTS[0]]
            points = _points(metric.data.data_points, sums.data.data_points, base, traced)
            temporality = cast(Sum, metric.data).aggregation_temporality
            histogram = Histogram(list(points), temporality)
            yield Metric(_page_name(base), metric.description, sums.unit, histogram)


def _points(
    buckets: Sequence[Any], sums: Sequence[Any], name: str, traced: Traced
) -> Iterator[HistogramDataPoint]:
    by_series: dict[frozenset[tuple[str, str]], list[Any]] = {}
    for point in buckets:
        labels = frozenset(item for item in point.attributes.items() if item[0] != LE)
        by_series.setdefault(labels, []).append(point)
    total = {frozenset(point.attributes.items()): point.value for point in sums}
    for series, points in by_series.items():
        points.sort(key=lambda point: float(point.attributes[LE]))
        counts = [int(point.value) for point in points]
        labels, last = dict(series), points[-1]
        exemplars = traced[name].exemplars(labels) if name in traced else {}
        yield HistogramDataPoint(
            attributes=labels,
            start_time_unix_nano=last.start_time_unix_nano,
            time_unix_nano=last.time_unix_nano,
            count=counts[-1],
            sum=total.get(series, 0.0),
            bucket_counts=[after - before for before, after in pairwise([0, *counts])],
            explicit_bounds=[float(point.attributes[LE]) for point in points[:-1]],
            # Minimum and maximum are unknown. They are omitted from the data that is sent.
            min=cast(float, None),
            max=cast(float, None),
            exemplars=[
                Exemplar({}, each.value, int(each.at * 1e9), each.span_id, each.trace_id)
                for each in exemplars.values()
            ],
        )
