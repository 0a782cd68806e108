"""Writes the statuses of workers to Postgres for the admin plane. A control task of the gateway."""

from __future__ import annotations

from gateway.dispatch.fleet import Fleet
from store.database import Database
from store.queries import sql
from workers.wire.status import WorkerStatus

REPORTS_TO_REPEAT = 60
"""Number of reports after which the errors of all workers are written again, because another
gateway that does not know a worker may have removed the worker's rows."""

AdapterErrors = list[dict[str, str]]


class WorkerReports:
    """Writer of new worker statuses, of the reasons why workers cannot be reached, and of changed
    lists of adapters that could not be loaded."""

    def __init__(self, database: Database, gateway_id: str, fleet: Fleet) -> None:
        self._database = database
        self._id = gateway_id
        self._fleet = fleet
        self._statuses: dict[str, WorkerStatus] = {}
        """Statuses already written, by worker."""
        self._errors: dict[str, AdapterErrors] = {}
        """Errors already written, by worker. A worker without an entry may have rows in the
        database that an earlier process has written."""
        self._reports_left = REPORTS_TO_REPEAT

    async def report(self) -> None:
        clients = self._fleet.clients
        said = {c.instance_id: (c.address, c.status) for c in clients if c.status is not None}
        # Statuses that were already written are skipped, so the last status of a silent worker is
        # not written again.
        news = [
            {"id": worker, "address": address, "status": status}
            for worker, (address, status) in said.items()
            if self._statuses.get(worker) is not status
        ]
        failures = [
            {"address": client.address, "failure": client.failure}
            for client in clients
            if client.status is None and client.failure
        ]
        self._reports_left -= 1
        if self._reports_left == 0:
            self._reports_left = REPORTS_TO_REPEAT
            self._errors = {}
        errors = {worker: _errors(status) for worker, (_, status) in said.items()}
        changed = {w: found for w, found in errors.items() if self._errors.get(w) != found}
        if not (news or failures or changed):
            return
        # Rows of unconnected workers are deleted only while all known workers are connected. A
        # worker that returned with unchanged errors would lose its rows, which are not rewritten.
        are_all_here = all(
            client.status is not None or not client.has_answered for client in clients
        )
        async with self._database.acquire() as connection:
            if news:
                await connection.execute(sql["workers_report"], self._id, news)
            if failures:
                await connection.execute(sql["workers_not_reached"], failures)
            for worker, found in changed.items():
                await connection.execute(sql["faults_report"], worker, found)
                self._errors[worker] = found
            if changed and are_all_here:
                await connection.execute(sql["faults_forget"], sorted(errors))
        self._statuses = {worker: status for worker, (_, status) in said.items()}


def _errors(status: WorkerStatus) -> AdapterErrors:
    return [
        {"digest": adapter.digest, "code": adapter.error, "message": adapter.message}
        for adapter in status.adapters
        if adapter.error
    ]
