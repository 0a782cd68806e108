"""Converts the data of the OpenTelemetry SDK to the metric families of a Prometheus page."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Iterator

from opentelemetry.sdk.metrics.export import (
    Gauge,
    Histogram,
    HistogramDataPoint,
    Metric,
    MetricsData,
    Sum,
)
from prometheus_client import Metric as Family
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Exemplar

from telemetry.tallies import LE

OTLP_ALONE = "gen_ai."
"""Prefix of the names that OpenTelemetry's conventions define. Metrics with this prefix are sent
over OTLP but are not on the metrics page."""
PROCESS = "process"
"""Label that names a sample's process, in families that both processes of a page have."""


def families(data: MetricsData) -> Iterator[Family]:
    """Yields the families of the metrics that `with_histograms` returned, sorted by name."""
    scopes = (scope for resource in data.resource_metrics for scope in resource.scope_metrics)
    metrics = (metric for scope in scopes for metric in scope.metrics)
    for metric in sorted(metrics, key=lambda metric: metric.name):
        if not metric.name.startswith(OTLP_ALONE):
            yield _family(metric)


def joined(own: Iterable[Family], others: str, names: tuple[str, str]) -> list[Family]:
    """Returns the families of this process's page and of another process's page. Samples of a
    family that is on both pages get the label `process` with one of `names`."""
    result = {family.name: family for family in own}
    for other in text_string_to_metric_families(others):
        if (family := result.get(other.name)) is None:
            result[other.name] = other
            continue
        # The samples are added to a new family, because some collectors return the same family
        # object each time.
        both = result[other.name] = Family(family.name, family.documentation, family.type)
        for name, part in zip(names, (family, other), strict=True):
            for sample in part.samples:
                both.add_sample(sample.name, sample.labels | {PROCESS: name}, sample.value)
    return list(result.values())


def _family(metric: Metric) -> Family:
    """Returns the family of a metric. The names of a counter's samples end in `_total`."""
    match metric.data:
        case Histogram():
            kind, suffix = "histogram", ""
        case Sum(is_monotonic=True):
            kind, suffix = "counter", "_total"
        case Sum() | Gauge():
            kind, suffix = "gauge", ""
        case _:
            raise TypeError(f"{metric.name} is a {type(metric.data).__name__}: use a tally")
    family = Family(metric.name, metric.description or "", kind)
    for point in metric.data.data_points:
        labels = {name: str(value) for name, value in (point.attributes or {}).items()}
        if isinstance(point, HistogramDataPoint):
            _add_histogram(family, labels, point)
        elif not isinstance(metric.data, Histogram):
            family.add_sample(family.name + suffix, labels, point.value)
    return family


def _add_histogram(family: Family, labels: dict[str, str], point: HistogramDataPoint) -> None:
    """Adds the samples of one series of a histogram, with cumulative buckets."""
    bounds = (*(f"{bound:g}" for bound in point.explicit_bounds), "+Inf")
    places = {bisect_left(point.explicit_bounds, each.value): each for each in point.exemplars}
    count = 0
    for place, bound in enumerate(bounds):
        count += point.bucket_counts[place]
        exemplar = None
        if (found := places.get(place)) is not None:
            ids = {"trace_id": f"{found.trace_id:032x}", "span_id": f"{found.span_id:016x}"}
            exemplar = Exemplar(ids, found.value, found.time_unix_nano / 1e9)
        name = f"{family.name}_bucket"
        family.add_sample(name, {**labels, LE: bound}, count, exemplar=exemplar)
    family.add_sample(f"{family.name}_sum", labels, point.sum)
    family.add_sample(f"{family.name}_count", labels, point.count)
