"""The workers this gateway is connected to."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence

from gateway.catalog import CatalogView, Target
from gateway.errors import NoWorker
from gateway.routing import Candidate, pick
from workers.client import WorkerClient
from workers.protocol import Desired, ModelInfo, Pin, WorkerStatus

GREET_INTERVAL_S = 0.25
"""How soon a worker that came back is told what is wanted."""


class Fleet:
    """A static list of clients, each of which keeps its connection up by itself."""

    def __init__(self, clients: Sequence[WorkerClient]) -> None:
        self.clients = clients
        self._tiers: dict[str, tuple[WorkerStatus, dict[str, str]]] = {}
        self._view: CatalogView | None = None
        self._told: dict[str, Mapping[str, ModelInfo]] = {}
        """By address, the models of the connection that was told last."""

    @property
    def is_ready(self) -> bool:
        return any(client.is_ready for client in self.clients)

    async def run(self) -> None:
        """Keeps every connection up until cancelled."""
        async with asyncio.TaskGroup() as connections:
            connections.create_task(self._greet())
            for client in self.clients:
                connections.create_task(client.run())

    def choose(self, model: str, adapter: str | None) -> WorkerClient:
        """The worker for a sequence on the base model and with the adapter of these digests;
        NoWorker if none is ready."""
        able = self.serving(model)
        if not able:
            raise NoWorker("No worker is ready for this model. Try again shortly.")
        return able[pick([self._candidate(client, adapter) for client in able])]

    def serving(self, model: str) -> list[WorkerClient]:
        """Those that are ready and have the base model of this digest."""
        return [c for c in self.clients if c.is_ready and model in c.models]

    def prefetch(self, target: Target) -> None:
        """Has the worker that the target's request would go to now bring the adapter nearer."""
        model = target.base.digest
        if target.version is None or not self.serving(model):
            return
        worker = self.choose(model, target.version.digest)
        if self._tiers_of(worker).get(target.version.digest) != "device":
            adapter = target.adapter_for(worker.models[model].adapter_layout)
            assert adapter is not None
            worker.prefetch(model, adapter)

    def want(self, view: CatalogView) -> None:
        """Tells every worker, now and when it comes back, what this catalog wants kept."""
        self._view = view
        for client in self.clients:
            self._tell(client, view)

    async def _greet(self) -> None:
        while True:
            for client in self.clients:
                if self._view is not None and self._told.get(client.address) is not client.models:
                    self._tell(client, self._view)
            await asyncio.sleep(GREET_INTERVAL_S)

    def _tell(self, client: WorkerClient, view: CatalogView) -> None:
        """Not before it is connected: what to send depends on its layouts."""
        if client.models:
            client.want(_desired(view, client.models))
            self._told[client.address] = client.models

    def _tiers_of(self, client: WorkerClient) -> dict[str, str]:
        """Where the worker holds adapters, by digest, as of its last status."""
        if client.status is None:
            return {}
        known = self._tiers.get(client.address)
        if known is None or known[0] is not client.status:
            tiers = {adapter.digest: adapter.tier for adapter in client.status.adapters}
            known = self._tiers[client.address] = client.status, tiers
        return known[1]

    def _candidate(self, client: WorkerClient, adapter: str | None) -> Candidate:
        if client.status is None:
            return Candidate(load=client.num_open)
        reported = sum(model.num_running + model.num_waiting for model in client.status.models)
        tier = self._tiers_of(client).get(adapter) if adapter is not None else None
        return Candidate(load=max(reported, client.num_open), tier=tier)


def _desired(view: CatalogView, models: Mapping[str, ModelInfo]) -> Desired:
    pins: dict[tuple[str, str], Pin] = {}
    for target in view.pinned():
        model = models.get(target.base.digest)
        adapter = target.adapter_for(model.adapter_layout) if model is not None else None
        if model is not None and adapter is not None:
            pins[model.digest, adapter.digest] = Pin(model.digest, adapter)
    return Desired(view.generation, list(pins.values()))
