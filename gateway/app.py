"""The data plane as an ASGI application."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager

from litestar import Litestar
from litestar.datastructures import State

from admin.database import Database
from admin.keys.last_use import KeyUses
from admin.openapi import StructSchemas
from gateway import exceptions as errors
from gateway.catalog.catalog import Catalog
from gateway.catalog.source import SnapshotSource
from gateway.config import GatewayConfig
from gateway.control.tasks import ControlTasks
from gateway.dispatch.failover import Failover
from gateway.dispatch.fleet import Fleet
from gateway.dispatch.inflight import Flights
from gateway.dispatch.outcomes import Outcomes
from gateway.dispatch.worker_discovery import Roster
from gateway.http.handlers import DataPlane
from gateway.http.openapi import Requirements, document
from gateway.http.request import GatewayRequest
from gateway.http.routes import completions, health, models, tokens
from gateway.limits.admission import Admission
from gateway.limits.leases import Leases, PostgresLeaseRenewal
from gateway.metering.usage import UsageRecorder
from gateway.metering.wal import WriteAheadLog
from gateway.text.tokenizer import Tokenizers
from workers.wire.client import WorkerClient

ROUTES = [
    completions.create_chat_completion,
    completions.create_completion,
    models.list_models,
    models.get_model,
    tokens.tokenize,
    tokens.detokenize,
    health.livez,
    health.readyz,
    health.get_version,
]

START_WAIT_S = 2.0
"""So long nobody is taken for want of a catalog; probes do not wait for ever."""


class Gateway:
    """What the handlers work with, one of each in a process."""

    def __init__(
        self,
        config: GatewayConfig,
        source: SnapshotSource,
        clients: Sequence[WorkerClient],
        database: Database | None,
    ) -> None:
        self.config = config
        self.catalog = Catalog(source, config.catalog_stale_s)
        self.tokenizers = Tokenizers(config.model_folder)
        leases = None
        if database is not None:
            renewal = PostgresLeaseRenewal(database, config.catalog_stale_s)
            leases = Leases(
                renewal,
                config.instance_id,
                config.catalog_stale_s,
                wait_s=config.limits_wait_s,
            )
            self.catalog.watch(lambda _: leases.believe_catalog())
        self.admission = Admission(leases)
        self._roster = Roster(clients, self._connect)
        self.fleet = Fleet(self._roster.clients)
        self.failover = Failover(self.fleet, config.failover_wait_s)
        self.flights = Flights(Outcomes())
        self.turned_away: set[str] = set()
        """Ids of tenants whose newest request came to nothing before it ran: for the next one
        nothing is fetched ahead, so that who is refused moves no other's adapters."""
        self.key_uses = KeyUses()
        self.wal = WriteAheadLog(config.wal, config.instance_id)
        self.usage_recorder = UsageRecorder(self.wal, config.max_wal_bytes)
        self.is_draining = False
        self._control = None
        if database is not None and leases is not None:
            self._control = ControlTasks(
                database,
                config.instance_id,
                self.catalog,
                self.fleet,
                self.flights,
                self.key_uses,
                self.wal,
                leases,
            )
        self.catalog.watch(self._roster.follow)
        self.catalog.watch(self.fleet.want)

    def why_not_ready(self) -> str | None:
        """None if requests can be served."""
        if self.is_draining:
            return "draining"
        if self.catalog.view is None:
            return "the catalog is not loaded"
        if self.catalog.is_stale:
            return "the catalog is stale: the database does not answer"
        return self.fleet.why_not_serving()

    @asynccontextmanager
    async def running(self, _app: Litestar) -> AsyncGenerator[None, None]:
        """Keeps the catalog, the connections to the workers, and what the database is told. Begins
        with the first catalog: who waits for the port to be served need not be refused."""
        control = self._control
        await self.wal.open()
        async with asyncio.TaskGroup() as tasks:
            running = [tasks.create_task(each.run()) for each in (self._roster, self.fleet)]
            if control is not None:
                running.append(tasks.create_task(control.run()))
            running.append(tasks.create_task(self._follow_catalog()))
            try:
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(START_WAIT_S):
                        await self.catalog.loaded.wait()
                yield
            finally:
                self.is_draining = True
                for task in running:
                    task.cancel()
        if control is not None:
            await control.leave()
        await self.wal.close()

    def _connect(self, address: str) -> WorkerClient:
        """Not yet connected."""
        config = self.config
        return WorkerClient(address, instance_id=config.instance_id, security=config.security)

    async def _follow_catalog(self) -> None:
        """Nothing is served without a catalog, and none is taken up before others know of us."""
        if self._control is not None:
            await self._control.has_joined.wait()
        await self.catalog.run()


def create_app(
    config: GatewayConfig,
    *,
    source: SnapshotSource,
    clients: Sequence[WorkerClient],
    database: Database | None = None,
) -> Litestar:
    """`source` yields the catalog's snapshots, `clients` are of the workers in the settings
    (not yet connected); those that register are found in the catalog. Without a database nothing
    is reported or proved, no canary judged, and usage stays in the write-ahead log."""
    gateway = Gateway(config, source, clients, database)
    return DataPlane(
        route_handlers=ROUTES,
        lifespan=[gateway.running],
        state=State({"gateway": gateway}),
        request_class=GatewayRequest,
        exception_handlers={Exception: errors.to_response},
        openapi_config=document(),
        plugins=[StructSchemas(), Requirements()],
        logging_config=None,
    )
