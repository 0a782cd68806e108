"""Execution of the residency policy's orders: allocates extents, loads and unloads models."""

from __future__ import annotations

import logging
import traceback
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace

import msgspec

from memory.arena import Arena
from memory.eviction.broker import MemoryBroker
from memory.eviction.tier import Tier
from memory.reuse import Reuse
from workers.base_models.fetcher import ModelFetcher
from workers.base_models.loader import Load, Loaded, ModelLoader
from workers.base_models.residency import ModelResidency, ModelState
from workers.device.weight_image import WeightImage
from workers.execution.engine import Event
from workers.execution.model_runner import ModelRunner
from workers.models.loading import LoadedModel
from workers.models.plan import ModelPlan
from workers.models.progress import ByteProgress
from workers.scheduling.schedule import Demand
from workers.verification.adapter_verifier import AdapterVerifier, ModelInstance
from workers.wire.protocol import UNSATISFIABLE, DesiredModel, ErrorCode, ModelStatus

log = logging.getLogger(__name__)

LOAD_BYTES_PER_S = 1e9
"""Assumed bytes per second of a model's load until it is measured."""


@dataclass(slots=True, eq=False)
class RegisteredModel:
    """Registered base model and the state of its weights."""

    plan: ModelPlan
    instance: ModelInstance
    state: ModelState
    make_runner: Callable[[LoadedModel], ModelRunner]
    num_bytes: int
    """Bytes of its weights: an upper bound, then as loaded."""
    image: WeightImage | None = None
    """Packed weights on the host that later loads copy from; None if they are not kept."""
    runner: ModelRunner | None = None
    """Runner with its captured graphs, kept as long as the packed weights stay in host memory."""
    read_s: float = 0.0
    """Seconds of the last load that read the weights from disk."""
    reuse: Reuse = field(default_factory=Reuse)
    """Recent loads of the model."""
    arriving_s: float | None = None
    """Start time of the copy to the device that is in progress, or None."""
    load: Load | None = None
    error: str = ""
    """Error of its last load; empty if it succeeded."""


