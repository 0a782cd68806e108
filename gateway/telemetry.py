"""Instruments of the gateway process; whatever reads them is set up elsewhere."""

from __future__ import annotations

from opentelemetry import metrics

_meter = metrics.get_meter("loraplex.gateway")

refusals = _meter.create_counter(
    "loraplex_refusals",
    description="Answers with a status of 400 or more, by `reason`, the error's code.",
)
connections_refused = _meter.create_counter(
    "loraplex_connections_refused",
    description="Connections the server closed on its own account, by `reason`.",
)
