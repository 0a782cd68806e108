"""The workers this gateway is connected to."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from gateway.errors import NoWorker
from gateway.routing import Candidate, pick
from workers.client import WorkerClient
from workers.protocol import AdapterRef


class Fleet:
    """A static list of clients, each of which keeps its connection up by itself."""

    def __init__(self, clients: Sequence[WorkerClient]) -> None:
        self._clients = clients

    @property
    def is_ready(self) -> bool:
        return any(client.is_ready for client in self._clients)

    async def run(self) -> None:
        """Keeps every connection up until cancelled."""
        async with asyncio.TaskGroup() as connections:
            for client in self._clients:
                connections.create_task(client.run())

    def choose(self, model: str, adapter: AdapterRef | None) -> WorkerClient:
        """The worker for a sequence on the base model of this digest; NoWorker if none is ready."""
        able = [c for c in self._clients if c.is_ready and model in c.models]
        if not able:
            raise NoWorker("No worker is ready for this model. Try again shortly.")
        return able[pick([_candidate(client, adapter) for client in able])]


def _candidate(client: WorkerClient, adapter: AdapterRef | None) -> Candidate:
    status = client.status
    if status is None:
        return Candidate(load=client.num_open)
    reported = sum(model.num_running + model.num_waiting for model in status.models)
    tiers = (a.tier for a in status.adapters if adapter and a.digest == adapter.digest)
    return Candidate(load=max(reported, client.num_open), tier=next(tiers, None))
