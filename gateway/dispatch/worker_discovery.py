"""Creates a client for each worker that the settings contain or that has registered."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Sequence

from gateway.catalog.view import CatalogView
from workers.wire.client import WorkerClient

log = logging.getLogger(__name__)

LOOK_INTERVAL_S = 0.25


class WorkerDiscovery:
    """Clients of all workers. The client of a registered worker is removed once the worker is
    neither registered nor connected. The client of a connected worker is kept, so that the worker's
    requests can end, and so that no worker is lost if the database is unavailable for a long time.
    Clients of workers in the settings are never removed."""

    def __init__(
        self, clients: Sequence[WorkerClient], connect: Callable[[str], WorkerClient]
    ) -> None:
        """`clients` are the clients of the workers in the settings. `connect` returns a client for
        an address."""
        self.clients = list(clients)
        """Clients of all workers. The list is changed in place. Each client reconnects by
        itself."""
        self._connect = connect
        self._connecting: dict[WorkerClient, asyncio.Task[None]] = {}
        self._registered: frozenset[str] = frozenset()
        """Addresses of the registered workers."""
        self._drains: dict[str, bool] = {}
        """Whether each worker should drain, by instance id. Workers without a request to drain are
        omitted."""
        self._changed = asyncio.Event()

    def follow(self, view: CatalogView) -> None:
        self._registered = frozenset(w.address for w in view.workers if w.is_registered)
        self._drains = {w.id: w.draining for w in view.workers if w.draining is not None}
        self._changed.set()

    async def run(self) -> None:
        """Connects to all workers, adds and removes clients, and sends requests to drain, until
        cancelled."""
        async with asyncio.TaskGroup() as connections:
            for client in self.clients:
                connections.create_task(client.run())
            while True:
                self._changed.clear()
                self._meet(connections)
                self._part()
                self._drain()
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(LOOK_INTERVAL_S):
                        await self._changed.wait()

    def _meet(self, connections: asyncio.TaskGroup) -> None:
        for address in sorted(self._registered - {client.address for client in self.clients}):
            log.info("worker registered at %s", address)
            client = self._connect(address)
            self.clients.append(client)
            self._connecting[client] = connections.create_task(client.run())

    def _part(self) -> None:
        for client in list(self._connecting):
            is_connected = client.models or client.status
            if client.address not in self._registered and not is_connected:
                log.info("worker at %s deregistered", client.address)
                self.clients.remove(client)
                self._connecting.pop(client).cancel()

    def _drain(self) -> None:
        """Sends each worker the requested draining state, repeatedly until the worker's status
        shows it."""
        for client in self.clients:
            wanted = self._drains.get(client.instance_id)
            if wanted is not None and client.status and client.status.draining != wanted:
                client.drain(wanted)
