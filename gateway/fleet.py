"""The workers this gateway is connected to."""

from __future__ import annotations

import asyncio
import math
import random
import time
from collections.abc import Collection, Mapping, Sequence

import msgspec

from gateway.catalog import CatalogView, Target
from gateway.errors import NoWorker
from gateway.routing import Report, Standing, Work, pick
from workers.client import WorkerClient
from workers.protocol import Desired, ModelInfo, Pin, WorkerStatus

GREET_INTERVAL_S = 0.25
"""How soon a worker that came back is told what is wanted."""
MEMORY = 0.95
"""Of what was reported before, at each report."""
NOT_NONE = 0.1
"""A gateway without traffic does not take itself for one of infinitely many."""


class Known(msgspec.Struct, frozen=True):
    """Where a worker stood when it sent its last status."""

    status: WorkerStatus | None
    standing: Standing


class Fleet:
    """Clients, each of which keeps its connection up by itself."""

    def __init__(self, clients: Sequence[WorkerClient]) -> None:
        """clients: of the workers there are; the roster changes them in place."""
        self.clients = clients
        self._known: dict[WorkerClient, Known] = {}
        self._rates: dict[str, float] = {}
        """Prefill tokens/s by model, as a worker has measured them last."""
        self._num_sequences, self._num_own = 0.0, 1.0
        """At the workers of late, by all gateways and by this one."""
        self._random = random.Random()
        self._view: CatalogView | None = None
        self._told: dict[WorkerClient, Mapping[str, ModelInfo]] = {}
        """The models of the connection that was told last."""

    @property
    def is_ready(self) -> bool:
        return any(client.is_ready for client in self.clients)

    async def run(self) -> None:
        """Keeps workers told until cancelled."""
        while True:
            for client in self.clients:
                if self._view is not None and self._told.get(client) is not client.models:
                    self._tell(client, self._view)
            self._forget()
            await asyncio.sleep(GREET_INTERVAL_S)

    def choose(self, work: Work, excluded: Collection[WorkerClient] = ()) -> WorkerClient:
        """The worker for a request, which is counted as sent there. NoWorker if none is ready that
        has the base model, but for those excluded."""
        able = [client for client in self.serving(work.model) if client not in excluded]
        if not able:
            raise NoWorker("No worker is ready for this model. Try again shortly.")
        if len(able) == 1:
            return able[0]
        now = time.monotonic()
        standings = [self._standing(client) for client in able]
        cached = [_num_cached(client, work) for client in able]
        index = pick(work, standings, cached, now, self._random)
        standings[index].send(work, cached[index], now)
        return able[index]

    def serving(self, model: str) -> list[WorkerClient]:
        """Those that are ready and have the base model of this digest. One that is silent counts
        only where all are: then requests wait for it."""
        able = [c for c in self.clients if c.is_ready and model in c.models]
        return [c for c in able if not c.is_silent] or able

    def prefetch(self, target: Target) -> None:
        """Has the only worker that the target's request can go to bring the adapter nearer now.
        Among several its prompt decides, which is not read yet."""
        if target.version is None:
            return
        model, digest = target.base.digest, target.version.digest
        able = self.serving(model)
        if len(able) != 1:
            return
        (worker,) = able
        if self._standing(worker).tier(digest) != "device":
            adapter = target.adapter_for(worker.models[model].adapter_layout)
            assert adapter is not None
            worker.prefetch(model, adapter)

    def want(self, view: CatalogView) -> None:
        """Tells every worker, now and when it comes back, what this catalog wants kept."""
        self._view = view
        for client in self.clients:
            self._tell(client, view)

    def _forget(self) -> None:
        """What is known of workers that went."""
        for known in (self._known, self._told):
            for client in known.keys() - set(self.clients):
                del known[client]

    def _tell(self, client: WorkerClient, view: CatalogView) -> None:
        """Not before it is connected: what to send depends on its layouts."""
        if client.models or client.status:
            client.want(_desired(view, client.models))
            self._told[client] = client.models

    def _standing(self, client: WorkerClient) -> Standing:
        """Anew with each status; one that has sent none yet is believed to be busy."""
        known = self._known.get(client)
        if known is None or known.status is not client.status:
            known = self._known[client] = self._know(client)
        known.standing.num_more = client.num_open - client.num_open_then
        return known.standing

    def _know(self, client: WorkerClient) -> Known:
        status = client.status
        if status is None:
            return Known(None, Standing(Report(), -math.inf))
        for model in status.models:
            if model.prefill_tokens_per_s:
                self._rates[model.digest] = model.prefill_tokens_per_s
        report = Report.of(status, self._rates)
        self._note_share(report, client.num_open_then)
        num_gateways = max(self._num_sequences / self._num_own, 1.0)
        return Known(status, Standing(report, client.status_at, num_gateways))

    def _note_share(self, report: Report, num_own: int) -> None:
        num_sequences = sum(model.num_sequences for model in report.models.values())
        self._num_sequences = MEMORY * self._num_sequences + num_sequences
        self._num_own = MEMORY * self._num_own + num_own + NOT_NONE


def _num_cached(client: WorkerClient, work: Work) -> int:
    layout = client.models[work.model].cache_layout
    return sum(client.prefixes.num_cached(prompt, layout) for prompt in work.prompts)


def _desired(view: CatalogView, models: Mapping[str, ModelInfo]) -> Desired:
    pins: dict[tuple[str, str], Pin] = {}
    for target in view.pinned():
        model = models.get(target.base.digest)
        adapter = target.adapter_for(model.adapter_layout) if model is not None else None
        if model is not None and adapter is not None:
            pins[model.digest, adapter.digest] = Pin(model.digest, adapter)
    return Desired(view.generation, list(pins.values()), view.desired_models())
