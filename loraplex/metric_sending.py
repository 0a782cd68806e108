"""Sends the metrics of a process over OTLP at intervals."""

from __future__ import annotations

import atexit
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from threading import Event, Thread
from typing import Any, cast

from opentelemetry.sdk.metrics import Exemplar
from opentelemetry.sdk.metrics.export import (
    Histogram,
    HistogramDataPoint,
    InMemoryMetricReader,
    Metric,
    MetricExporter,
    MetricsData,
    ResourceMetrics,
    ScopeMetrics,
    Sum,
)

from loraplex.errors import BadSettings
from loraplex.exposition import BUCKET, PARTS, Traced, page_name
from loraplex.otlp import SEND_TIMEOUT_S, otlp_url
from telemetry.tallies import LE

DEFAULT_INTERVAL_MS = 60_000.0
"""Default interval of the OpenTelemetry specification, in milliseconds."""


def send_interval_s(environ: Mapping[str, str]) -> float:
    """Returns the interval in seconds. Raises BadSettings if the variable is invalid."""
    name = "OTEL_METRIC_EXPORT_INTERVAL"
    text = environ.get(name) or str(DEFAULT_INTERVAL_MS)
    try:
        milliseconds = float(text)
    except ValueError:
        milliseconds = 0.0
    if not 1 <= milliseconds <= 86_400_000:
        raise BadSettings(f"{name} takes milliseconds from 1 to 86400000, not {text!r}")
    return milliseconds / 1e3


def check_metric_sending(environ: Mapping[str, str]) -> None:
    """Raises BadSettings if the settings are invalid. Called before the process that sends metrics
    is started."""
    if otlp_url(environ, "metrics") is not None:
        send_interval_s(environ)


class MetricSender:
    """Sender of all metrics, every `interval_s` seconds and once at the end of the process.

    The SDK's own periodic reader would restart in every forked child, such as the admin plane's
    sandboxes, and would send metrics from there too.
    """

    def __init__(self, exporter: MetricExporter, interval_s: float, traced: Traced) -> None:
        """`traced` are the histograms whose exemplars are sent, by name."""
        self.reader = InMemoryMetricReader(exporter._preferred_temporality)
        self._exporter = exporter
        self._interval_s = interval_s
        self._traced = traced
        self._ending = Event()
        self._thread = Thread(target=self._run, name="metrics-otlp", daemon=True)

    def start(self) -> None:
        """Starts sending. The reader must belong to a provider."""
        self._thread.start()
        atexit.register(self.end)

    def send(self) -> None:
        if (data := self.reader.get_metrics_data()) is not None:
            self._exporter.export(with_histograms(data, self._traced))

    def end(self) -> None:
        """Sends metrics once more. Gives up after SEND_TIMEOUT_S seconds."""
        self._ending.set()
        self._thread.join(SEND_TIMEOUT_S)

    def _run(self) -> None:
        is_ending = False
        while not is_ending:
            is_ending = self._ending.wait(self._interval_s)
            self.send()


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
            yield Metric(page_name(name), metric.description, metric.unit, metric.data)
        elif suffix == BUCKET and base + PARTS[0] in found:
            sums = found[base + PARTS[0]]
            points = _points(metric.data.data_points, sums.data.data_points, base, traced)
            temporality = cast(Sum, metric.data).aggregation_temporality
            histogram = Histogram(list(points), temporality)
            yield Metric(page_name(base), metric.description, sums.unit, histogram)


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
            # The minimum is unknown, and is omitted from the data that is sent.
            min=cast(float, None),
            max=cast(float, None),
            exemplars=[
                Exemplar({}, each.value, int(each.at * 1e9), each.span_id, each.trace_id)
                for each in exemplars.values()
            ],
        )
