"""Routes of workers: list, show their reports, drain."""

from __future__ import annotations

from litestar import Controller, delete, get, post
from litestar.params import FromPath

from admin.adapters.adapters import content_names
from admin.http.entities import read_page
from admin.http.guards import ADMIN, requires
from admin.http.parameters import After, Limit
from admin.http.request import AdminRequest
from admin.schemas import Page
from admin.workers import workers
from admin.workers.schemas import WorkerDetails, WorkerView
from admin.workers.workers import Worker
from store.database import Connection


class WorkerController(Controller):
    path = "/workers"
    tags = ("workers",)
    guards = (requires(ADMIN),)

    @get()
    async def list_workers(
        self, request: AdminRequest, after: After = "", limit: Limit = 100
    ) -> Page[WorkerView]:
        """Lists workers by id. A lost worker stays in the list for half a minute."""
        return await read_page(request, limit, WorkerView.of, workers.list_workers, after)

    @get("/{worker_id:str}")
    async def show_worker(self, request: AdminRequest, worker_id: FromPath[str]) -> WorkerDetails:
        """Shows a worker's last report, about a second old: models, adapters by tier, pages, queue,
        settings."""
        async with request.reading() as connection:
            return await _describe(connection, await workers.find_worker(connection, worker_id))

    @post("/{worker_id:str}/drain", status_code=200)
    async def drain(self, request: AdminRequest, worker_id: FromPath[str]) -> WorkerDetails:
        """Drains a worker: it finishes its requests and accepts no new ones. It is idle once no
        request is running or waiting. Repeating this has no effect."""
        return await _set_draining(request, worker_id, draining=True)

    @delete("/{worker_id:str}/drain", status_code=200)
    async def undrain(self, request: AdminRequest, worker_id: FromPath[str]) -> WorkerDetails:
        """Lets a worker accept requests again, unless it is shutting down. Repeating this has no
        effect."""
        return await _set_draining(request, worker_id, draining=False)


async def _set_draining(request: AdminRequest, worker_id: str, *, draining: bool) -> WorkerDetails:
    async with request.transaction() as connection:
        changed = await workers.set_draining(connection, worker_id, draining)
        return await _describe(connection, changed)


async def _describe(connection: Connection, worker: Worker) -> WorkerDetails:
    adapters = worker.status.adapters if worker.status else []
    names = await content_names(connection, {adapter.digest for adapter in adapters})
    return WorkerDetails.with_names(worker, names)
