"""Response bodies of workers."""

from __future__ import annotations

from datetime import datetime

import msgspec

from admin.schemas import shown
from admin.workers.workers import (
    State,
    Worker,
    WorkerAdapter,
    WorkerModel,
    WorkerStatus,
    WorkerTenant,
)

NOTHING = WorkerStatus()


class WorkerView(msgspec.Struct, frozen=True, kw_only=True):
    id: str
    address: str
    state: State
    """`lost`: no gateway has reported it for some seconds. `unreached`: no gateway has ever
    reported it. `unsatisfiable`: it cannot serve any base model that it knows."""
    reason: str
    """Why gateways cannot reach the worker, or the problem of its base models. Empty if none."""
    drain_wanted: bool
    num_running: int
    num_waiting: int
    tokens_per_s: float
    resident: list[str]
    """Names of the base models on the worker's device."""
    is_registered: bool
    """Whether gateways find the worker by its registration. Otherwise their settings name it."""
    registered_at: datetime
    reported_at: datetime | None
    object: str = "worker"

    @classmethod
    def of(cls, worker: Worker) -> WorkerView:
        status = worker.status or NOTHING
        return shown(
            cls,
            worker,
            drain_wanted=bool(worker.draining),
            num_running=sum(model.num_running for model in status.models),
            num_waiting=sum(model.num_waiting for model in status.models),
            tokens_per_s=status.tokens_per_s,
            resident=[model.name for model in status.models if model.tier == "device"],
        )


class WorkerAdapterView(WorkerAdapter, frozen=True, kw_only=True):
    names: list[str]
    """TENANT/NAME@VERSION of the versions with this content."""


class WorkerDetails(WorkerView, frozen=True, kw_only=True):
    reported_by: str | None
    """Id of the gateway."""
    models: list[WorkerModel]
    adapters: dict[str, list[WorkerAdapterView]]
    """Adapters by tier: device, host, loading. In other tiers, only adapters that failed to
    load."""
    num_unlisted_adapters: int = 0
    """Number of further adapters that the worker holds, which it leaves out of long lists."""
    arena_bytes: int
    extents: str
    """Map of extents, one character each: '.' free, 'k' KV pages, 'a' adapters, 'w' weights."""
    tenants: list[WorkerTenant]
    """Tenants by the memory of their KV pages and adapters, the most first."""
    step: int
    settings: dict[str, str]

    @classmethod
    def with_names(cls, worker: Worker, names: dict[str, list[str]]) -> WorkerDetails:
        """Returns the view of a worker. `names` are the names of the versions with each digest."""
        status = worker.status or NOTHING
        by_tier: dict[str, list[WorkerAdapterView]] = {}
        for adapter in status.adapters:
            named = shown(WorkerAdapterView, adapter, names=names[adapter.digest])
            by_tier.setdefault(adapter.tier, []).append(named)
        view = msgspec.structs.asdict(WorkerView.of(worker))
        return shown(cls, status, **view, reported_by=worker.reported_by, adapters=by_tier)
