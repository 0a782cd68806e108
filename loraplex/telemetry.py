"""The OpenTelemetry SDK of a process: what it counts, read as a Prometheus page, and sent over OTLP
where the standard variables say so."""

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
from loraplex.exposition import Traced, families, joined
from loraplex.metric_sending import MetricSender, send_interval_s
from loraplex.otlp import otlp_url, resource
from workers.tallies import Histogram

_reader = InMemoryMetricReader()
_traced: Traced = {}


def set_up_telemetry(role: str, traced: Iterable[Histogram] = ()) -> None:
    """Collects what this process counts through the OpenTelemetry API; once a process. traced:
    histograms whose values have traces. Raises BadSettings."""
    global _traced
    _traced = {histogram.name: histogram for histogram in traced}
    sender = _sender()
    readers = [_reader] if sender is None else [_reader, sender.reader]
    described = resource(os.environ, role, str(uuid.uuid4()))
    metrics.set_meter_provider(MeterProvider(readers, resource=described, shutdown_on_exit=False))
    if sender is not None:
        sender.start()


def _sender() -> MetricSender | None:
    """Raises BadSettings."""
    if (url := otlp_url(os.environ, "metrics")) is None:
        return None
    interval_s = send_interval_s(os.environ)
    # It brings an HTTP client of its own, which a process that sends nothing does not load.
    from opentelemetry.exporter.otlp.proto.http.metric_exporter import OTLPMetricExporter

    return MetricSender(OTLPMetricExporter(url), interval_s, _traced)


def content_type(accept: str) -> str:
    """Type of the page for a client that accepts this: OpenMetrics, which has exemplars, if asked
    for."""
    is_open = "application/openmetrics-text" in accept
    return openmetrics.CONTENT_TYPE_LATEST if is_open else CONTENT_TYPE_LATEST


def render_metrics(worker: bytes = b"", form: str = CONTENT_TYPE_LATEST) -> bytes:
    """Page of all instruments and of the process itself. On any thread.

    worker: the page of a worker on the same machine, to be one with this gateway's. form: a
    content type."""
    own = list(_own())
    if worker:
        own = joined(own, worker.decode(), ("gateway", "worker"))
    registry = CollectorRegistry()
    registry.register(_Page(own))
    is_open = form == openmetrics.CONTENT_TYPE_LATEST
    if is_open:
        # Any other way of escaping takes the colon out of `vllm:`.
        return openmetrics.generate_latest(registry, escaping=openmetrics.ALLOWUTF8)
    return generate_latest(registry)


def _own() -> Iterator[Family]:
    if (data := _reader.get_metrics_data()) is not None:
        yield from families(data, _traced)
    yield from REGISTRY.collect()


def show_certificates(files: Mapping[str, Path]) -> None:
    """Shows when certificates end, by what their files are for. Each is read when the page is."""

    def observe(_: CallbackOptions) -> Iterator[Observation]:
        for name, file in files.items():
            with suppress(OSError, ValueError):
                yield Observation(expiry_of(file), {"certificate": name})

    metrics.get_meter("loraplex").create_observable_gauge(
        "loraplex_certificate_expiry_timestamp_seconds",
        [observe],
        "s",
        "When a certificate of this process ends, in seconds since 1970.",
    )


class _Page(Collector):
    def __init__(self, families: list[Family]) -> None:
        self._families = families

    def collect(self) -> list[Family]:
        return self._families
