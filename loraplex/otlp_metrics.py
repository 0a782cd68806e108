"""Sends the metrics of a process over OTLP at intervals."""

from __future__ import annotations

import atexit
import time
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from threading import Event, Thread
from typing import Any, cast

from opentelemetry.sdk.metrics import Exemplar, ObservableCounter
from opentelemetry.sdk.metrics.export import (
    AggregationTemporality,
    Gauge,
    Histogram,
    HistogramDataPoint,
    Metric,
    MetricExporter,
    MetricsData,
    NumberDataPoint,
    ResourceMetrics,
    ScopeMetrics,
    Sum,
)
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from prometheus_client import CollectorRegistry
from prometheus_client import Metric as Family
from prometheus_client.samples import Sample

from loraplex.errors import BadSettings
from loraplex.otlp import SEND_TIMEOUT_S, otlp_url
from telemetry.tallies import LE, OTLP_ALONE, PAGE

DEFAULT_INTERVAL_MS = 60_000.0
"""Default interval of the OpenTelemetry specification, in milliseconds."""
UNITS = {"_seconds": "s", "_bytes": "By"}
"""Units by the ends of the names that have them."""

Labels = tuple[tuple[str, str], ...]


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
    """Raises BadSettings if a variable is invalid. Called before the sending process starts."""
    if otlp_url(environ, "metrics") is not None:
        send_interval_s(environ)


class MetricSender:
    """Sender of all metrics, every `interval_s` seconds and once at the end of the process.

    The SDK's own periodic reader would restart in every forked child, such as the admin plane's
    sandboxes, and would send metrics from there too.
    """

    def __init__(
        self,
        exporter: MetricExporter,
        interval_s: float,
        resource: Resource,
        page: CollectorRegistry = PAGE,
    ) -> None:
        self._exporter = exporter
        self._interval_s = interval_s
        self._resource = resource
        self._page = page
        preferred = exporter._preferred_temporality or {}
        self._temporality = preferred.get(ObservableCounter, AggregationTemporality.CUMULATIVE)
        self._is_delta = self._temporality is AggregationTemporality.DELTA
        self._since_ns = self._now_ns = time.time_ns()
        self._before: dict[str, dict[Labels, Sequence[float]]] = {}
        """Last figures of each series, by family, if differences are sent. A series that has ended
        is forgotten, because it begins at 0 if it begins again."""
        self._after: dict[str, dict[Labels, Sequence[float]]] = {}
        self._ending = Event()
        self._thread = Thread(target=self._run, name="metrics-otlp", daemon=True)

    def start(self) -> None:
        self._thread.start()
        atexit.register(self.end)

    def send(self) -> None:
        self._now_ns, self._after = time.time_ns(), {}
        metrics = [self._metric(family) for family in self._page.collect()]
        metrics += [self._metric(family, "s") for family in OTLP_ALONE.collect()]
        # Without points, it would be a metric of an unknown kind.
        shown = [metric for metric in metrics if metric.data.data_points]
        scope = ScopeMetrics(InstrumentationScope("loraplex"), shown, "")
        self._exporter.export(MetricsData([ResourceMetrics(self._resource, [scope], "")]))
        if self._is_delta:
            self._since_ns = self._now_ns
            self._before |= self._after

    def end(self) -> None:
        """Sends metrics once more. Gives up after SEND_TIMEOUT_S seconds."""
        self._ending.set()
        self._thread.join(SEND_TIMEOUT_S)

    def _run(self) -> None:
        is_ending = False
        while not is_ending:
            is_ending = self._ending.wait(self._interval_s)
            self.send()

    def _metric(self, family: Family, unit: str = "") -> Metric:
        unit = unit or next((u for end, u in UNITS.items() if family.name.endswith(end)), "")
        match family.type:
            case "histogram":
                data = Histogram(list(self._histogram_points(family)), self._temporality)
            case "counter":
                data = Sum(list(self._points(family, self._is_delta)), self._temporality, True)
            case _:
                data = Gauge(list(self._points(family, False)))
        return Metric(family.name, family.documentation, unit, data)

    def _points(self, family: Family, is_delta: bool) -> Iterator[NumberDataPoint]:
        for sample in family.samples:
            series = tuple(sample.labels.items())
            (value,) = self._change(family, series, [sample.value]) if is_delta else [sample.value]
            yield NumberDataPoint(dict(sample.labels), self._since_ns, self._now_ns, value)

    def _histogram_points(self, family: Family) -> Iterator[HistogramDataPoint]:
        """Yields a point for each series. The samples of a series follow one another, with the
        count at the end."""
        buckets: list[Sample] = []
        total = 0.0
        for sample in family.samples:
            if LE in sample.labels:
                buckets.append(sample)
            elif sample.name.endswith("_sum"):
                total = sample.value
            else:
                counts = [b - a for a, b in pairwise([0.0, *(each.value for each in buckets)])]
                figures = [total, *counts]
                if self._is_delta:
                    figures = self._change(family, tuple(sample.labels.items()), figures)
                yield self._histogram_point(buckets, sample.labels, figures)
                buckets = []

    def _histogram_point(
        self, buckets: Sequence[Sample], labels: Mapping[str, str], figures: Sequence[float]
    ) -> HistogramDataPoint:
        """`figures` are the sum of the values and the number of values in each bucket."""
        counts = [int(figure) for figure in figures[1:]]
        return HistogramDataPoint(
            attributes=dict(labels),
            start_time_unix_nano=self._since_ns,
            time_unix_nano=self._now_ns,
            count=sum(counts),
            sum=figures[0],
            bucket_counts=counts,
            explicit_bounds=[float(each.labels[LE]) for each in buckets[:-1]],
            # Minimum and maximum are unknown. They are omitted from the data that is sent.
            min=cast(float, None),
            max=cast(float, None),
            exemplars=[_exemplar(each.exemplar) for each in buckets if each.exemplar],
        )

    def _change(self, family: Family, series: Labels, figures: list[float]) -> list[float]:
        """Returns the difference to the figures that were sent before. A series whose figures have
        decreased has begun again at 0."""
        before = self._before.get(family.name, {}).get(series, [0.0] * len(figures))
        self._after.setdefault(family.name, {})[series] = figures
        changes = [new - old for new, old in zip(figures, before, strict=True)]
        return figures if min(changes) < 0 else changes


def _exemplar(given: Any) -> Exemplar:
    ids = given.labels
    at_ns = int(given.timestamp * 1e9)
    return Exemplar({}, given.value, at_ns, int(ids["span_id"], 16), int(ids["trace_id"], 16))
