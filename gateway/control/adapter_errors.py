"""Control task: adapters that workers could not load, written to Postgres for `adapter show`."""

from __future__ import annotations

from admin.database import Database
from admin.periodic import repeat
from admin.queries import sql
from gateway.dispatch.fleet import Fleet
from workers.wire.protocol import WorkerStatus

LOOK_INTERVAL_S = 1.0
LOOKS_TO_REPEAT = 60
"""Looks after which everything is written again: a gateway that does not know a worker may have
removed its rows."""

AdapterErrors = list[dict[str, str]]


class AdapterErrorReports:
    """Writes the errors that workers report, when they change."""

    def __init__(self, database: Database, fleet: Fleet) -> None:
        self._database = database
        self._fleet = fleet
        self._written: dict[str, AdapterErrors] = {}
        """By worker. Of a worker that is not here, rows of an earlier process may exist."""
        self._looks_left = LOOKS_TO_REPEAT

    async def run(self) -> None:
        """Writes until cancelled."""
        await repeat("errors of adapters are not reported", self._look, LOOK_INTERVAL_S)

    async def _look(self) -> None:
        self._looks_left -= 1
        if self._looks_left == 0:
            self._looks_left = LOOKS_TO_REPEAT
            self._written = {}
        statuses = [client.status for client in self._fleet.clients]
        reported = {s.instance_id: _errors(s) for s in statuses if s is not None}
        news = {w: errors for w, errors in reported.items() if self._written.get(w) != errors}
        if not news:
            return
        async with self._database.acquire() as connection:
            for worker, errors in news.items():
                await connection.execute(sql["faults_report"], worker, errors)
                self._written[worker] = errors
            # One that is away may come back as it was, one that was replaced does not.
            if None not in statuses:
                await connection.execute(sql["faults_forget"], sorted(reported))


def _errors(status: WorkerStatus) -> AdapterErrors:
    return [
        {"digest": adapter.digest, "code": adapter.error, "message": adapter.message}
        for adapter in status.adapters
        if adapter.error
    ]
