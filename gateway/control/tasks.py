"""All that a gateway does in the database beside following the catalog."""

from __future__ import annotations

import asyncio
import contextlib

from admin.database import AdminError, Database
from admin.keys.last_use import WRITE_INTERVAL_S, KeyUses
from gateway.catalog.catalog import Catalog
from gateway.control.adapter_errors import FaultReports
from gateway.control.canary_judge import CanaryJudge
from gateway.control.heartbeat import Presence
from gateway.control.verification import Prover
from gateway.control.worker_status import WorkerReports
from gateway.dispatch.fleet import Fleet
from gateway.dispatch.inflight import Flights
from gateway.limits.leases import Leases
from gateway.metering.usage_loader import Shipper
from gateway.metering.wal import Spool
from gateway.periodic import repeat

LAST_LOAD_S = 5.0
"""The usage that does not get into the database by then, whoever comes next loads."""


class Liaison:
    """Serving never waits for it, but for the first word of presence."""

    def __init__(
        self,
        database: Database,
        gateway_id: str,
        catalog: Catalog,
        fleet: Fleet,
        flights: Flights,
        key_uses: KeyUses,
        spool: Spool,
        leases: Leases,
    ) -> None:
        self._shipper = Shipper(database, spool, leases.release)
        self._leases = leases
        self._database = database
        self._key_uses = key_uses
        self._presence = Presence(database, gateway_id, catalog, flights)
        self._parts = [
            self._presence,
            Prover(database, gateway_id, catalog, fleet),
            CanaryJudge(database, gateway_id, catalog, flights.outcomes),
            FaultReports(database, fleet),
            WorkerReports(database, gateway_id, fleet),
            self._shipper,
            leases,
        ]
        self.has_joined = self._presence.has_joined

    async def run(self) -> None:
        """Until cancelled."""
        async with asyncio.TaskGroup() as tasks:
            for part in self._parts:
                tasks.create_task(part.run())
            tasks.create_task(self._write_key_uses())

    async def _write_key_uses(self) -> None:
        await repeat(
            "the use of keys is not written down",
            lambda: self._key_uses.write(self._database),
            WRITE_INTERVAL_S,
        )

    async def leave(self) -> None:
        """When nothing is in flight any more."""
        with contextlib.suppress(AdminError, TimeoutError):
            await self._presence.leave()
            await self._key_uses.write(self._database)
        with contextlib.suppress(AdminError, OSError, TimeoutError):
            async with asyncio.timeout(LAST_LOAD_S):
                await self._shipper.ship()
                await self._leases.leave()
