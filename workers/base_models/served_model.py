"""One base model that a worker serves."""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field

import msgspec

from memory.page_key import pages_of
from memory.reuse import Reuse
from workers.base_models.loader import Loaded, WeightLoad
from workers.base_models.residency import Demand, ModelState
from workers.device.weight_image import WeightImage
from workers.execution.model_runner import Graphs, ModelRunner
from workers.execution.step_input import Runner
from workers.models.loading import LoadedModel
from workers.models.plan import ModelPlan
from workers.observe.status import model_status
from workers.verification.adapter_verifier import ModelInstance
from workers.wire.status import ModelStatus

log = logging.getLogger(__name__)


@dataclass(slots=True, eq=False, kw_only=True)
class ServedModel(ModelInstance):
    """Base model that a worker serves. `state` says where the model's weights should be, and
    `ServedModels` moves the weights there."""

    plan: ModelPlan
    state: ModelState
    make_runner: Callable[[LoadedModel], ModelRunner]
    num_bytes: int
    """Bytes of the model's weights: an upper bound until the first load, then the actual size."""
    image: WeightImage | None = None
    """Packed weights on the host, which later loads copy to the device. None if each load reads
    files."""
    kept_runner: ModelRunner | None = None
    """Runner with its captured graphs, kept as long as the packed weights stay in host memory."""
    graphs: Graphs | None = None
    """Graphs of the attached runner, if it has any."""
    read_s: float = 0.0
    """Seconds that the model's last load from disk took."""
    reuse: Reuse = field(default_factory=Reuse)
    """Count of recent loads, from which the expected reuse of the model is estimated."""
    load: WeightLoad | None = None
    """Running load of the model's weights from disk, or None."""
    copy_begun_s: float | None = None
    """Start time of the copy to the device that is in progress, or None."""
    error: str = ""
    """Error of the model's last load; empty if the load succeeded."""
    closing: ExitStack = field(default_factory=ExitStack)
    """Callbacks that free everything built for the model. They wait for the model's threads."""

    @property
    def digest(self) -> str:
        return self.engine.info.digest

    @property
    def is_idle(self) -> bool:
        """Whether the model needs no action until it gets work or the catalog changes."""
        is_settled = self.state.is_settled and self.copy_begun_s is None
        return is_settled and not self.engine.has_work and not self.can_capture

    @property
    def can_capture(self) -> bool:
        """Whether a graph is to be captured, and the weights are on the device and stay there."""
        stays = self.state.tier == "device" and self.state.is_named and self.copy_begun_s is None
        return stays and bool(self.graphs and self.graphs.can_capture)

    @property
    def demand(self) -> Demand:
        """Running and waiting work of the engine. `num_extents` is what the first waiting sequence
        needs for the pages of all its tokens and the part of its adapter that is not loaded."""
        scheduler = self.engine.scheduler
        pages, first, num_pages = scheduler.kv.pool, scheduler.first_waiting, 0
        if first is not None:
            adapter = first.adapter
            missing = None if adapter is None else self.pool.missing_bytes(adapter)
            num_pages = pages_of(len(first.tokens)) - (-(missing or 0) // pages.page_bytes)
        return Demand(
            len(scheduler.running),
            len(scheduler.waiting),
            num_extents=-(-num_pages // pages.pages_per_extent),
            is_short=scheduler.short is not None,
        )

    def refusal(self, now: float) -> str | None:
        """Returns why requests should not wait for the model now. Returns None if they may wait."""
        if self.state.is_unloaded:
            return "the base model is unloaded"
        if self.error and now < self.state.retry_s:
            return "the base model could not be loaded; it will be tried again"
        return None

    def status(self, now: float) -> ModelStatus:
        """Returns the model's status. Called with the memory lock held."""
        state = self.state
        return msgspec.structs.replace(
            model_status(self.engine, self.pool, self.report),
            tier="loading" if state.tier == "gathering" else state.tier,
            num_bytes=self.num_bytes,
            num_swaps=state.num_swaps,
            idle_s=0.0 if state.has_work else now - state.used_s,
            load_s=state.load_s,
            error=self.error,
            num_proof_steps=self.effect_proof.num_steps,
        )

    def end_load(self) -> Loaded:
        """Returns what the finished load has loaded, and forgets the load. Raises the error that
        ended the load."""
        assert self.load is not None
        load, self.load = self.load, None
        return load.result()

    def end_copy(self, now: float) -> None:
        """If the copy of the weights has finished, records its duration as the estimate for the
        next copy. The model's first steps run during the copy."""
        image, begun_s = self.image, self.copy_begun_s
        if image is not None and begun_s is not None and image.arrival.is_complete:
            self.copy_begun_s = None
            self.state.load_s = now - begun_s
            log.info("model %s: copied to the device in %.3f s", self.digest[:12], now - begun_s)

    def attach(self, runner: ModelRunner) -> None:
        """Sets the runner that computes the engine's steps, and allows adapters to be loaded to the
        device. Called with the memory lock held."""
        self.engine.set_runner(runner)
        self.graphs = runner.graphs
        self.pool.device.is_here = True

    def detach(self) -> Runner | None:
        """Undoes `attach`, evicts all adapters from the device, and returns the runner. Called with
        the memory lock held, when no sequence runs."""
        self.pool.leave_device()
        runner = self.engine.runner
        self.engine.set_runner(None)
        self.graphs = None
        return runner

    def close(self) -> None:
        """Frees the model's memory, token buffer and threads. Called without the memory lock, when
        the model has no work and its weights are not on the device."""
        self.closing.close()
