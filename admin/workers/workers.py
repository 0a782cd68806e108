"""Reads and changes the workers in the database. Workers register themselves, and gateways report
their states.

The admin plane never connects to a worker. A request to a worker, such as a drain, reaches it
through the gateways.
"""

from __future__ import annotations

from collections.abc import Collection
from datetime import datetime
from typing import Literal

import msgspec

from store.database import EVERYTHING, Connection, Database
from store.errors import NotFound
from store.gateway_load import Latencies
from store.queries import fetch_all, fetch_one, from_row, lock_catalog, sql
from store.records import ModelState

LOST_S = 5.0
"""Seconds without a report from any gateway after which a worker counts as lost."""
FORGOTTEN_S = 30.0
"""Seconds from the last report of a worker, or from the end of its registration if that is later,
after which the worker is deleted."""

UNSATISFIABLE = "unsatisfiable"
"""Tier of a model that a worker cannot serve with its settings."""

State = Literal["ready", "draining", "lost", "unreached", "unsatisfiable"]


class WorkerModel(msgspec.Struct, frozen=True):
    """Report of a base model on a worker. A figure that the worker does not know is 0."""

    digest: str
    name: str
    tier: str = "device"
    num_bytes: int = 0
    num_swaps: int = 0
    idle_s: float = 0.0
    load_s: float = 0.0
    error: str = ""
    num_running: int = 0
    num_waiting: int = 0
    num_waiting_tokens: int = 0
    """Prompt tokens that are neither computed nor cached."""
    max_num_seqs: int = 0
    pages_total: int = 0
    pages_free: int = 0
    pages_cached: int = 0
    num_preemptions: int = 0
    num_adapter_evictions: int = 0
    prefix_queried_tokens: int = 0
    prefix_hit_tokens: int = 0
    prefill_tokens_per_s: float = 0.0
    decode_step_s: float = 0.0
    itl: Latencies = []
    """Histogram of the times between two tokens of a sequence in the last minute."""


class WorkerAdapter(msgspec.Struct, frozen=True):
    digest: str
    tier: str
    num_bytes: int = 0
    leases: int = 0
    """Number of sequences that use the adapter."""
    pinned: bool = False
    error: str = ""
    """Error code of the last failed load. Empty once a load succeeds."""
    message: str = ""


class WorkerTenant(msgspec.Struct, frozen=True):
    """Bytes of the device that are charged to a tenant. The empty id stands for no tenant."""

    tenant: str
    kv_bytes: int
    adapter_bytes: int


class WorkerStatus(msgspec.Struct, frozen=True):
    """Report of a worker, with the fields that the admin plane shows."""

    draining: bool = False
    models: list[WorkerModel] = []
    adapters: list[WorkerAdapter] = []
    num_unlisted_adapters: int = 0
    """Number of adapters that the list leaves out, because it has a maximum length."""
    adapter_counts: dict[str, int] = {}
    """Number of adapters by tier, with those that are not listed. Empty from an older worker, which
    lists all adapters."""
    adapter_bytes: dict[str, int] = {}
    """Bytes of adapters by tier, as in `adapter_counts`."""
    arena_bytes: int = 0
    extents: str = ""
    settings: dict[str, str] = {}
    step: int = 0
    tokens_per_s: float = 0.0
    tenants: list[WorkerTenant] = []


class Worker(msgspec.Struct, frozen=True):
    id: str
    """Name that the worker gives itself, unique to its process."""
    address: str
    is_registered: bool
    """Whether gateways find the worker by its registration, not by their settings."""
    draining: bool | None
    """Whether a drain was requested. None if neither a drain nor its end was requested."""
    registered_at: datetime
    reported_at: datetime | None
    reported_by: str | None
    """Id of the gateway that sent the report."""
    status: WorkerStatus | None
    failure: str
    """Reason why a gateway last failed to reach the worker. Empty after a success."""
    age_s: float
    """Age of the report in seconds."""

    @property
    def state(self) -> State:
        if self.status is None:
            return "unreached"
        if self.age_s > LOST_S:
            return "lost"
        if self.status.draining:
            return "draining"
        models = self.status.models
        is_of_no_use = models and all(model.tier == UNSATISFIABLE for model in models)
        return UNSATISFIABLE if is_of_no_use else "ready"

    @property
    def reason(self) -> str:
        """Reason why the worker cannot be reached, or the errors of its base models, each with the
        model's name. Empty if there are none."""
        if self.failure and self.state in ("lost", "unreached"):
            return self.failure
        models = self.status.models if self.status else []
        return "; ".join(f"{m.name}: {m.tier}: {m.error}" for m in models if m.error)


async def list_workers(connection: Connection, after: str, limit: int) -> list[Worker]:
    """Returns up to `limit` workers whose ids follow `after`, in the order of their ids."""
    return await fetch_all(connection, Worker, "worker_list", after, limit, None)


async def find_worker(connection: Connection, worker_id: str) -> Worker:
    """Returns a worker. Raises NotFound."""
    missing = NotFound(f"no worker {worker_id[:128]!r}", "worker_not_found")
    return await fetch_one(connection, Worker, "worker_list", "", 1, worker_id, missing=missing)


async def model_states(
    connection: Connection, digests: Collection[str]
) -> dict[str, list[ModelState]]:
    """Returns, by digest, the states of base models on the workers that gateways have reported in
    the last LOST_S seconds, and that the connection may see."""
    rows = await connection.fetch(sql["model_states"], list(digests), LOST_S)
    states: dict[str, list[ModelState]] = {digest: [] for digest in digests}
    for row in rows:
        states[row["digest"]].append(from_row(ModelState, row))
    return states


async def set_draining(connection: Connection, worker_id: str, draining: bool) -> Worker:
    """Requests or ends a worker's drain. Must be called in a transaction. Raises NotFound."""
    await lock_catalog(connection)
    await connection.execute(sql["worker_set_draining"], worker_id, draining)
    return await find_worker(connection, worker_id)


async def register_worker(database: Database, worker_id: str, address: str, lease_s: float) -> None:
    """Registers a worker for `lease_s` seconds. Must be called again before they have passed."""
    async with database.acquire() as connection:
        if await connection.fetchval(sql["worker_renew"], worker_id, lease_s):
            return
    async with database.transaction(EVERYTHING) as connection:
        await lock_catalog(connection)
        await connection.execute(sql["worker_register"], worker_id, address, lease_s)


async def leave(database: Database, worker_id: str) -> None:
    """Deletes the row of a worker that has ended."""
    async with database.transaction(EVERYTHING) as connection:
        await lock_catalog(connection)
        await connection.execute(sql["worker_leave"], worker_id)


async def forget_lost(database: Database) -> None:
    """Deletes each worker for which more than FORGOTTEN_S seconds have passed, both since its last
    report and since its registration ended."""
    async with database.transaction(EVERYTHING) as connection:
        if not await connection.fetchval(sql["workers_gone"], FORGOTTEN_S):
            return
        await lock_catalog(connection)
        await connection.execute(sql["workers_forget"], FORGOTTEN_S)
