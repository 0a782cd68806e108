"""Sends the metrics of a process over OTLP at intervals."""

from __future__ import annotations

import atexit
from collections.abc import Mapping
from threading import Event, Thread

from opentelemetry.sdk.metrics.export import InMemoryMetricReader, MetricExporter

from loraplex.errors import BadSettings
from loraplex.histograms import Traced, with_histograms
from loraplex.otlp import SEND_TIMEOUT_S, otlp_url

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
    """Raises BadSettings if a variable is invalid. Called before the sending process starts."""
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
        """Starts sending. `reader` must already belong to a MeterProvider."""
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
