"""Workers: registered by their own process, reported by gateways. Functions of a connection.

The admin plane never talks to a worker: what is wanted of one reaches it through the gateways.
"""

from __future__ import annotations

from collections.abc import Collection
from datetime import datetime
from typing import Literal

import msgspec

from admin.database import EVERYTHING, Connection, Database
from admin.errors import NotFound
from admin.gateway_load import Latencies
from admin.queries import fetch_all, fetch_one, from_row, lock_catalog, sql
from admin.records import ModelState

LOST_S = 5.0
"""A worker that no gateway has reported for so long is lost, or every gateway is."""
FORGOTTEN_S = 30.0
"""Seconds without report or lease after which a worker is forgotten."""

UNSATISFIABLE = "unsatisfiable"
"""The tier of a model that a worker, as it is set up, cannot serve."""

State = Literal["ready", "draining", "lost", "unreached", "unsatisfiable"]


class WorkerModel(msgspec.Struct, frozen=True):
    """A base model as its worker tells; figures that a worker does not know are 0."""

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
    """Times between two tokens of a sequence, of the last minute."""


class WorkerAdapter(msgspec.Struct, frozen=True):
    digest: str
    tier: str
    num_bytes: int = 0
    leases: int = 0
    """Sequences that run with it."""
    pinned: bool = False
    error: str = ""
    """Code of the failure of its last load, until one succeeds."""
    message: str = ""


class WorkerTenant(msgspec.Struct, frozen=True):
    """Bytes of the device that are charged to a tenant; an empty id: to none."""

    tenant: str
    kv_bytes: int
    adapter_bytes: int


class WorkerStatus(msgspec.Struct, frozen=True):
    """What the worker says of itself, as far as it is shown."""

    draining: bool = False
    models: list[WorkerModel] = []
    adapters: list[WorkerAdapter] = []
    arena_bytes: int = 0
    extents: str = ""
    settings: dict[str, str] = {}
    step: int = 0
    tokens_per_s: float = 0.0
    tenants: list[WorkerTenant] = []


class Worker(msgspec.Struct, frozen=True):
    id: str
    """Its name for itself; one process has one."""
    address: str
    is_registered: bool
    """Gateways find it by its registration; else it stands in their settings."""
    draining: bool | None
    """Whether it was asked to drain; None: nothing was asked."""
    registered_at: datetime
    reported_at: datetime | None
    reported_by: str | None
    """Id of the gateway."""
    status: WorkerStatus | None
    failure: str
    """Why a gateway did not reach it when it last tried; empty once one does."""
    age_s: float
    """Age of the report, in seconds."""

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
        """Why it is not reached, or what is wrong with its models, by name; empty if nothing is."""
        if self.failure and self.state in ("lost", "unreached"):
            return self.failure
        models = self.status.models if self.status else []
        return "; ".join(f"{m.name}: {m.tier}: {m.error}" for m in models if m.error)


async def list_workers(connection: Connection, after: str, limit: int) -> list[Worker]:
    """By id."""
    return await fetch_all(connection, Worker, "worker_list", after, limit, None)


async def find_worker(connection: Connection, worker_id: str) -> Worker:
    """Raises NotFound."""
    missing = NotFound(f"no worker {worker_id[:128]!r}", "worker_not_found")
    return await fetch_one(connection, Worker, "worker_list", "", 1, worker_id, missing=missing)


async def model_states(
    connection: Connection, digests: Collection[str]
) -> dict[str, list[ModelState]]:
    """States of each base model by worker, of workers heard of that the connection sees."""
    rows = await connection.fetch(sql["model_states"], list(digests), LOST_S)
    states: dict[str, list[ModelState]] = {digest: [] for digest in digests}
    for row in rows:
        states[row["digest"]].append(from_row(ModelState, row))
    return states


async def set_draining(connection: Connection, worker_id: str, draining: bool) -> Worker:
    """In a transaction of the caller's. Raises NotFound."""
    await lock_catalog(connection)
    await connection.execute(sql["worker_set_draining"], worker_id, draining)
    return await find_worker(connection, worker_id)


async def register_worker(database: Database, worker_id: str, address: str, lease_s: float) -> None:
    """Lets gateways find it for so long; to be repeated before."""
    async with database.acquire() as connection:
        if await connection.fetchval(sql["worker_renew"], worker_id, lease_s):
            return
    async with database.transaction(EVERYTHING) as connection:
        await lock_catalog(connection)
        await connection.execute(sql["worker_register"], worker_id, address, lease_s)


async def leave(database: Database, worker_id: str) -> None:
    """It has ended."""
    async with database.transaction(EVERYTHING) as connection:
        await lock_catalog(connection)
        await connection.execute(sql["worker_leave"], worker_id)


async def forget_lost(database: Database) -> None:
    """Removes workers that have not reported for long."""
    async with database.transaction(EVERYTHING) as connection:
        if not await connection.fetchval(sql["workers_gone"], FORGOTTEN_S):
            return
        await lock_catalog(connection)
        await connection.execute(sql["workers_forget"], FORGOTTEN_S)
