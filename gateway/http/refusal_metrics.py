"""Counters of refusals, by their reason and by tenant."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from gateway import telemetry
from gateway.catalog.auth import Principal


class GatewayRefusals:
    """Counter of the requests and connections that a server with the data plane refuses."""

    def add_answer(self, scope: Mapping[str, Any], status: int, reason: str) -> None:
        telemetry.refusals.add(1, reason)
        if isinstance(caller := scope.get("user"), Principal):
            telemetry.tenant_use.add((caller.tenant.id,), 0, 0, 0, 1)
        if status >= 500:
            telemetry.last_errors.note(reason, scope["state"].get("request_id", ""))

    def add_connection(self, reason: str) -> None:
        telemetry.connections_refused.add(1, reason)