class ModelPool:
    """Registered models of a worker. Used on the engine thread, which holds the memory lock when it
    calls `want` and `status`, and no other method."""

    def __init__(
        self,
        residency: ModelResidency,
        arena: Arena,
        broker: MemoryBroker,
        loader: ModelLoader,
        fetcher: ModelFetcher,
        verifier: AdapterVerifier,
        *,
        host: Tier[str],
        build: Callable[[str, ModelPlan], RegisteredModel],
        clock: Callable[[], float],
    ) -> None:
        """host: packed weights kept in host memory, by digest. build: creates all that a model
        needs but its weights, and adds it to the residency; raises ValueError if this worker cannot
        serve it."""
        self._residency = residency
        self._arena = arena
        self._broker = broker
        self._loader = loader
        self._fetcher = fetcher
        self._verifier = verifier
        self._host = host
        self._build = build
        self._clock = clock
        self._models: dict[str, RegisteredModel] = {}
        self._desired: dict[str, DesiredModel] = {}

    @property
    def is_busy(self) -> bool:
        """Whether a fetch or load is in progress, or a request waits for a model."""
        is_arriving = any(model.arriving_s is not None for model in self._models.values())
        return is_arriving or self._fetcher.is_busy or not self._residency.is_settled

    @property
    def is_fetching(self) -> bool:
        """Whether a catalog model is being fetched that has not failed before."""
        return self._fetcher.is_first_try

    def add(self, name: str, plan: ModelPlan) -> ModelInstance:
        """Registers a model of the store, without loading its weights. Raises ValueError."""
        model = self._models[plan.digest] = self._build(name, plan)
        self._heed(model)
        return model.instance

    def load_now(self, digest: str, progress: ByteProgress) -> bool:
        """Loads a model on the calling thread. Returns False if other models would have to be
        unloaded for it. Raises CheckpointError and OSError."""
        model = self._models[digest]
        state = model.state
        if state.num_extents > self._residency.num_free:
            return False
        self._broker.allocate_weights(digest, state.num_extents)
        self._take(model, self._loader.load_here(model.plan, model.image, progress))
        if model.image is not None:
            model.image.arrival.synchronize()
            self._note_arrival(model)
        return True

    def want(self, models: Iterable[DesiredModel]) -> None:
        """Sets the catalog's models and starts to fetch unknown ones. A model no longer in the
        catalog stays registered, and is unloaded if others need its memory."""
        self._desired = {model.digest: model for model in models}
        for model in self._models.values():
            self._heed(model)
        for digest, model in self._desired.items():
            if digest not in self._models:
                self._fetcher.fetch(digest, model.name)
        self._fetcher.forget(set(self._desired))

    def refusal(self, digest: str) -> str | None:
        """Returns why requests should not wait for the model now, or None."""
        model = self._models.get(digest)
        if model is None:
            return None
        if model.state.is_unloaded:
            return "the base model is unloaded"
        if model.error and self._clock() < model.state.retry_s:
            return "the base model could not be loaded; it will be tried again"
        return None

    def advance(self) -> list[Event]:
        """Called between two steps: takes finished loads, decides, and executes the decisions."""
        events: list[Event] = []
        for model in self._models.values():
            events += self._take_loaded(model)
            self._note_arrival(model)
        with self._broker.lock:
            demands = {digest: self._demand(model) for digest, model in self._models.items()}
        orders = self._residency.decide(demands)
        for digest in orders.cancel:
            self._give_up(self._models[digest])
        for digest in orders.leave:
            events += self._leave(self._models[digest])
        for digest, model in self._models.items():
            model.instance.engine.is_held = digest in orders.held
            if model.state.is_unloaded:
                message = "the base model was unloaded"
                with self._broker.lock:
                    engine = model.instance.engine
                    events += engine.fail_waiting(ErrorCode.MODEL_UNAVAILABLE, message)
        for digest in orders.preempt:
            events += self._models[digest].instance.engine.suspend()
        for digest in orders.unsatisfiable:
            events += self._fail_unsatisfiable(self._models[digest])
        for model in self._models.values():
            if model.state.is_gathering:
                events += self._gather(model)
        return events

    def take_fetched(self) -> list[ModelInstance]:
        """Registers the models whose fetches have finished, and returns them."""
        instances: list[ModelInstance] = []
        for name, plan in self._fetcher.take():
            try:
                instances.append(self.add(name, plan))
                self._fetcher.registered(plan.digest)
                log.info("model %s (%s) is registered", name, plan.digest[:12])
            except ValueError as error:
                self._fetcher.fail(plan.digest, name, error, is_unsatisfiable=True)
        return instances

    def status(self) -> list[ModelStatus]:
        """Returns the status of registered models, then of models being fetched."""
        here = [self._status(model) for model in self._models.values()]
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
        for model in self._models.values():
            if model.load is not None:
                model.load.cancel()
        self._loader.close()
        self._fetcher.close()

    def _status(self, model: RegisteredModel) -> ModelStatus:
        state = model.state
        return msgspec.structs.replace(
            model.instance.report.status(),
            tier=state.tier,
            num_bytes=model.num_bytes,
            num_swaps=state.num_swaps,
            idle_s=0.0 if state.has_work else self._clock() - state.used_s,
            load_s=state.load_s,
            error=model.error,
            num_proof_steps=model.instance.effect_proof.num_steps,
        )

    def _heed(self, model: RegisteredModel) -> None:
        """Applies the catalog's settings to the model."""
        desired = self._desired.get(model.plan.digest)
        model.state.is_named = desired is not None or not self._desired
        model.state.is_pinned = desired is not None and desired.is_pinned
        model.state.is_unloaded = desired is not None and desired.is_unloaded

    def _demand(self, model: RegisteredModel) -> Demand:
        """Returns the engine's demand plus the verifier's probes, which count as requests."""
        demand = model.instance.engine.demand
        num_running, num_waiting = self._verifier.num_probes(model.plan.digest)
        return replace(
            demand,
            num_running=demand.num_running + num_running,
            num_waiting=demand.num_waiting + num_waiting,
        )

    def _gather(self, model: RegisteredModel) -> list[Event]:
        """Claims idle extents for the model, and starts the load once it holds enough."""
        digest, num_extents = model.plan.digest, model.state.num_extents
        with self._broker.lock:
            missing = num_extents - self._arena.num_weight_extents(digest)
            if self._broker.allocate_weights(digest, missing) < missing:
                return []
        self._residency.begun(digest)
        runner = model.runner
        if runner is not None:
            return self._try(model, lambda: self._attach(model, runner, model.state.load_s))
        model.load = self._loader.load(model.plan, model.image)
        return []

    def _take_loaded(self, model: RegisteredModel) -> list[Event]:
        load = model.load
        if load is None or not load.is_done:
            return []
        model.load = None
        return self._try(model, lambda: self._take(model, load.result()))

    def _try(self, model: RegisteredModel, work: Callable[[], None]) -> list[Event]:
        try:
            work()
        except Exception as error:
            log.exception("loading model %s failed", model.plan.digest[:12])
            # The frames hold the tensors read so far, and each other by way of the load.
            traceback.clear_frames(error.__traceback__)
            return self._fail(model, f"{type(error).__name__}: {error}")
        return []

    def _take(self, model: RegisteredModel, loaded: Loaded) -> None:
        model.num_bytes = loaded.model.num_bytes
        runner = model.make_runner(loaded.model)
        if model.image is None:
            self._attach(model, runner, loaded.seconds)
        else:
            model.read_s = loaded.seconds
            self._attach(model, runner, model.state.load_s)
            self._keep(model, runner)

    def _keep(self, model: RegisteredModel, runner: ModelRunner) -> None:
        """Keeps the packed weights in host memory, replacing those of models off the device that
        are cheapest to read again, by bytes and expected reuse. If too few can be dropped, the
        model's own weights are dropped when it is unloaded."""
        now = self._clock()

        def worth(digest: str) -> float:
            other = self._models[digest]
            return other.read_s * other.reuse.expected(now) / other.num_bytes

        victims = self._host.victims(
            model.num_bytes,
            worth,
            gives_way=lambda digest, _: self._models[digest].state.tier == "host",
        )
        if victims is None:
            return
        for digest in victims:
            self._drop_image(self._models[digest], [])
        self._host.put(model.plan.digest, model.num_bytes)
        model.runner = runner

    def _drop_image(self, model: RegisteredModel, held: list[object]) -> None:
        """Frees the packed weights and the objects in `held`. The next load reads files again."""
        self._host.drop(model.plan.digest)
        held = [*held, model.runner]
        model.runner = None
        if model.image is not None:
            model.state.load_s = model.read_s
            held = [*held, model.image.drop()]
        self._loader.discard(model.plan.digest, held)

    def _attach(self, model: RegisteredModel, runner: ModelRunner, load_s: float) -> None:
        """Starts serving with the runner. load_s: estimated seconds of the next load."""
        if model.image is not None:
            begin_s = self._clock()
            model.image.bring()
            model.arriving_s = begin_s
        model.reuse.note(self._clock())
        model.error = ""
        with self._broker.lock:
            model.instance.engine.attach(runner)
            model.instance.pool.device.is_here = True
        self._residency.loaded(model.plan.digest, load_s)

    def _note_arrival(self, model: RegisteredModel) -> None:
        """Records the duration of a finished weight copy, as the estimate for the next one. The
        copy overlaps the model's first steps."""
        image, since_s = model.image, model.arriving_s
        if image is not None and since_s is not None and image.arrival.is_complete:
            model.arriving_s = None
            model.state.load_s = self._clock() - since_s
            log.info(
                "model %s: copied to the device in %.3f s",
                model.plan.digest[:12],
                model.state.load_s,
            )

    def _leave(self, model: RegisteredModel) -> list[Event]:
        """Unloads the model. Its sequences resume after the next load; pages stay in the prefix
        cache, and adapters on the host."""
        digest, instance = model.plan.digest, model.instance
        events = instance.engine.suspend()
        with self._broker.lock:
            self._verifier.put_back(digest)
            instance.pool.leave_device()
            held: list[object] = [instance.engine.detach()]
        if model.image is not None:
            model.arriving_s = None
            model.image.leave()
        if digest not in self._host or model.state.is_unloaded:
            self._drop_image(model, held)
        with self._broker.lock:
            self._arena.free_weights(digest)
        return events

    def _give_up(self, model: RegisteredModel) -> None:
        """Cancels the load and frees its extents."""
        if model.load is not None:
            model.load.cancel()
            model.load = None
        with self._broker.lock:
            self._arena.free_weights(model.plan.digest)

    def _fail(self, model: RegisteredModel, error: str) -> list[Event]:
        model.error = error
        self._give_up(model)
        self._residency.failed(model.plan.digest)
        message = "the base model could not be loaded"
        with self._broker.lock:
            return model.instance.engine.fail_waiting(ErrorCode.MODEL_UNAVAILABLE, message)

    def _fail_unsatisfiable(self, model: RegisteredModel) -> list[Event]:
        """Fails the first waiting request, because there will be no memory for the model."""
        reason = "its memory is held by what is pinned"
        if model.state.tier == "loading":
            return self._fail(model, reason)
        if not model.state.is_here:
            model.error = reason
        with self._broker.lock:
            return model.instance.engine.fail_first(
                ErrorCode.OVERLOADED, f"the base model lacks memory: {reason}"
            )
