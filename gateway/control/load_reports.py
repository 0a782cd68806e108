"""Writes this gateway's recent load to Postgres for the admin plane, which does not connect to
gateways. A control task of the gateway."""

from __future__ import annotations

from collections.abc import Sequence
from heapq import nlargest

from gateway import telemetry
from gateway.dispatch.in_flight import InFlightRequests
from gateway.metering.usage_loader import Status
from store.database import Database
from store.gateway_load import GatewayLoad, ModelLoad, TenantLoad
from store.queries import sql
from telemetry.tallies import Labels, Recent, Totals

MAX_MODELS = 64
MAX_TENANTS = 32
MAX_REASONS = 32
"""Maximum number of refusal reasons in a report. A report contains only the models, tenants and
refusal reasons with the highest counts, and has at most about 20 KB."""


class LoadReports:
    """Writer of this gateway's row in the table `gateway_load`. The row has a foreign key to this
    gateway's row in `gateways`."""

    def __init__(
        self, database: Database, gateway_id: str, in_flight_requests: InFlightRequests
    ) -> None:
        self._database = database
        self._id = gateway_id
        self._in_flight_requests = in_flight_requests
        self._recent = Recent(
            telemetry.requests,
            telemetry.tokens,
            telemetry.time_to_first_token,
            telemetry.refusals,
            telemetry.tenant_use,
        )

    async def report(self) -> None:
        load = self._load()
        async with self._database.acquire() as connection:
            await connection.execute(sql["gateway_load_report"], self._id, load)

    def _load(self) -> GatewayLoad:
        seconds, (requests, tokens, ttft, refusals, tenants) = self._recent.read()
        return GatewayLoad(
            seconds=seconds,
            requests_in_flight=len(self._in_flight_requests.open),
            models=_by_model(requests, tokens, ttft),
            refusals={reason: int(number) for (reason,), (number,) in _most(refusals, MAX_REASONS)},
            tenants=[
                TenantLoad(tenant, int(used), int(number))
                for (tenant,), (used, number, *_others) in _most(tenants, MAX_TENANTS)
            ],
            errors=telemetry.last_errors.newest_first(),
        )


def _most(totals: Totals, number: int) -> list[tuple[Labels, Sequence[float]]]:
    return nlargest(number, totals.items(), key=lambda item: item[1][0])


def _by_model(requests: Totals, tokens: Totals, ttft: Totals) -> list[ModelLoad]:
    """Returns the load of the models with the most requests, summed over all service classes."""
    ended: dict[str, dict[str, int]] = {}
    for (model, _class, status), (number,) in requests.items():
        by_status = ended.setdefault(model, {})
        by_status[status] = by_status.get(status, 0) + int(number)
    used: dict[tuple[str, str], int] = {}
    for (model, _class, kind), (number,) in tokens.items():
        used[model, kind] = used.get((model, kind), 0) + int(number)
    waits: dict[str, list[float]] = {}
    for (model, _class), counts in ttft.items():
        before = waits.get(model, [0.0] * len(counts))
        waits[model] = [a + b for a, b in zip(before, counts, strict=True)]
    found = [
        ModelLoad(
            model=model,
            requests=sum(by_status.values()),
            failed=by_status.get(Status.FAILED, 0),
            prompt_tokens=used.get((model, "prompt"), 0),
            cached_tokens=used.get((model, "cached"), 0),
            completion_tokens=used.get((model, "completion"), 0),
            ttft=telemetry.time_to_first_token.buckets(waits.get(model, ())),
        )
        for model, by_status in ended.items()
    ]
    return nlargest(MAX_MODELS, found, key=lambda model: model.requests)
