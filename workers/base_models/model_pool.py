"""Does what the residency policy orders: gathers extents, has weights loaded, has models leave."""

from __future__ import annotations

import logging
import traceback
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import msgspec

from memory.arena import Arena
from memory.broker import MemoryBroker
from workers.base_models.fetcher import ModelFetcher
from workers.base_models.loader import Load, Loaded, ModelLoader
from workers.base_models.residency import ModelState, Residency
from workers.device.weight_image import WeightImage
from workers.execution.engine import Event
from workers.execution.model_runner import ModelRunner
from workers.models.decoder import Decoder
from workers.models.plan import ModelPlan
from workers.models.progress import Progress
from workers.scheduling.demand import Demand
from workers.verification.adapter_verifier import Prober, Target
from workers.wire.protocol import UNSATISFIABLE, DesiredModel, ErrorCode, ModelStatus

log = logging.getLogger(__name__)

LOAD_BYTES_PER_S = 1e9
"""Until a model's own load is measured."""


@dataclass(slots=True, eq=False)
class Hosted:
    """One registered model."""

    plan: ModelPlan
    target: Target
    state: ModelState
    make_runner: Callable[[Decoder], ModelRunner]
    num_bytes: int
    """Of its weights: as planned, then as loaded."""
    image: WeightImage | None = None
    """Where weights come from each time but the first, if they are kept."""
    runner: ModelRunner | None = None
    """With what it has captured: of kept weights, from the first load until it is unloaded."""
    arriving_s: float | None = None
    """Since when it is copied to the device."""
    load: Load | None = None
    error: str = ""
    """Of its last load."""


