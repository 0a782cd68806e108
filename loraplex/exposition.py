"""Converts the data of the OpenTelemetry SDK to the metric families of a Prometheus page."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from opentelemetry.sdk.metrics.export import Gauge, Metric, MetricsData, Sum
from prometheus_client import Metric as Family
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Exemplar, Sample

from telemetry.tallies import LE, Histogram

VLLM = "vllm"
"""Prefix of metric names, which a colon follows on the page. The API allows no colons in names."""
OTLP_ALONE = "gen_ai."
"""Prefix of the names that OpenTelemetry's conventions define. These metrics are sent over OTLP but
are not on the page."""
BUCKET, PARTS = "_bucket", ("_sum", "_count")
PROCESS = "process"
"""Label with the name of the process, on families that both processes of a page have."""

Traced = Mapping[str, Histogram]
"""Histograms whose exemplars are shown, by name."""


def families(data: MetricsData, traced: Traced) -> Iterator[Family]:
    """Yields families by name. Combines the counters `X_bucket`, `X_sum` and `X_count` into the
    histogram X."""
    found = {
        metric.name: metric for metric in _metrics(data) if not metric.name.startswith(OTLP_ALONE)
    }
    histograms = {name.removesuffix(BUCKET) for name in found if name.endswith(BUCKET)}
    parts = {name + part for name in histograms for part in PARTS}
    for name in sorted(found):
        if name.endswith(BUCKET):
            yield _histogram(name.removesuffix(BUCKET), found, traced)
        elif name not in parts:
            yield _single(found[name])


def joined(own: Iterable[Family], others: str, names: tuple[str, str]) -> list[Family]:
    """Returns the families of this process's page and of another process's page. Samples of a
    family that is on both pages get the label `process` with one of `names`."""
    result = {family.name: family for family in own}
    for other in text_string_to_metric_families(others):
        if (family := result.get(other.name)) is None:
            result[other.name] = other
            continue
        # A copy, because some collectors return the same family object each time.
        both = result[other.name] = Family(family.name, family.documentation, family.type)
        for name, part in zip(names, (family, other), strict=True):
            for sample in part.samples:
                both.add_sample(sample.name, sample.labels | {PROCESS: name}, sample.value)
    return list(result.values())


def _metrics(data: MetricsData) -> Iterator[Metric]:
    for resource in data.resource_metrics:
        for scope in resource.scope_metrics:
            yield from scope.metrics


def page_name(name: str) -> str:
    return name.replace(f"{VLLM}.", f"{VLLM}:", 1) if name.startswith(f"{VLLM}.") else name


def _labels(attributes: Mapping[str, Any] | None) -> dict[str, str]:
    return {name: str(value) for name, value in (attributes or {}).items()}


def _histogram(name: str, found: Mapping[str, Metric], traced: Traced) -> Family:
    family = Family(page_name(name), found[name + BUCKET].description or "", "histogram")
    for suffix in (BUCKET, *PARTS):
        if (metric := found.get(name + suffix)) is not None:
            _add(family, metric, suffix)
    if (histogram := traced.get(name)) is not None:
        family.samples = [_with_exemplar(sample, histogram) for sample in family.samples]
    return family


def _with_exemplar(sample: Sample, histogram: Histogram) -> Sample:
    bound = sample.labels.get(LE)
    found = None if bound is None else histogram.exemplars(sample.labels).get(bound)
    if found is None:
        return sample
    ids = {"trace_id": f"{found.trace_id:032x}", "span_id": f"{found.span_id:016x}"}
    return sample._replace(exemplar=Exemplar(ids, found.value, found.at))


def _single(metric: Metric) -> Family:
    """Returns the family of a metric. The names of a counter's samples end in `_total`."""
    is_counter = isinstance(metric.data, Sum) and metric.data.is_monotonic
    kind, suffix = ("counter", "_total") if is_counter else ("gauge", "")
    family = Family(page_name(metric.name), metric.description or "", kind)
    _add(family, metric, suffix)
    return family


def _add(family: Family, metric: Metric, suffix: str) -> None:
    if not isinstance(metric.data, Sum | Gauge):
        raise TypeError(f"{metric.name} is a {type(metric.data).__name__}: use a tally")
    for point in metric.data.data_points:
        family.add_sample(family.name + suffix, _labels(point.attributes), point.value)
