"""Connects to the workers that the settings contain or that have registered, and chooses among them
for each request."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import random
import time
from collections.abc import Callable, Collection, Generator, Mapping, Sequence
from contextlib import contextmanager

from gateway.catalog.resolved_model import ResolvedModel
from gateway.catalog.view import CatalogView
from gateway.dispatch.routing import best, weigh
from gateway.dispatch.run import Work
from gateway.dispatch.standings import Report, Standing, Workers
from gateway.exceptions import ModelUnsatisfiable, NoWorker
from workers.wire.client import WorkerClient
from workers.wire.frames import Desired, Pin
from workers.wire.protocol import ModelInfo
from workers.wire.status import UNSATISFIABLE, ModelStatus, WorkerStatus, why_unsatisfiable

log = logging.getLogger(__name__)

CHECK_INTERVAL_S = 0.25
"""Seconds between checks for workers that have connected, disconnected or reported."""
MEMORY = 0.95
"""Factor by which `_num_sequences` and `_num_own` decay with each report of a worker."""
NOT_NONE = 0.1
"""Added to this gateway's number of sequences in each report, so that the estimated number of
gateways stays finite while this gateway is idle."""
NONE_SERVES = "no worker serves a base model yet"
"""Reason why a gateway is not ready while its workers still fetch or load all their models."""


class Fleet:
    """Clients of all workers, among which a worker is chosen for each request.

    The client of a registered worker is removed once the worker is neither registered nor
    connected. The client of a connected worker is kept, so that the worker's requests can end, and
    so that no worker is lost if the database is unavailable for a long time. Clients of workers in
    the settings are never removed.
    """

    def __init__(
        self,
        clients: Sequence[WorkerClient],
        connect: Callable[[str], WorkerClient] = WorkerClient,
        *,
        clock: Callable[[], float] = time.monotonic,
        rng: random.Random | None = None,
    ) -> None:
        """`clients` are the clients of the workers in the settings. `connect` returns a client for
        an address."""
        self.clients = list(clients)
        """Clients of all workers. Each client reconnects by itself."""
        self.weighed: Mapping[WorkerClient, float] = {}
        """Candidates of the last choice and their predicted seconds to the first token. Empty if
        the gateway had only one worker."""
        self._workers: Workers[WorkerClient] = Workers()
        self._statuses: dict[WorkerClient, WorkerStatus | None] = {}
        """Status from which each worker's standing was computed."""
        self._rates: dict[str, float] = {}
        """Prefill tokens per second by model, as last measured by any worker."""
        self._num_sequences, self._num_own = 0.0, 1.0
        """Decaying sums of sequence counts: of all gateways, and of this gateway alone."""
        self._clock = clock
        self._random = rng or random.Random()
        self._connect = connect
        self._connecting: dict[WorkerClient, asyncio.Task[None]] = {}
        """Tasks of the clients of registered workers."""
        self._view: CatalogView | None = None
        self._changed = asyncio.Event()
        """Set when there is a new `_view`."""
        self._told: dict[WorkerClient, tuple[CatalogView, Mapping[str, ModelInfo]]] = {}
        """Catalog from which the wanted adapters and models were last sent to each worker, and the
        worker's models at that time."""

    def follow(self, view: CatalogView) -> None:
        """Adopts a new catalog. `run` connects to the workers registered in it, and sends every
        worker the adapters and models that it wants loaded."""
        self._view = view
        self._changed.set()

    async def run(self) -> None:
        """Connects to all workers, adds and removes clients, and sends the workers what the catalog
        wants of them, until cancelled."""
        async with asyncio.TaskGroup() as connections:
            for client in self.clients:
                connections.create_task(client.run())
            while True:
                self._changed.clear()
                if self._view is not None:
                    self._follow(self._view, connections)
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(CHECK_INTERVAL_S):
                        await self._changed.wait()

    def choose(self, work: Work, excluded: Collection[WorkerClient] = ()) -> WorkerClient:
        """Returns the best worker for a request. Raises NoWorker if no worker outside `excluded` is
        ready, has the base model and speaks the needed protocol version."""

        def is_able(client: WorkerClient) -> bool:
            is_new_enough = client.version >= work.least_version
            return _serves(client, work.model) and is_new_enough and client not in excluded

        def is_heard(client: WorkerClient) -> bool:
            return is_able(client) and not client.is_silent

        for usable in (is_heard, is_able):
            if any(map(usable, self.clients)):
                break
        else:
            raise self._why_none(work)
        if len(self.clients) == 1:
            self.weighed = {}
            return self.clients[0]
        self._look()
        now = self._clock()
        cached = _num_cached(work, self.clients)
        self.weighed = weigh(work, self._workers, cached, now, self._random, usable)
        return best(self.weighed)

    def states(self) -> dict[str, int]:
        """Returns the number of workers in each state: ready, silent (connected, but without a
        recent status), draining, lost, and absent (an address that has never answered)."""
        found = {"ready": 0, "silent": 0, "draining": 0, "lost": 0, "absent": 0}
        for client in list(self.clients):
            found[_state(client)] += 1
        return found

    def why_not_serving(self) -> str | None:
        """Returns the reason why no worker serves any base model now. Returns None if a worker
        does."""
        ready = [client for client in self.clients if client.is_ready]
        if not ready:
            return "no worker is ready"
        if any(client.models for client in ready):
            return None
        told = [client.status.models if client.status else [] for client in ready]
        reason = why_unsatisfiable([model for models in told for model in models])
        if all(told) and reason:
            return f"no worker can serve any base model: {reason}"
        return NONE_SERVES

    def _why_none(self, work: Work) -> NoWorker:
        """Returns the error for a request without a worker. If every worker has reported that it
        cannot serve the model, this is ModelUnsatisfiable, which tells the client not to retry."""
        found = [_find_model(client, work.model) for client in self.clients]
        reasons = [m.error for m in found if m is not None and m.tier == UNSATISFIABLE]
        if found and len(reasons) == len(found):
            return ModelUnsatisfiable(
                "No worker can serve this model, and waiting does not help: it is unsatisfiable:"
                f" {reasons[0]}."
            )
        versions = [client.version for client in self.clients if _serves(client, work.model)]
        if versions and max(versions) < work.least_version:
            return NoWorker(
                f"This request needs a worker that speaks protocol {work.least_version}; those that"
                f" are ready for its model speak {max(versions)}. Try again after the upgrade."
            )
        return NoWorker("No worker is ready for this model. Try again shortly.")

    def note_sent(self, worker: WorkerClient, work: Work) -> None:
        """Counts a request as sent to the worker, so that later choices consider it."""
        if len(self.clients) > 1 and worker in self._workers.standings:
            self._workers.send(worker, work, _num_cached_at(worker, work), self._clock())

    @contextmanager
    def claimed(self, worker: WorkerClient, work: Work) -> Generator[None]:
        """Counts a request at its chosen worker while the request waits for its limits to be
        reserved. At the end of the block, counts the request as sent, unless the block raises."""
        if len(self.clients) == 1 or worker not in self._workers.standings:
            yield
            return
        with self._workers.claimed(worker, work, _num_cached_at(worker, work)):
            yield
        self.note_sent(worker, work)

    def serving(self, model: str) -> list[WorkerClient]:
        """Returns the ready workers that have the base model with this digest. Silent workers are
        included only if all are silent, so that requests wait for them."""
        able = [client for client in self.clients if _serves(client, model)]
        return [c for c in able if not c.is_silent] or able

    def prefetch(self, target: ResolvedModel) -> None:
        """Makes a worker load the target's adapter in advance if no other worker can serve it. If
        several can, the choice among them depends on the prompt, which has not been read yet."""
        if target.version is None:
            return
        model, digest = target.base.digest, target.version.digest
        able = self.serving(model)
        if len(able) != 1:
            return
        (worker,) = able
        self._look()
        if self._workers.standings[worker].tier(digest) != "device":
            adapter = target.adapter_for(worker.models[model].adapter_layout)
            assert adapter is not None
            worker.prefetch(model, adapter)

    def _follow(self, view: CatalogView, connections: asyncio.TaskGroup) -> None:
        registered = {worker.address for worker in view.workers if worker.is_registered}
        for address in sorted(registered - {client.address for client in self.clients}):
            log.info("worker registered at %s", address)
            client = self._connect(address)
            self.clients.append(client)
            self._connecting[client] = connections.create_task(client.run())
        for client in list(self._connecting):
            if client.address not in registered and not _is_connected(client):
                log.info("worker at %s deregistered", client.address)
                self.clients.remove(client)
                self._connecting.pop(client).cancel()
        self._forget()
        drains = {worker.id: worker.draining for worker in view.workers}
        for client in filter(_is_connected, self.clients):
            # References to adapters depend on the layouts that the worker has reported.
            if self._told.get(client) != (view, client.models):
                client.want(_desired(view, client.models))
                self._told[client] = view, client.models
            wanted = drains.get(client.instance_id)
            # Sent until the worker's status shows the requested state.
            if wanted is not None and client.status and client.status.draining != wanted:
                client.drain(wanted)

    def _forget(self) -> None:
        """Forgets workers whose clients have been removed from `clients`."""
        for client in self._told.keys() - set(self.clients):
            del self._told[client]
        for client in self._statuses.keys() - set(self.clients):
            del self._statuses[client]
            self._workers.remove(client)

    def _look(self) -> None:
        """Updates the workers' standings from new statuses. A worker without a status counts as
        stale."""
        statuses, standings = self._statuses, self._workers.standings
        for client in self.clients:
            status = client.status
            if client not in statuses or statuses[client] is not status:
                statuses[client] = status
                self._workers.put(client, self._know(client, status))
            standings[client].num_more = client.num_open - client.num_open_then
        num_gateways = max(self._num_sequences / self._num_own, 1.0)
        for standing in standings.values():
            standing.num_gateways = num_gateways
        if len(statuses) > len(self.clients):
            self._forget()

    def _know(self, client: WorkerClient, status: WorkerStatus | None) -> Standing:
        if status is None:
            return Standing(Report(), -math.inf)
        for model in status.models:
            if model.prefill_tokens_per_s:
                self._rates[model.digest] = model.prefill_tokens_per_s
        report = Report.of(status, self._rates)
        self._note_share(report, client.num_open_then)
        return Standing(report, client.status_at)

    def _note_share(self, report: Report, num_own: int) -> None:
        num_sequences = sum(model.num_sequences for model in report.models.values())
        self._num_sequences = MEMORY * self._num_sequences + num_sequences
        self._num_own = MEMORY * self._num_own + num_own + NOT_NONE


