"""Registers the base models that a worker serves, and loads and unloads them as the residency
policy orders."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from dataclasses import replace
from threading import Lock

from memory.bounded_items import BoundedItems
from memory.errors import release_frames
from workers.base_models.fetcher import ModelFetcher
from workers.base_models.loader import Loaded, ModelLoader
from workers.base_models.residency import Demand, ModelResidency
from workers.base_models.served_model import ServedModel
from workers.device.weight_memory import WeightMemory
from workers.execution.engine import Event
from workers.execution.model_runner import ModelRunner
from workers.models.progress import ByteProgress
from workers.verification.adapter_verifier import AdapterVerifier
from workers.wire.frames import DesiredModel
from workers.wire.protocol import ErrorCode
from workers.wire.status import UNSATISFIABLE, ModelStatus

log = logging.getLogger(__name__)


class ServedModels:
    """Base models of a worker. Used on the engine thread. `want` and `status` are called with the
    memory lock held, `activate` with or without it, and all other methods without it."""

    def __init__(
        self,
        models: dict[str, ServedModel],
        residency: ModelResidency,
        weights: WeightMemory,
        memory: Lock,
        loader: ModelLoader,
        fetcher: ModelFetcher,
        verifier: AdapterVerifier,
        *,
        host_bytes: int,
        clock: Callable[[], float],
    ) -> None:
        """models: registered models by digest. Only this object changes the dict, with the memory
        lock held. Other threads may look up models in it. memory: the memory lock.
        host_bytes: maximum bytes of the packed weights that are kept in host memory."""
        self.models = models
        self.active: dict[str, ServedModel] = {}
        """Models that are not idle. Other models are skipped in the work between two steps."""
        self._residency = residency
        self._weights = weights
        self._memory = memory
        self._loader = loader
        self._fetcher = fetcher
        self._verifier = verifier
        self._host = BoundedItems[str](host_bytes, self._loss_s)
        """Sizes of the packed weights that are kept in host memory, by digest."""
        self._clock = clock
        self._desired: dict[str, DesiredModel] = {}

    @property
    def is_fetching(self) -> bool:
        """Whether the first attempt to fetch a model of the catalog is running."""
        return self._fetcher.is_first_try

    def add(self, model: ServedModel) -> None:
        """Registers a built model, without loading its weights."""
        with self._memory:
            self.models[model.digest] = model
            self._residency.add(model.state)
            self._residency.capacity = self._weights.capacity
        self._apply_catalog(model)

    def activate(self, digest: str) -> None:
        """Marks a registered model as active. Called when the model receives work."""
        self.active[digest] = self.models[digest]

    def load_now(self, digest: str, progress: ByteProgress) -> ModelRunner | None:
        """Loads a model on the calling thread, and returns its runner. If other models would have
        to be unloaded first, does nothing and returns None. Raises CheckpointError or OSError."""
        model = self.models[digest]
        state = model.state
        if state.num_extents > self._residency.num_free:
            return None
        self._weights.allocate(digest, state.num_extents)
        runner = self._take(model, self._loader.load_here(model.plan, model.image, progress))
        if model.image is not None:
            model.image.arrival.synchronize()
            model.end_copy(self._clock())
        return runner

    def want(self, models: Iterable[DesiredModel]) -> None:
        """Sets the models of the catalog, and starts to fetch the models that are not registered. A
        model that is no longer in the catalog is unregistered once it is idle."""
        self._desired = {model.digest: model for model in models}
        for model in self.models.values():
            self._apply_catalog(model)
        for digest, model in self._desired.items():
            if digest not in self.models:
                self._fetcher.fetch(digest, model.name)
        self._fetcher.forget(set(self._desired))

    def advance(self) -> list[Event]:
        """Completes finished loads, and executes the orders of the residency policy. Called between
        two steps."""
        events: list[Event] = []
        active = list(self.active.values())
        for model in active:
            events += self._take_loaded(model)
            model.end_copy(self._clock())
        with self._memory:
            demands = {model.digest: self._demand(model) for model in active}
        orders = self._residency.decide(demands)
        for digest in orders.cancel:
            self._release(self.models[digest])
        for digest in orders.leave:
            events += self._leave(self.models[digest])
        for model in active:
            if model.state.is_unloaded:
                message = "the base model was unloaded"
                with self._memory:
                    events += _fail_waiting(model, message)
                    self._verifier.refuse(model.digest, message)
        for digest in orders.preempt:
            events += self.models[digest].engine.suspend()
        for digest in orders.unsatisfiable:
            events += self._fail_unsatisfiable(self.models[digest])
        graphs = next((model.graphs for model in active if model.can_capture), None)
        # A capture waits for all work of the device, also for copies of other models' weights.
        if graphs is not None and all(model.copy_begun_s is None for model in active):
            graphs.capture_next()
        for model in active:
            if model.state.tier == "gathering":
                events += self._gather(model)
            if model.is_idle:
                del self.active[model.digest]
                if not model.state.is_named:
                    events += self._unregister(model)
        return events

    def register_fetched(self) -> None:
        """Registers the models whose fetches have finished."""
        for model in self._fetcher.take():
            self.add(model)
            log.info("model %s (%s) is registered", model.engine.info.name, model.digest[:12])

    def status(self) -> list[ModelStatus]:
        """Returns the status of the registered models, followed by the status of the models that
        are being fetched or could not be fetched."""
        here = [model.status(self._clock()) for model in self.models.values()]
        return here + [
            ModelStatus(
                *(digest, f.name, 0, 0, 0, 0, 0, 0, 0, 0),
                tier=UNSATISFIABLE if f.is_unsatisfiable else "cold",
                error=f.error,
            )
            for digest, f in self._fetcher.fetches.items()
        ]

    def close(self) -> None:
        """Cancels running loads and waits for them."""
        for model in self.models.values():
            if model.load is not None:
                model.load.cancel()
        self._loader.close()
        self._fetcher.close()

    def _apply_catalog(self, model: ServedModel) -> None:
        """Applies the catalog's settings to the model."""
        desired = self._desired.get(model.digest)
        model.state.is_named = desired is not None or not self._desired
        model.state.is_pinned = desired is not None and desired.is_pinned
        model.state.is_unloaded = desired is not None and desired.is_unloaded
        self.activate(model.digest)

    def _demand(self, model: ServedModel) -> Demand:
        """Returns the engine's demand plus the verifier's probes, which count as requests."""
        demand = model.demand
        num_running, num_waiting = self._verifier.num_probes(model.digest)
        return replace(
            demand,
            num_running=demand.num_running + num_running,
            num_waiting=demand.num_waiting + num_waiting,
        )

    def _gather(self, model: ServedModel) -> list[Event]:
        """Allocates extents for the model, evicting idle items. Once the model has enough extents,
        starts its load, or attaches its runner if packed weights are kept on the host."""
        digest, num_extents = model.digest, model.state.num_extents
        if not self._weights.allocate(digest, num_extents):
            return []
        self._residency.begun(digest)
        runner = model.kept_runner
        if runner is not None:
            return self._try(model, lambda: self._attach(model, runner, model.state.load_s))
        model.load = self._loader.load(model.plan, model.image)
        return []

    def _take_loaded(self, model: ServedModel) -> list[Event]:
        if model.load is None or not model.load.is_done:
            return []
        return self._try(model, lambda: self._take(model, model.end_load()))

    def _try(self, model: ServedModel, work: Callable[[], object]) -> list[Event]:
        try:
            work()
        except Exception as error:
            log.exception("loading model %s failed", model.digest[:12])
            # The frames form a reference cycle with the load, which would keep tensors alive.
            release_frames(error)
            return self._fail(model, f"{type(error).__name__}: {error}")
        return []

    def _take(self, model: ServedModel, loaded: Loaded) -> ModelRunner:
        model.num_bytes = loaded.model.num_bytes
        runner = model.make_runner(loaded.model)
        if model.image is None:
            self._attach(model, runner, loaded.seconds)
        else:
            model.read_s = loaded.seconds
            self._attach(model, runner, model.state.load_s)
            self._keep(model, runner)
        return runner

    def _keep(self, model: ServedModel, runner: ModelRunner) -> None:
        """Marks the model's packed weights to stay in host memory when the model is unloaded from
        the device. To make room, frees packed weights of models that are not on the device, first
        those with the lowest read time per byte, weighted by expected reuse. If even all of them
        would not give enough room, frees and marks nothing."""
        victims = self._host.victims(
            model.num_bytes, may_go=lambda digest: self.models[digest].state.tier == "host"
        )
        if victims is None:
            return
        for digest in victims:
            self._drop_image(self.models[digest], [])
        self._host.put(model.digest, model.num_bytes)
        model.kept_runner = runner

    def _loss_s(self, digest: str) -> float:
        """Returns the cost of freeing packed weights: read seconds, times expected reuse."""
        model = self.models[digest]
        return model.read_s * model.reuse.expected(self._clock())

    def _drop_image(self, model: ServedModel, held: list[object]) -> None:
        """Frees the packed weights and the objects in `held`. The next load reads the files."""
        self._host.drop(model.digest)
        held = [*held, model.kept_runner]
        model.kept_runner = None
        if model.image is not None and model.read_s > 0.0:
            model.state.load_s = model.read_s
        self._loader.discard(model.digest, held, model.image)

    def _attach(self, model: ServedModel, runner: ModelRunner, load_s: float) -> None:
        """Starts to serve the model with the runner. load_s: estimated seconds of the next load."""
        if model.image is not None:
            begin_s = self._clock()
            model.image.bring()
            model.copy_begun_s = begin_s
        model.reuse.note(self._clock())
        model.error = ""
        with self._memory:
            model.attach(runner)
        self._residency.loaded(model.digest, load_s)

    def _leave(self, model: ServedModel) -> list[Event]:
        """Unloads the model. Its sequences resume after the next load. In the meantime, its KV
        pages stay in the prefix cache, and its adapters stay in host memory."""
        events = model.engine.suspend()
        with self._memory:
            self._verifier.put_back(model.digest)
        self._release(model)
        return events

    def _unregister(self, model: ServedModel) -> list[Event]:
        """Unregisters the model. Another thread frees everything that was built for it."""
        model.state.is_unloaded = True
        events = self._leave(model) if model.state.is_here else []
        if model.digest in self._host:
            self._drop_image(model, [])
        with self._memory:
            del self.models[model.digest]
            self._residency.remove(model.digest)
        self._fetcher.close_model(model)
        log.info("model %s is unregistered", model.digest[:12])
        return events

    def _release(self, model: ServedModel) -> None:
        """Frees all that the model has on the device, or that its load has allocated so far, after
        cancelling the load. Packed weights stay in host memory only if they are counted there. No
        sequence of the model may be running."""
        held: list[object] = [model.load]
        if model.load is not None:
            model.load.cancel()
            model.load = None
        if model.engine.runner is not None:
            with self._memory:
                held.append(model.detach())
        if model.image is not None:
            model.copy_begun_s = None
            model.image.leave()
        if model.digest not in self._host or model.state.is_unloaded:
            self._drop_image(model, held)
        self._weights.free(model.digest)

    def _fail(self, model: ServedModel, error: str) -> list[Event]:
        model.error = error
        self._release(model)
        self._residency.failed(model.digest)
        message = "the base model could not be loaded"
        with self._memory:
            return _fail_waiting(model, message)

    def _fail_unsatisfiable(self, model: ServedModel) -> list[Event]:
        """Fails the first waiting request, because the model cannot get memory. If the model was
        about to be loaded, fails all waiting requests."""
        reason = "its memory is held by what is pinned"
        if model.state.tier == "gathering":
            return self._fail(model, reason)
        if not model.state.is_here:
            model.error = reason
        with self._memory:
            first = model.engine.scheduler.first_waiting
            message = f"the base model lacks memory: {reason}"
            return model.engine.fail([first] if first else [], ErrorCode.OVERLOADED, message)


def _fail_waiting(model: ServedModel, message: str) -> list[Event]:
    """Fails all waiting requests of the model. Called with the memory lock held."""
    engine = model.engine
    return engine.fail(engine.waiting, ErrorCode.MODEL_UNAVAILABLE, message)
