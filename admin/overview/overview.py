"""Overview of all workers and gateways.

The overview is read from reports in the database. Gateways write their own load there, and the
reports that they receive from workers. The admin plane connects to neither gateways nor workers.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from datetime import UTC, datetime
from typing import Any

import msgspec

from admin.overview.latencies import merged, percentiles
from admin.overview.schemas import (
    Held,
    ModelOverview,
    Overview,
    TenantOverview,
    Trouble,
    WorkerOverview,
)
from admin.schemas import shown
from admin.workers.workers import Worker, WorkerModel, WorkerStatus, list_workers
from store.database import Connection
from store.gateway_load import GatewayLoad, ModelLoad
from store.queries import sql

MAX_WORKERS = 100
MAX_GATEWAYS = 100
MAX_MODELS = 100
MAX_TENANTS = 50
MAX_TROUBLES = 20
KINDS = {"free": ".", "kv": "k", "adapters": "a", "weights": "w"}
"""Character that a worker's report contains for an extent, by the extent's use."""
NOTHING = WorkerStatus()
MIN_SECONDS = 1.0
"""Minimum seconds by which a count is divided for a rate, even if a gateway has run for less."""


Served = tuple[ModelLoad, float]
"""Load of a base model on one gateway, and the number of seconds that the load covers."""


async def take_overview(connection: Connection) -> Overview:
    """Returns an overview of up to `MAX_WORKERS` workers and `MAX_GATEWAYS` gateways, by id."""
    counts = await connection.fetchrow(sql["overview_counts"])
    assert counts is not None
    workers = await list_workers(connection, "", MAX_WORKERS)
    gateways = await connection.fetch(sql["overview_gateways"], MAX_GATEWAYS)
    loads = {
        row["id"]: msgspec.convert(row["load"], GatewayLoad)
        for row in gateways
        if row["load"] is not None
    }
    names = await connection.fetch(sql["overview_models"], MAX_MODELS)
    served = [(model, _seconds(load)) for load in loads.values() for model in load.models]
    held = [model for status in _statuses(workers) for model in status.models]
    return Overview(
        at=datetime.now(UTC),
        **counts,
        num_gateways=len(gateways),
        requests_in_flight=sum(load.requests_in_flight for load in loads.values()),
        **_rates(served, "requests", "prompt_tokens", "completion_tokens"),
        ttft=percentiles(merged(load.ttft for load, _ in served)),
        itl=percentiles(merged(model.itl for model in held)),
        refusals=_refusals(loads.values()),
        workers=[_worker(worker) for worker in workers],
        models=[
            _model(
                row["name"],
                [each for each in served if each[0].model == row["name"]],
                [model for model in held if model.digest == row["digest"]],
            )
            for row in names
        ],
        tenants=await _tenants(connection, loads.values(), workers),
        troubles=_troubles(workers, loads),
    )


def _statuses(workers: Iterable[Worker]) -> list[WorkerStatus]:
    """Returns the statuses of workers that are not lost."""
    return [w.status for w in workers if w.status is not None and w.state != "lost"]


def _seconds(load: GatewayLoad) -> float:
    return max(load.seconds, MIN_SECONDS)


def _rates(served: Sequence[Served], *counts: str) -> dict[str, Any]:
    """Returns the rate per second of each of the counts, summed over all gateways. The keys are the
    rates' field names in the overview, such as `requests_per_s`."""
    return {
        f"{count}_per_s": sum(getattr(load, count) / seconds for load, seconds in served)
        for count in counts
    }


def _refusals(loads: Iterable[GatewayLoad]) -> dict[str, int]:
    counts = Counter[str]()
    for load in loads:
        counts.update(load.refusals)
    return dict(counts.most_common())


