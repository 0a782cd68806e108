"""Control task: the workers' own status, written to Postgres for the admin plane."""

from __future__ import annotations

from admin.database import Database
from admin.periodic import repeat
from admin.queries import sql
from gateway.dispatch.fleet import Fleet
from workers.wire.protocol import WorkerStatus

REPORT_INTERVAL_S = 1.0


class WorkerStatusReports:
    """Writes the last status of each worker that has sent one since, all in one statement, and why
    the others are not reached."""

    def __init__(self, database: Database, gateway_id: str, fleet: Fleet) -> None:
        self._database = database
        self._id = gateway_id
        self._fleet = fleet
        self._written: dict[str, WorkerStatus] = {}
        """By worker."""

    async def run(self) -> None:
        """Writes until cancelled."""
        await repeat("the state of workers is not reported", self._report, REPORT_INTERVAL_S)

    async def _report(self) -> None:
        said = {
            client.instance_id: (client.address, client.status)
            for client in self._fleet.clients
            if client.status is not None
        }
        # A connection that nothing comes over any more tells of what was.
        news = [
            {"id": worker, "address": address, "status": status}
            for worker, (address, status) in said.items()
            if self._written.get(worker) is not status
        ]
        if news:
            async with self._database.acquire() as connection:
                await connection.execute(sql["workers_report"], self._id, news)
        failures = [
            {"address": client.address, "failure": client.failure}
            for client in self._fleet.clients
            if client.status is None and client.failure
        ]
        if failures:
            async with self._database.acquire() as connection:
                await connection.execute(sql["workers_not_reached"], failures)
        self._written = {worker: status for worker, (_, status) in said.items()}
