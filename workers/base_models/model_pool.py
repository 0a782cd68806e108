"""Does what the residency policy orders: gathers extents, has weights loaded, has models leave."""

from __future__ import annotations

import logging
import traceback
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace

import msgspec

from memory.arena import Arena
from memory.broker import MemoryBroker
from memory.reuse import Reuse
from memory.tier import Tier
from workers.base_models.fetcher import ModelFetcher
from workers.base_models.loader import Load, Loaded, ModelLoader
from workers.base_models.residency import ModelResidency, ModelState
from workers.device.weight_image import WeightImage
from workers.execution.engine import Event
from workers.execution.model_runner import ModelRunner
from workers.models.decoder import Decoder
from workers.models.plan import ModelPlan
from workers.models.progress import ByteProgress
from workers.scheduling.demand import Demand
from workers.verification.adapter_verifier import AdapterVerifier, ModelInstance
from workers.wire.protocol import UNSATISFIABLE, DesiredModel, ErrorCode, ModelStatus

log = logging.getLogger(__name__)

LOAD_BYTES_PER_S = 1e9
"""Until a model's own load is measured."""


@dataclass(slots=True, eq=False)
class RegisteredModel:
    """A registered base model and the state of its weights."""

    plan: ModelPlan
    instance: ModelInstance
    state: ModelState
    make_runner: Callable[[Decoder], ModelRunner]
    num_bytes: int
    """Bytes of its weights: as planned, then as loaded."""
    image: WeightImage | None = None
    """Where weights come from each time but the first, if they are kept."""
    runner: ModelRunner | None = None
    """With what it has captured: of kept weights, for as long as they are on the host."""
    read_s: float = 0.0
    """Seconds that its last load took that read the weights."""
    reuse: Reuse = field(default_factory=Reuse)
    """Loads of the model."""
    arriving_s: float | None = None
    """Since when it is copied to the device."""
    load: Load | None = None
    error: str = ""
    """Why its last load failed; empty if it did not."""