class Swapper:
    """All registered models of a worker. Used on the engine thread, with the memory's lock held but
    for `load_now` and `close`."""

    def __init__(
        self,
        residency: Residency,
        arena: Arena,
        broker: MemoryBroker,
        loader: ModelLoader,
        fetcher: ModelFetcher,
        prober: Prober,
        *,
        build: Callable[[str, ModelPlan], Hosted],
        clock: Callable[[], float],
    ) -> None:
        """build: makes all that a model needs but its weights, and adds it to the residency; raises
        ValueError if it cannot be served here."""
        self._residency = residency
        self._arena = arena
        self._broker = broker
        self._loader = loader
        self._fetcher = fetcher
        self._prober = prober
        self._build = build
        self._clock = clock
        self._hosted: dict[str, Hosted] = {}
        self._desired: dict[str, DesiredModel] = {}

    @property
    def is_busy(self) -> bool:
        """Something is on its way, or somebody waits for it."""
        is_arriving = any(hosted.arriving_s is not None for hosted in self._hosted.values())
        return is_arriving or self._fetcher.is_busy or not self._residency.is_settled

    def add(self, name: str, plan: ModelPlan) -> Target:
        """Registers a model of the store, without its weights. Raises ValueError."""
        hosted = self._hosted[plan.digest] = self._build(name, plan)
        self._heed(hosted)
        return hosted.target

    def load_now(self, digest: str, progress: Progress) -> bool:
        """Brings a model to the device on the calling thread, if nobody has to leave for it. Raises
        CheckpointError and OSError."""
        hosted = self._hosted[digest]
        state = hosted.state
        if state.num_extents > self._residency.num_free:
            return False
        self._broker.allocate_weights(digest, state.num_extents)
        self._take(hosted, self._loader.load_here(hosted.plan, hosted.image, progress))
        if hosted.image is not None:
            hosted.image.arrival.synchronize()
            self._note_arrival(hosted)
        return True

    def want(self, models: Iterable[DesiredModel]) -> None:
        """All that the catalog has. Those not known yet are fetched; one that it has no more stays,
        unless others need its place."""
        self._desired = {model.digest: model for model in models}
        for hosted in self._hosted.values():
            self._heed(hosted)
        for digest, model in self._desired.items():
            if digest not in self._hosted:
                self._fetcher.fetch(digest, model.name)
        self._fetcher.forget(set(self._desired))

    def refusal(self, digest: str) -> str | None:
        """Why there is no use in waiting for the model now."""
        hosted = self._hosted.get(digest)
        if hosted is None:
            return None
        if hosted.state.is_unloaded:
            return "the base model is unloaded"
        if hosted.error and self._clock() < hosted.state.retry_s:
            return "the base model could not be loaded; it will be tried again"
        return None

    def advance(self) -> list[Event]:
        """Between two steps: takes what has come, decides, and has it done."""
        events: list[Event] = []
        for hosted in self._hosted.values():
            events += self._take_loaded(hosted)
            self._note_arrival(hosted)
        orders = self._residency.decide({d: self._demand(h) for d, h in self._hosted.items()})
        for digest in orders.cancel:
            self._give_up(self._hosted[digest])
        for digest in orders.leave:
            events += self._leave(self._hosted[digest])
        for digest, hosted in self._hosted.items():
            hosted.target.engine.is_held = digest in orders.held
            if hosted.state.is_unloaded:
                message = "the base model was unloaded"
                events += hosted.target.engine.fail_waiting(ErrorCode.MODEL_UNAVAILABLE, message)
        for digest in orders.preempt:
            events += self._hosted[digest].target.engine.suspend()
        for digest in orders.hopeless:
            events += self._disappoint(self._hosted[digest])
        for hosted in self._hosted.values():
            if hosted.state.is_gathering:
                events += self._gather(hosted)
        return events

    def take_fetched(self) -> list[Target]:
        """Models that have come to this machine, registered now."""
        targets: list[Target] = []
        for name, plan in self._fetcher.take():
            try:
                targets.append(self.add(name, plan))
                self._fetcher.registered(plan.digest)
                log.info("model %s (%s) is registered", name, plan.digest[:12])
            except ValueError as error:
                self._fetcher.fail(plan.digest, name, error, is_unsatisfiable=True)
        return targets

    def status(self) -> list[ModelStatus]:
        """Registered models, then those on their way to this machine."""
        here = [self._status(hosted) for hosted in self._hosted.values()]
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
        for hosted in self._hosted.values():
            if hosted.load is not None:
                hosted.load.cancel()
        self._loader.close()
        self._fetcher.close()

    def _status(self, hosted: Hosted) -> ModelStatus:
        state = hosted.state
        return msgspec.structs.replace(
            hosted.target.engine.report.status(),
            tier=state.tier,
            num_bytes=hosted.num_bytes,
            num_swaps=state.num_swaps,
            idle_s=0.0 if state.has_work else self._clock() - state.used_s,
            load_s=state.load_s,
            error=hosted.error,
        )

    def _heed(self, hosted: Hosted) -> None:
        """What the catalog says of it."""
        desired = self._desired.get(hosted.plan.digest)
        hosted.state.is_named = desired is not None or not self._desired
        hosted.state.is_pinned = desired is not None and desired.is_pinned
        hosted.state.is_unloaded = desired is not None and desired.is_unloaded

    def _demand(self, hosted: Hosted) -> Demand:
        """A probe runs, or waits for its model, as a request does."""
        demand = hosted.target.engine.demand
        num_running, num_waiting = self._prober.num_probes(hosted.plan.digest)
        if not num_running and not num_waiting:
            return demand
        return Demand(
            demand.num_running + num_running,
            demand.num_waiting + num_waiting,
            demand.num_extents,
            demand.is_short,
        )

    def _gather(self, hosted: Hosted) -> list[Event]:
        """What is idle now becomes the model's; when it has all, the load begins."""
        digest, num_extents = hosted.plan.digest, hosted.state.num_extents
        missing = num_extents - self._arena.num_weight_extents(digest)
        if self._broker.allocate_weights(digest, missing) < missing:
            return []
        self._residency.begun(digest)
        runner = hosted.runner
        if runner is not None:
            return self._try(hosted, lambda: self._attach(hosted, runner, hosted.state.load_s))
        hosted.load = self._loader.load(hosted.plan, hosted.image)
        return []

    def _take_loaded(self, hosted: Hosted) -> list[Event]:
        load = hosted.load
        if load is None or not load.is_done:
            return []
        hosted.load = None
        return self._try(hosted, lambda: self._take(hosted, load.result()))

    def _try(self, hosted: Hosted, work: Callable[[], None]) -> list[Event]:
        try:
            work()
        except Exception as error:
            log.exception("model %s could not be loaded", hosted.plan.digest[:12])
            # They hold what was read so far, and each other by way of the load.
            traceback.clear_frames(error.__traceback__)
            return self._fail(hosted, f"{type(error).__name__}: {error}")
        return []

    def _take(self, hosted: Hosted, loaded: Loaded) -> None:
        hosted.num_bytes = loaded.model.num_bytes
        runner = hosted.make_runner(loaded.model)
        if hosted.image is None:
            self._attach(hosted, runner, loaded.seconds)
        else:
            self._attach(hosted, runner, hosted.state.load_s)
            hosted.runner = runner

    def _attach(self, hosted: Hosted, runner: ModelRunner, load_s: float) -> None:
        """load_s: what the next load is expected to take."""
        if hosted.image is not None:
            begin_s = self._clock()
            hosted.image.bring()
            hosted.arriving_s = begin_s
        hosted.error = ""
        hosted.target.engine.attach(runner)
        hosted.target.pool.is_on_device = True
        self._residency.loaded(hosted.plan.digest, load_s)

    def _note_arrival(self, hosted: Hosted) -> None:
        """A copy is on its way while its model computes; so long does the next one take, too."""
        image, since_s = hosted.image, hosted.arriving_s
        if image is not None and since_s is not None and image.arrival.is_complete:
            hosted.arriving_s = None
            hosted.state.load_s = self._clock() - since_s
            log.info(
                "model %s: copied to the device in %.3f s",
                hosted.plan.digest[:12],
                hosted.state.load_s,
            )

    def _leave(self, hosted: Hosted) -> list[Event]:
        """What runs goes on when the model is back: pages stay in the prefix cache, adapters on the
        host."""
        digest, target = hosted.plan.digest, hosted.target
        events = target.engine.suspend()
        self._prober.put_back(digest)
        target.pool.leave_device()
        held: list[object] = [target.engine.detach()]
        if hosted.image is not None:
            hosted.arriving_s = None
            hosted.image.leave()
        if hosted.image is None or hosted.state.is_unloaded:
            hosted.runner = None
            held += [] if hosted.image is None else [hosted.image.drop()]
            self._loader.discard(digest, held)
        self._arena.free_weights(digest)
        return events

    def _give_up(self, hosted: Hosted) -> None:
        """The load is not wanted any more."""
        if hosted.load is not None:
            hosted.load.cancel()
            hosted.load = None
        self._arena.free_weights(hosted.plan.digest)

    def _fail(self, hosted: Hosted, error: str) -> list[Event]:
        hosted.error = error
        self._give_up(hosted)
        self._residency.failed(hosted.plan.digest)
        message = "the base model could not be loaded"
        return hosted.target.engine.fail_waiting(ErrorCode.MODEL_UNAVAILABLE, message)

    def _disappoint(self, hosted: Hosted) -> list[Event]:
        """There will be no memory for it."""
        reason = "its memory is held by what is pinned"
        if hosted.state.tier == "loading":
            return self._fail(hosted, reason)
        if not hosted.state.is_here:
            hosted.error = reason
        return hosted.target.engine.fail_first(
            ErrorCode.OVERLOADED, f"the base model lacks memory: {reason}"
        )
