"""Routes of workers: list, show their reports, drain."""

from __future__ import annotations

from admin.adapters.adapters import content_names
from admin.http.entities import Entity
from admin.workers import workers
from admin.workers.schemas import WorkerDetails, WorkerView
from admin.workers.workers import Worker
from store.database import Connection

WORKERS = Entity("Worker", "/workers", "workers", WorkerView)
WORKERS.lists(text="Lists workers by id. A lost worker stays in the list for half a minute.")(
    workers.list_workers
)


@WORKERS.shows("/{worker_id:str}")
async def show_worker(connection: Connection, worker_id: str) -> WorkerDetails:
    """Shows a worker's last report, about a second old: models, adapters by tier, pages, queue,
    settings."""
    return await _describe(connection, await workers.find_worker(connection, worker_id))


@WORKERS.changes("POST", "/{worker_id:str}/drain")
async def drain(connection: Connection, worker_id: str) -> WorkerDetails:
    """Drains a worker: it finishes its requests and accepts no new ones. It is idle once no
    request is running or waiting. Repeating this has no effect."""
    return await _describe(connection, await workers.set_draining(connection, worker_id, True))


@WORKERS.changes("DELETE", "/{worker_id:str}/drain")
async def undrain(connection: Connection, worker_id: str) -> WorkerDetails:
    """Lets a worker accept requests again, unless it is shutting down. Repeating this has no
    effect."""
    return await _describe(connection, await workers.set_draining(connection, worker_id, False))


async def _describe(connection: Connection, worker: Worker) -> WorkerDetails:
    adapters = worker.status.adapters if worker.status else []
    names = await content_names(connection, {adapter.digest for adapter in adapters})
    return WorkerDetails.with_names(worker, names)