class ModelPool:
    """All registered models of a worker. Used on the engine thread, with the memory's lock held but
    for `load_now` and `close`."""

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
        """host: packed weights that are kept there, by digest. build: makes all that a model needs
        but its weights, and adds it to the residency; raises ValueError if it cannot be served
        here."""
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
        """Something is on its way, or a request waits for it."""
        is_arriving = any(model.arriving_s is not None for model in self._models.values())
        return is_arriving or self._fetcher.is_busy or not self._residency.is_settled

    @property
    def is_fetching(self) -> bool:
        """A model that the catalog has comes to this machine, and has not failed to."""
        return self._fetcher.is_first_try

    def add(self, name: str, plan: ModelPlan) -> ModelInstance:
        """Registers a model of the store, without its weights. Raises ValueError."""
        model = self._models[plan.digest] = self._build(name, plan)
        self._heed(model)
        return model.instance

    def load_now(self, digest: str, progress: ByteProgress) -> bool:
        """Brings a model to the device on the calling thread, if no other model has to leave for
        it. Raises CheckpointError and OSError."""
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
        """All that the catalog has. Those not known yet are fetched; one that it has no more stays,
        unless others need its place."""
        self._desired = {model.digest: model for model in models}
        for model in self._models.values():
            self._heed(model)
        for digest, model in self._desired.items():
            if digest not in self._models:
                self._fetcher.fetch(digest, model.name)
        self._fetcher.forget(set(self._desired))

    def refusal(self, digest: str) -> str | None:
        """Why there is no use in waiting for the model now."""
        model = self._models.get(digest)
        if model is None:
            return None
        if model.state.is_unloaded:
            return "the base model is unloaded"
        if model.error and self._clock() < model.state.retry_s:
            return "the base model could not be loaded; it will be tried again"
        return None

    def advance(self) -> list[Event]:
        """Between two steps: takes what has come, decides, and has it done."""
        events: list[Event] = []
        for model in self._models.values():
            events += self._take_loaded(model)
            self._note_arrival(model)
        orders = self._residency.decide({d: self._demand(h) for d, h in self._models.items()})
        for digest in orders.cancel:
            self._give_up(self._models[digest])
        for digest in orders.leave:
            events += self._leave(self._models[digest])
        for digest, model in self._models.items():
            model.instance.engine.is_held = digest in orders.held
            if model.state.is_unloaded:
                message = "the base model was unloaded"
                events += model.instance.engine.fail_waiting(ErrorCode.MODEL_UNAVAILABLE, message)
        for digest in orders.preempt:
            events += self._models[digest].instance.engine.suspend()
        for digest in orders.unsatisfiable:
            events += self._fail_unsatisfiable(self._models[digest])
        for model in self._models.values():
            if model.state.is_gathering:
                events += self._gather(model)
        return events

    def take_fetched(self) -> list[ModelInstance]:
        """Models that have come to this machine, registered now."""
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
        """Registered models, then those on their way to this machine."""
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
        """Waits for the load in progress, which is of no use any more."""
        for model in self._models.values():
            if model.load is not None:
                model.load.cancel()
        self._loader.close()
        self._fetcher.close()

    def _status(self, model: RegisteredModel) -> ModelStatus:
        state = model.state
        return msgspec.structs.replace(
            model.instance.engine.report.status(),
            tier=state.tier,
            num_bytes=model.num_bytes,
            num_swaps=state.num_swaps,
            idle_s=0.0 if state.has_work else self._clock() - state.used_s,
            load_s=state.load_s,
            error=model.error,
        )

    def _heed(self, model: RegisteredModel) -> None:
        """What the catalog says of it."""
        desired = self._desired.get(model.plan.digest)
        model.state.is_named = desired is not None or not self._desired
        model.state.is_pinned = desired is not None and desired.is_pinned
        model.state.is_unloaded = desired is not None and desired.is_unloaded

    def _demand(self, model: RegisteredModel) -> Demand:
        """A probe runs, or waits for its model, as a request does."""
        demand = model.instance.engine.demand
        num_running, num_waiting = self._verifier.num_probes(model.plan.digest)
        return replace(
            demand,
            num_running=demand.num_running + num_running,
            num_waiting=demand.num_waiting + num_waiting,
        )

    def _gather(self, model: RegisteredModel) -> list[Event]:
        """What is idle now becomes the model's; when it has all, the load begins."""
        digest, num_extents = model.plan.digest, model.state.num_extents
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
            log.exception("model %s could not be loaded", model.plan.digest[:12])
            # They hold what was read so far, and each other by way of the load.
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
        """Keeps the packed weights on the host, in place of those that are away from the device and
        cost least to read again, for their bytes and expected reuse. If too few give way, the
        model's own go when it leaves the device."""
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
        """Frees the packed weights, and what else is held: the next load reads them again."""
        self._host.drop(model.plan.digest)
        held = [*held, model.runner]
        model.runner = None
        if model.image is not None:
            model.state.load_s = model.read_s
            held = [*held, model.image.drop()]
        self._loader.discard(model.plan.digest, held)

    def _attach(self, model: RegisteredModel, runner: ModelRunner, load_s: float) -> None:
        """load_s: what the next load is expected to take."""
        if model.image is not None:
            begin_s = self._clock()
            model.image.bring()
            model.arriving_s = begin_s
        model.reuse.note(self._clock())
        model.error = ""
        model.instance.engine.attach(runner)
        model.instance.pool.is_on_device = True
        self._residency.loaded(model.plan.digest, load_s)

    def _note_arrival(self, model: RegisteredModel) -> None:
        """A copy is on its way while its model computes; so long does the next one take, too."""
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
        """What runs goes on when the model is back: pages stay in the prefix cache, adapters on the
        host."""
        digest, instance = model.plan.digest, model.instance
        events = instance.engine.suspend()
        self._verifier.put_back(digest)
        instance.pool.leave_device()
        held: list[object] = [instance.engine.detach()]
        if model.image is not None:
            model.arriving_s = None
            model.image.leave()
        if digest not in self._host or model.state.is_unloaded:
            self._drop_image(model, held)
        self._arena.free_weights(digest)
        return events

    def _give_up(self, model: RegisteredModel) -> None:
        """The load is not wanted any more."""
        if model.load is not None:
            model.load.cancel()
            model.load = None
        self._arena.free_weights(model.plan.digest)

    def _fail(self, model: RegisteredModel, error: str) -> list[Event]:
        model.error = error
        self._give_up(model)
        self._residency.failed(model.plan.digest)
        message = "the base model could not be loaded"
        return model.instance.engine.fail_waiting(ErrorCode.MODEL_UNAVAILABLE, message)

    def _fail_unsatisfiable(self, model: RegisteredModel) -> list[Event]:
        """Fails the first waiting request: there will be no memory for the model."""
        reason = "its memory is held by what is pinned"
        if model.state.tier == "loading":
            return self._fail(model, reason)
        if not model.state.is_here:
            model.error = reason
        return model.instance.engine.fail_first(
            ErrorCode.OVERLOADED, f"the base model lacks memory: {reason}"
        )
