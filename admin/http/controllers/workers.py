"""Workers: list, read what they say of themselves, drain."""

from __future__ import annotations

from litestar import Controller, delete, get, post
from litestar.params import FromPath

from admin.adapters.adapters import content_names
from admin.database import Connection
from admin.http.guards import ADMIN, requires
from admin.http.parameters import After, Limit
from admin.http.request import AdminRequest
from admin.schemas import Page, page
from admin.workers import workers
from admin.workers.schemas import WorkerDetails, WorkerView
from admin.workers.workers import Worker


class WorkerController(Controller):
    path = "/workers"
    tags = ("workers",)

    @get(guards=[requires(ADMIN)])
    async def list_workers(
        self,
        request: AdminRequest,
        after: After = "",
        limit: Limit = 100,
    ) -> Page[WorkerView]:
        """By id. One that is lost stays in the list for half a minute."""
        async with request.reading() as connection:
            found = await workers.list_workers(connection, after, limit + 1)
        return page([WorkerView.of(worker) for worker in found], limit)

    @get("/{worker_id:str}", guards=[requires(ADMIN)])
    async def show_worker(self, request: AdminRequest, worker_id: FromPath[str]) -> WorkerDetails:
        """What it said of itself last, about a second ago: models, adapters by tier, pages, queue,
        settings."""
        async with request.reading() as connection:
            return await _describe(connection, await workers.find_worker(connection, worker_id))

    @post("/{worker_id:str}/drain", guards=[requires(ADMIN)], status_code=200)
    async def drain(self, request: AdminRequest, worker_id: FromPath[str]) -> WorkerDetails:
        """Have it take nothing new and finish what it has; it is idle when nothing runs or waits
        there. Again changes nothing."""
        return await _set_draining(request, worker_id, draining=True)

    @delete("/{worker_id:str}/drain", guards=[requires(ADMIN)], status_code=200)
    async def undrain(self, request: AdminRequest, worker_id: FromPath[str]) -> WorkerDetails:
        """Have it take requests again, unless it is about to end. Again changes nothing."""
        return await _set_draining(request, worker_id, draining=False)


async def _set_draining(request: AdminRequest, worker_id: str, *, draining: bool) -> WorkerDetails:
    async with request.transaction() as connection:
        changed = await workers.set_draining(connection, worker_id, draining)
        return await _describe(connection, changed)


async def _describe(connection: Connection, worker: Worker) -> WorkerDetails:
    adapters = worker.status.adapters if worker.status else []
    names = await content_names(connection, {adapter.digest for adapter in adapters})
    return WorkerDetails.with_names(worker, names)
