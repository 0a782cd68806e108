"""Runs all background tasks of a gateway that use the database."""

from __future__ import annotations

import asyncio
import contextlib

from gateway.catalog.catalog import Catalog
from gateway.control.canary_judge import CanaryJudge
from gateway.control.heartbeat import INTERVAL_S, Heartbeat
from gateway.control.load_reports import LoadReports
from gateway.control.verification import AdapterVerification
from gateway.control.worker_reports import WorkerReports
from gateway.dispatch.fleet import Fleet
from gateway.dispatch.in_flight import InFlightRequests
from gateway.limits.leases import Leases
from gateway.metering.usage_loader import UsageLoader
from gateway.metering.wal import WriteAheadLog
from store.database import Database
from store.errors import ApiError
from store.key_uses import KeyUses
from store.periodic import repeat
from web.refused_keys import RefusedKeys

LOAD_INTERVAL_S = 2.0
"""Seconds between two reports of the gateway's load."""
LAST_LOAD_S = 5.0
"""Maximum seconds for loading usage into the database at shutdown. The next process loads the
rest."""


class ControlTasks:
    """Background tasks of one gateway. The gateway serves requests once the first heartbeat is
    written, without waiting for the other tasks."""

    def __init__(
        self,
        database: Database,
        gateway_id: str,
        catalog: Catalog,
        fleet: Fleet,
        in_flight_requests: InFlightRequests,
        key_uses: KeyUses,
        refused_keys: RefusedKeys,
        wal: WriteAheadLog,
        leases: Leases,
    ) -> None:
        self._loader = UsageLoader(database, wal, leases.release)
        self._leases = leases
        self._database = database
        self._key_uses = key_uses
        self._refused_keys = refused_keys
        self._heartbeat = Heartbeat(database, gateway_id, catalog, in_flight_requests)
        self._parts = [
            AdapterVerification(database, gateway_id, catalog, fleet),
            CanaryJudge(database, gateway_id, catalog, in_flight_requests.outcomes),
            leases,
        ]
        self._workers = WorkerReports(database, gateway_id, fleet)
        self._load = LoadReports(database, gateway_id, in_flight_requests)
        self.has_joined = self._heartbeat.has_joined

    async def run(self) -> None:
        """Runs all tasks until cancelled."""
        heartbeat = self._heartbeat
        async with asyncio.TaskGroup() as tasks:
            for what, work, interval_s, wake in (
                ("the heartbeat is not written", heartbeat.report, INTERVAL_S, heartbeat.wake),
                ("the state of workers is not reported", self._workers.report, INTERVAL_S, None),
                ("usage is not loaded", self._loader.load, INTERVAL_S, None),
                # The row in `gateway_load` refers to the heartbeat's row, which must exist first.
                ("the load is not reported", self._load.report, LOAD_INTERVAL_S, None),
            ):
                tasks.create_task(repeat(what, work, interval_s, wake))
            for part in self._parts:
                tasks.create_task(part.run())
            tasks.create_task(self._key_uses.run(self._database))
            tasks.create_task(self._refused_keys.run(self._database))

    async def leave(self) -> None:
        """Removes the heartbeat's row, and loads the last usage into the database. Called once no
        request is in flight."""
        with contextlib.suppress(ApiError, TimeoutError):
            await self._heartbeat.leave()
            await self._key_uses.write(self._database)
            await self._refused_keys.write(self._database)
        with contextlib.suppress(ApiError, OSError, TimeoutError):
            async with asyncio.timeout(LAST_LOAD_S):
                await self._loader.load()
                await self._leases.leave()
