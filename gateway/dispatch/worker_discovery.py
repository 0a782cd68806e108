"""Clients of all workers: those in the settings, and those that have registered."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Sequence

from gateway.catalog.catalog import CatalogView
from workers.wire.client import WorkerClient

log = logging.getLogger(__name__)

LOOK_INTERVAL_S = 0.25


class WorkerDiscovery:
    """Clients of workers. A registered worker's client is removed once the worker is neither
    registered nor connected, so that requests there end, and a database that is unavailable for
    longer than leases last costs no worker. Clients of the settings stay."""

    def __init__(
        self, clients: Sequence[WorkerClient], connect: Callable[[str], WorkerClient]
    ) -> None:
        """`clients` are those of the settings. `connect` returns a client for an address."""
        self.clients = list(clients)
        """Changed in place. Each client keeps its connection up by itself."""
        self._connect = connect
        self._connecting: dict[WorkerClient, asyncio.Task[None]] = {}
        """Tasks that connect to registered workers."""
        self._registered: frozenset[str] = frozenset()
        """Addresses of the registered workers."""
        self._drains: dict[str, bool] = {}
        """Whether a worker is to drain, by its id."""
        self._changed = asyncio.Event()

    def follow(self, view: CatalogView) -> None:
        self._registered = frozenset(w.address for w in view.workers if w.is_registered)
        self._drains = {w.id: w.draining for w in view.workers if w.draining is not None}
        self._changed.set()

    async def run(self) -> None:
        """Keeps every connection up until cancelled."""
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
        """Repeats each request to drain until the worker's status shows it."""
        for client in self.clients:
            wanted = self._drains.get(client.instance_id)
            if wanted is not None and client.status and client.status.draining != wanted:
                client.drain(wanted)
