"""Control task: reports the catalog generation in use and the requests in flight."""

from __future__ import annotations

import asyncio

from gateway.catalog.catalog import Catalog
from gateway.dispatch.inflight import InFlightRequests
from store.database import Database
from store.queries import sql

INTERVAL_S = 1.0


class Heartbeat:
    """Writer of this gateway's row in `gateways`.

    A version that is neither in the reported generation of the catalog, nor in flight in the same
    report, is never used here again. A request resolves in the newest view and is counted without a
    pause in between, and both are read together.
    """

    def __init__(
        self,
        database: Database,
        gateway_id: str,
        catalog: Catalog,
        in_flight_requests: InFlightRequests,
    ) -> None:
        self.has_joined = asyncio.Event()
        """Set when the row is first written. No request may be served before."""
        self._database = database
        self._id = gateway_id
        self._catalog = catalog
        self._in_flight_requests = in_flight_requests
        self.wake = asyncio.Event()
        """Set to send a report at once."""
        catalog.watch(lambda _: self.wake.set())

    async def leave(self) -> None:
        """Removes the row. Called when nothing is in flight and nothing will be."""
        async with asyncio.timeout(INTERVAL_S), self._database.acquire() as connection:
            await connection.execute(sql["gateway_leave"], self._id)

    async def report(self) -> None:
        async with self._database.acquire() as connection:
            view = self._catalog.view
            generation = 0 if view is None else view.generation
            in_flight = dict(self._in_flight_requests.by_version)
            await connection.execute(sql["gateway_report"], self._id, generation, in_flight)
        self.has_joined.set()
