"""What workers could not load, kept in Postgres for those who ask about an adapter."""

from __future__ import annotations

from admin.database import Database
from admin.queries import sql
from gateway.dispatch.fleet import Fleet
from gateway.periodic import repeat
from workers.wire.protocol import WorkerStatus

LOOK_INTERVAL_S = 1.0
LOOKS_TO_REPEAT = 60
"""All is said again so often: another gateway that does not know the worker may have removed it."""

Faults = list[dict[str, str]]


class FaultReports:
    """Writes what the workers report, when it changes."""

    def __init__(self, database: Database, fleet: Fleet) -> None:
        self._database = database
        self._fleet = fleet
        self._written: dict[str, Faults] = {}
        """By worker; one that is not here may have left anything in an earlier life of ours."""
        self._looks_left = LOOKS_TO_REPEAT

    async def run(self) -> None:
        """Until cancelled."""
        await repeat("faults of adapters are not reported", self._look, LOOK_INTERVAL_S)

    async def _look(self) -> None:
        self._looks_left -= 1
        if self._looks_left == 0:
            self._looks_left = LOOKS_TO_REPEAT
            self._written = {}
        statuses = [client.status for client in self._fleet.clients]
        reported = {s.instance_id: _faults(s) for s in statuses if s is not None}
        news = {w: faults for w, faults in reported.items() if self._written.get(w) != faults}
        if not news:
            return
        async with self._database.acquire() as connection:
            for worker, faults in news.items():
                await connection.execute(sql["faults_report"], worker, faults)
                self._written[worker] = faults
            # One that is away may come back as it was, one that was replaced does not.
            if None not in statuses:
                await connection.execute(sql["faults_forget"], sorted(reported))


def _faults(status: WorkerStatus) -> Faults:
    return [
        {"digest": adapter.digest, "code": adapter.error, "message": adapter.message}
        for adapter in status.adapters
        if adapter.error
    ]
