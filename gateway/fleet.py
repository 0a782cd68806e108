"""The workers this gateway is connected to."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence

import msgspec

from gateway.catalog import CatalogView, Target
from gateway.errors import NoWorker
from gateway.routing import Candidate, pick
from workers.client import WorkerClient
from workers.protocol import Desired, ModelInfo, Pin, WorkerStatus

GREET_INTERVAL_S = 0.25
"""How soon a worker that came back is told what is wanted."""


class Reported(msgspec.Struct, frozen=True):
    """A worker's last status, as it is looked up for every request."""

    status: WorkerStatus
    load: int
    """Sequences running and waiting there."""
    tiers: dict[str, str]
    """Where it holds adapters, by digest."""


class Fleet:
    """A static list of clients, each of which keeps its connection up by itself."""

    def __init__(self, clients: Sequence[WorkerClient]) -> None:
        self.clients = clients
        self._reports: dict[str, Reported] = {}
        """By address."""
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
        worker = self._best(model, adapter)
        if worker is None:
            raise NoWorker("No worker is ready for this model. Try again shortly.")
        return worker

    def serving(self, model: str) -> list[WorkerClient]:
        """Those that are ready and have the base model of this digest."""
        return [c for c in self.clients if c.is_ready and model in c.models]

    def prefetch(self, target: Target) -> None:
        """Has the worker that the target's request would go to now bring the adapter nearer."""
        if target.version is None:
            return
        model, digest = target.base.digest, target.version.digest
        worker = self._best(model, digest)
        if worker is None:
            return
        reported = self._reported(worker)
        if reported is None or reported.tiers.get(digest) != "device":
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

    def _best(self, model: str, adapter: str | None) -> WorkerClient | None:
        able = self.serving(model)
        if len(able) < 2:
            return able[0] if able else None
        return able[pick([self._candidate(client, adapter) for client in able])]

    def _candidate(self, client: WorkerClient, adapter: str | None) -> Candidate:
        reported = self._reported(client)
        if reported is None:
            return Candidate(load=client.num_open)
        tier = reported.tiers.get(adapter) if adapter is not None else None
        return Candidate(load=max(reported.load, client.num_open), tier=tier)

    def _reported(self, client: WorkerClient) -> Reported | None:
        """None before its first status."""
        status = client.status
        if status is None:
            return None
        known = self._reports.get(client.address)
        if known is None or known.status is not status:
            load = sum(model.num_running + model.num_waiting for model in status.models)
            tiers = {adapter.digest: adapter.tier for adapter in status.adapters}
            known = self._reports[client.address] = Reported(status, load, tiers)
        return known


def _desired(view: CatalogView, models: Mapping[str, ModelInfo]) -> Desired:
    pins: dict[tuple[str, str], Pin] = {}
    for target in view.pinned():
        model = models.get(target.base.digest)
        adapter = target.adapter_for(model.adapter_layout) if model is not None else None
        if model is not None and adapter is not None:
            pins[model.digest, adapter.digest] = Pin(model.digest, adapter)
    return Desired(view.generation, list(pins.values()))
