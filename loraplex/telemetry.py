"""The OpenTelemetry SDK of a process: what it counts, read as a Prometheus page."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path

from opentelemetry import metrics
from opentelemetry.metrics import CallbackOptions, Observation
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader
from opentelemetry.sdk.resources import SERVICE_NAME, Resource
from prometheus_client import CONTENT_TYPE_LATEST, REGISTRY, CollectorRegistry, generate_latest
from prometheus_client import Metric as Family
from prometheus_client.registry import Collector

from loraplex.certificates import expiry_of
from loraplex.exposition import families, joined

__all__ = ["CONTENT_TYPE_LATEST", "render_metrics", "set_up_telemetry", "show_certificates"]

_reader = InMemoryMetricReader()


def set_up_telemetry(role: str) -> None:
    """Collects what this process counts through the OpenTelemetry API; once a process."""
    resource = Resource.create({SERVICE_NAME: f"loraplex-{role}"})
    metrics.set_meter_provider(MeterProvider([_reader], resource=resource))


def render_metrics(worker: bytes = b"") -> bytes:
    """Prometheus text of all instruments and of the process itself. On any thread.

    worker: the page of a worker on the same machine, to be one with this gateway's."""
    own = list(_own())
    if worker:
        own = joined(own, worker.decode(), ("gateway", "worker"))
    registry = CollectorRegistry()
    registry.register(_Page(own))
    return generate_latest(registry)


def _own() -> Iterator[Family]:
    if (data := _reader.get_metrics_data()) is not None:
        yield from families(data)
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
