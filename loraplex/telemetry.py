"""OpenTelemetry SDK of a process. It shows the metrics as a Prometheus page, and also sends them
over OTLP if the standard variables say so."""

from __future__ import annotations

import os
import uuid
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path

from opentelemetry import metrics
from opentelemetry.metrics import CallbackOptions, Observation
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader
from prometheus_client import CONTENT_TYPE_LATEST, REGISTRY, CollectorRegistry, generate_latest
from prometheus_client import Metric as Family
from prometheus_client.openmetrics import exposition as openmetrics
from prometheus_client.registry import Collector

from loraplex.certificates import expiry_of
from loraplex.exposition import families, joined
from loraplex.histograms import Traced, with_histograms
from loraplex.metric_sending import MetricSender, send_interval_s
from loraplex.otlp import otlp_url, resource
from telemetry.tallies import Histogram

_reader = InMemoryMetricReader()
_traced: Traced = {}


def set_up_telemetry(role: str, traced: Iterable[Histogram] = ()) -> None:
    """Starts collecting the metrics of this process. Must be called only once. `traced` are the
    histograms with exemplars. Raises BadSettings."""
    global _traced
    _traced = {histogram.name: histogram for histogram in traced}
    sender = _sender()
    readers = [_reader] if sender is None else [_reader, sender.reader]
    described = resource(os.environ, role, str(uuid.uuid4()))
    metrics.set_meter_provider(MeterProvider(readers, resource=described, shutdown_on_exit=False))
    if sender is not None:
        sender.start()


def _sender() -> MetricSender | None:
    """Returns the sender of metrics, or None if they are not sent. Raises BadSettings."""
    if (url := otlp_url(os.environ, "metrics")) is None:
        return None
    interval_s = send_interval_s(os.environ)
    # Imported here because it loads an HTTP client, which a process that sends nothing does not
    # need.
    from opentelemetry.exporter.otlp.proto.http.metric_exporter import OTLPMetricExporter

    return MetricSender(OTLPMetricExporter(url), interval_s, _traced)


def content_type(accept: str) -> str:
    """Returns the content type of the metrics page. It is OpenMetrics, which has exemplars, if the
    client accepts that."""
    is_open = "application/openmetrics-text" in accept
    return openmetrics.CONTENT_TYPE_LATEST if is_open else CONTENT_TYPE_LATEST


def render_metrics(worker: bytes = b"", form: str = CONTENT_TYPE_LATEST) -> bytes:
    """Returns the page of all metrics of this process. May be called on any thread.

    `worker` is the metrics page of a worker on the same machine, which is merged into this one.
    `form` is the content type of the result.
    """
    own = list(_own())
    if worker:
        own = joined(own, worker.decode(), ("gateway", "worker"))
    registry = CollectorRegistry()
    registry.register(_Page(own))
    is_open = form == openmetrics.CONTENT_TYPE_LATEST
    if is_open:
        # Any other escaping would remove the colon from names such as `vllm:...`.
        return openmetrics.generate_latest(registry, escaping=openmetrics.ALLOWUTF8)
    return generate_latest(registry)


def _own() -> Iterator[Family]:
    if (data := _reader.get_metrics_data()) is not None:
        yield from families(with_histograms(data, _traced))
    yield from REGISTRY.collect()


def show_certificates(files: Mapping[str, Path]) -> None:
    """Adds a metric with the time at which each certificate expires, labelled by setting. Reads the
    files whenever a page is rendered."""

    def observe(_: CallbackOptions) -> Iterator[Observation]:
        for name, file in files.items():
            with suppress(OSError, ValueError):
                yield Observation(expiry_of(file), {"certificate": name})

    metrics.get_meter("loraplex").create_observable_gauge(
        "loraplex_certificate_expiry_timestamp_seconds",
        [observe],
        "s",
        "Time at which a certificate of this process expires, in seconds since 1970.",
    )


class _Page(Collector):
    def __init__(self, families: list[Family]) -> None:
        self._families = families

    def collect(self) -> list[Family]:
        return self._families
