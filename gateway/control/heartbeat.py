"""Reports the catalog generation in use and the requests in flight to the database. A control task
of the gateway."""

from __future__ import annotations

import asyncio

from gateway.catalog.catalog import Catalog
from gateway.dispatch.in_flight import InFlightRequests
from store.database import Database
from store.queries import sql

INTERVAL_S = 1.0


class Heartbeat:
    """Writer of this gateway's row in `gateways`.

    A version that is neither in the catalog generation of a report, nor among the requests in
    flight of the same report, is never used by this gateway again. This holds because a request is
    resolved in the newest view and counted as in flight without an await in between, and because
    the report reads the generation and the counts without an await in between.
    """

    def __init__(
        self,
        database: Database,
        gateway_id: str,
        catalog: Catalog,
        in_flight_requests: InFlightRequests,
    ) -> None:
        self.has_joined = asyncio.Event()
        """Event that is set when the row is first written. No request may be served before that."""
        self._database = database
        self._id = gateway_id
        self._catalog = catalog
        self._in_flight_requests = in_flight_requests
        self.wake = asyncio.Event()
        """Event that is set to request a report at once."""
        catalog.watch(lambda _: self.wake.set())

    async def leave(self) -> None:
        """Removes this gateway's row. Called at shutdown, when no request is in flight and none
        will follow."""
        async with asyncio.timeout(INTERVAL_S), self._database.acquire() as connection:
            await connection.execute(sql["gateway_leave"], self._id)

    async def report(self) -> None:
        async with self._database.acquire() as connection:
            view = self._catalog.view
            generation = 0 if view is None else view.generation
            in_flight = dict(self._in_flight_requests.by_version)
            await connection.execute(sql["gateway_report"], self._id, generation, in_flight)
        self.has_joined.set()
