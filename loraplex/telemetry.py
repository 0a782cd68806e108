"""The OpenTelemetry SDK of a role: its instruments, read as Prometheus text."""

from __future__ import annotations

from opentelemetry import metrics
from opentelemetry.exporter.prometheus import PrometheusMetricReader
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.resources import SERVICE_NAME, Resource
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest

__all__ = ["CONTENT_TYPE_LATEST", "render_metrics", "set_up_telemetry"]


def set_up_telemetry(role: str) -> None:
    """Collects what this process counts through the OpenTelemetry API; once a process."""
    resource = Resource.create({SERVICE_NAME: f"loraplex-{role}"})
    provider = MeterProvider([PrometheusMetricReader()], resource=resource)
    metrics.set_meter_provider(provider)


def render_metrics() -> bytes:
    """Prometheus text of all instruments, and of the process itself. On any thread."""
    return generate_latest()