def _state(client: WorkerClient) -> str:
    if client.is_ready:
        return "silent" if client.is_silent else "ready"
    if client.status is not None and client.status.draining:
        return "draining"
    # The settings may contain the address of a worker that does not exist yet.
    return "lost" if client.has_answered else "absent"


def _is_connected(client: WorkerClient) -> bool:
    return bool(client.models or client.status)


def _serves(client: WorkerClient, model: str) -> bool:
    return client.is_ready and model in client.models


def _find_model(client: WorkerClient, model: str) -> ModelStatus | None:
    models = client.status.models if client.status else []
    return next((status for status in models if status.digest == model), None)


def _num_cached_at(client: WorkerClient, work: Work) -> int:
    return _num_cached(work, [client]).get(client, 0)


def _num_cached(work: Work, clients: Sequence[WorkerClient]) -> dict[WorkerClient, int]:
    """Returns the number of the request's prompt tokens that each worker has in its prefix cache.
    Workers without any are omitted."""
    found: dict[WorkerClient, int] = {}
    for client in clients:
        if (model := client.models.get(work.model)) is None:
            continue
        for prompt in work.prompts:
            if num := client.prefixes.num_cached(prompt, model.cache_layout):
                found[client] = found.get(client, 0) + num
    return found


def _desired(view: CatalogView, models: Mapping[str, ModelInfo]) -> Desired:
    pins: dict[tuple[str, str], Pin] = {}
    for target in view.pinned():
        model = models.get(target.base.digest)
        adapter = target.adapter_for(model.adapter_layout) if model is not None else None
        if model is not None and adapter is not None:
            pins[model.digest, adapter.digest] = Pin(model.digest, adapter)
    return Desired(view.generation, list(pins.values()), view.desired_models())