def _worker(worker: Worker) -> WorkerOverview:
    status = (worker.status if worker.state != "lost" else None) or NOTHING
    extent_bytes = status.arena_bytes // max(len(status.extents), 1)
    adapters: dict[str, Held] = {}
    for tier in ("device", "host", "loading"):
        sizes = [adapter.num_bytes for adapter in status.adapters if adapter.tier == tier]
        number, size = len(sizes), sum(sizes)
        if status.adapter_counts:
            number, size = status.adapter_counts.get(tier, 0), status.adapter_bytes.get(tier, 0)
        adapters[tier] = Held(number, size)
    return shown(
        WorkerOverview,
        worker,
        num_running=sum(model.num_running for model in status.models),
        num_waiting=sum(model.num_waiting for model in status.models),
        tokens_per_s=status.tokens_per_s,
        itl=percentiles(merged(model.itl for model in status.models)),
        resident=[model.name for model in status.models if model.tier == "device"],
        memory={kind: extent_bytes * status.extents.count(mark) for kind, mark in KINDS.items()},
        adapters=adapters,
    )


def _model(name: str, served: Sequence[Served], held: Sequence[WorkerModel]) -> ModelOverview:
    return ModelOverview(
        name=name,
        num_on_device=sum(model.tier == "device" for model in held),
        num_running=sum(model.num_running for model in held),
        num_waiting=sum(model.num_waiting for model in held),
        **_rates(served, "requests", "prompt_tokens", "cached_tokens", "completion_tokens"),
        failed=sum(load.failed for load, _ in served),
        ttft=percentiles(merged(load.ttft for load, _ in served)),
        itl=percentiles(merged(model.itl for model in held)),
    )


async def _tenants(
    connection: Connection, loads: Iterable[GatewayLoad], workers: Iterable[Worker]
) -> list[TenantOverview]:
    requests, tokens = defaultdict[str, float](float), defaultdict[str, float](float)
    for load in loads:
        seconds = _seconds(load)
        for used in load.tenants:
            requests[used.tenant] += used.requests / seconds
            tokens[used.tenant] += used.tokens / seconds
    kv_bytes, adapter_bytes = Counter[str](), Counter[str]()
    for status in _statuses(workers):
        for held in status.tenants:
            kv_bytes[held.tenant] += held.kv_bytes
            adapter_bytes[held.tenant] += held.adapter_bytes
    ids = kv_bytes.keys() | adapter_bytes.keys() | tokens.keys()
    ordered = sorted(
        # Omits the empty id, which stands for no tenant.
        ids - {""},
        key=lambda each: (-tokens[each], -kv_bytes[each] - adapter_bytes[each], each),
    )[:MAX_TENANTS]
    rows = await connection.fetch(sql["overview_names"], ordered)
    names = {row["id"]: row["name"] for row in rows}
    return [
        TenantOverview(
            id=each,
            name=names.get(each, ""),
            requests_per_s=requests[each],
            tokens_per_s=tokens[each],
            kv_bytes=kv_bytes[each],
            adapter_bytes=adapter_bytes[each],
        )
        for each in ordered
    ]


def _troubles(workers: Iterable[Worker], loads: dict[str, GatewayLoad]) -> list[Trouble]:
    found: list[Trouble] = []
    for worker in workers:
        if worker.reason or worker.state in ("lost", "unreached"):
            found.append(Trouble(place=worker.id, code=worker.state, message=worker.reason))
    broken = {
        adapter.digest: Trouble(place=adapter.digest, code=adapter.error, message=adapter.message)
        for status in _statuses(workers)
        for adapter in status.adapters
        if adapter.error
    }
    found += broken.values()
    errors = [(error, gateway) for gateway, load in loads.items() for error in load.errors]
    found += [
        Trouble(
            place=gateway,
            code=error.code,
            at=datetime.fromtimestamp(error.at, UTC),
            number=error.number,
            request_id=error.request_id,
        )
        for error, gateway in sorted(errors, key=lambda each: -each[0].at)
    ]
    return found[:MAX_TROUBLES]
