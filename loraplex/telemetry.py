"""Metrics of a process, as a Prometheus page and over OTLP."""

from __future__ import annotations

import os
import uuid
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path

from prometheus_client import CONTENT_TYPE_LATEST, REGISTRY, CollectorRegistry, generate_latest
from prometheus_client import Metric as Family
from prometheus_client.openmetrics import exposition as openmetrics
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.registry import Collector

from loraplex.certificates import expiry_of
from loraplex.otlp import otlp_url, resource
from loraplex.otlp_metrics import MetricSender, send_interval_s
from telemetry.tallies import PAGE, Figures, Gauge

PROCESS = "process"
"""Label that names a sample's process, in families that both processes of a page have."""


def send_metrics(role: str) -> None:
    """Starts sending the metrics of this process, if OpenTelemetry's standard variables say so.
    Must be called only once. Raises BadSettings."""
    if (url := otlp_url(os.environ, "metrics")) is None:
        return
    interval_s = send_interval_s(os.environ)
    # Imported here because it loads an HTTP client, which a process that sends nothing does not
    # need.
    from opentelemetry.exporter.otlp.proto.http.metric_exporter import OTLPMetricExporter

    described = resource(os.environ, role, str(uuid.uuid4()))
    MetricSender(OTLPMetricExporter(url), interval_s, described).start()


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
    shown = (family for family in PAGE.collect() if family.samples)
    own = [*sorted(shown, key=lambda family: family.name), *REGISTRY.collect()]
    if worker:
        own = joined(own, worker.decode(), ("gateway", "worker"))
    registry = CollectorRegistry()
    registry.register(_Page(own))
    is_open = form == openmetrics.CONTENT_TYPE_LATEST
    if is_open:
        # Any other escaping would remove the colon from names such as `vllm:...`.
        return openmetrics.generate_latest(registry, escaping=openmetrics.ALLOWUTF8)
    return generate_latest(registry)


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


def show_certificates(files: Mapping[str, Path]) -> None:
    """Adds a metric with the time at which each certificate expires, labelled by setting. Reads the
    files whenever a page is rendered."""

    def read() -> Figures:
        for name, file in files.items():
            with suppress(OSError, ValueError):
                yield expiry_of(file), {"certificate": name}

    Gauge(
        "loraplex_certificate_expiry_timestamp_seconds",
        "Time at which a certificate of this process expires, in seconds since 1970.",
        read,
    )


class _Page(Collector):
    def __init__(self, families: list[Family]) -> None:
        self._families = families

    def collect(self) -> list[Family]:
        return self._families
