"""Policy that decides which base models are on the device. A model changes its tier as follows:

    host --> gathering --> loading --> device <--> draining --> host

A model with waiting requests is loaded at once if there is room. Otherwise the model that has been
idle for the longest time is unloaded. If no model is idle, a busy model is unloaded. It stays on
the device for at least `MIN_LOADS` times its load time, or less if requests have waited too long
for another model. Before a busy model is unloaded, it is drained: it admits no more sequences, and
its running sequences may finish until a deadline. The sequences that still run at the deadline are
preempted, and resume after the model's next load.

The policy only computes with numbers of extents and times. The caller executes its orders.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Literal

ModelTier = Literal["host", "gathering", "loading", "device", "draining"]
"""Place or state of a model. gathering: the model is to be loaded, but does not own all extents
that it needs yet. draining: the model is on the device, but admits no more sequences."""

MIN_LOADS = 10.0
"""Minimum time that a busy model stays on the device, as a multiple of its load time, so that at
most 1 / (1 + MIN_LOADS) of the time is spent on loading. The time is shorter if requests of another
model have waited too long."""
LEAST_STAY_S = 0.25
"""Minimum seconds that a busy model stays on the device before it is unloaded because requests of
another model have waited too long."""
SETTLE_S = 1.0
"""Seconds that a model may still lack memory after the sequences of all other models have been
preempted. After that it is considered unsatisfiable."""


@dataclass(frozen=True, slots=True)
class Demand:
    """Work of a model's engine, from which the models to load are chosen. num_extents: number of KV
    extents that the engine's first waiting sequence needs. is_short: whether, at the engine's last
    step, a waiting sequence lacked memory that is shared with other models."""

    num_running: int = 0
    num_waiting: int = 0
    num_extents: int = 0
    is_short: bool = False


NO_DEMAND = Demand()


@dataclass(slots=True)
class Orders:
    """Loads to cancel, models to unload, sequences to preempt and requests to fail, as decided by
    `ModelResidency`. The caller executes the attributes in the order in which they are declared,
    except `held`, which `ModelResidency` applies. Each attribute contains digests of models."""

    cancel: list[str] = field(default_factory=list[str])
    """Models whose loads must be cancelled, because the models are no longer needed."""
    leave: list[str] = field(default_factory=list[str])
    """Models to unload. Their running sequences are preempted."""
    held: set[str] = field(default_factory=set[str])
    """Models that must not admit sequences until the next decision."""
    preempt: set[str] = field(default_factory=set[str])
    """Models whose running sequences must be preempted, because another model needs memory now."""
    unsatisfiable: list[str] = field(default_factory=list[str])
    """Models that cannot get memory, because pinned models or adapters hold it."""


@dataclass(slots=True, eq=False)
class ModelState:
    """State of one model. Only `ModelResidency` changes it, except for `load_s` and for the
    settings in the catalog (`is_pinned`, `is_unloaded`, `is_named`). Times are seconds of the
    policy's clock."""

    digest: str
    num_extents: int
    """Number of extents that the model's weights need."""
    load_s: float
    """Seconds that a load of the model takes: an estimate at first, then the last measurement."""
    is_pinned: bool = False
    is_unloaded: bool = False
    """Whether the catalog requires that the model is not on the device."""
    is_named: bool = True
    """Whether the catalog contains the model."""
    tier: ModelTier = "host"
    num_swaps: int = 0
    since_s: float = 0.0
    """Time when the model was last loaded to the device."""
    used_s: float = 0.0
    """Time when the model last had work."""
    unserved_s: float | None = None
    """Time since which the model has waited to be loaded or, if it is loaded, for KV memory for a
    waiting request. None if it waits for neither."""
    draining_s: float = 0.0
    pressing_s: float | None = None
    """Time when all other models stopped admitting sequences, so that this model gets memory. None
    if the other models admit sequences."""
    retry_s: float = 0.0
    """Time before which the model is not loaded again after a failure."""
    demand: Demand = NO_DEMAND
    is_held: bool = False
    """Whether the model is barred from admitting sequences until the next decision."""

    @property
    def is_settled(self) -> bool:
        """Whether the model needs no action until it gets work or the catalog changes."""
        is_loading_or_leaving = self.tier in ("gathering", "loading", "draining")
        must_leave = self.is_here and self.is_unloaded
        return not (is_loading_or_leaving or must_leave or self.has_work or self.is_unserved)

    @property
    def is_here(self) -> bool:
        return self.tier in ("device", "draining")

    @property
    def has_work(self) -> bool:
        return self.demand.num_running > 0 or self.demand.num_waiting > 0

    @property
    def is_wanted(self) -> bool:
        return not self.is_unloaded and (self.is_pinned or self.demand.num_waiting > 0)

    @property
    def is_unserved(self) -> bool:
        if self.tier == "device":
            return self.demand.is_short and self.demand.num_waiting > 0
        return self.is_wanted

    @property
    def is_about_to_begin(self) -> bool:
        """Whether the model is on the device and has waiting sequences but no running ones, so that
        it is not known yet whether KV memory suffices. In this state `unserved_s` is kept, because
        models that need memory are served in the order of `unserved_s`."""
        return self.tier == "device" and self.demand.num_waiting > 0 == self.demand.num_running

    @property
    def num_missing(self) -> int:
        """Number of extents for the first waiting sequence and for weights not yet loaded."""
        weights = 0 if self.is_here else self.num_extents
        return weights + self.demand.num_extents


class ModelResidency:
    """Policy for all models of a worker, which loads one model at a time. capacity: number of
    extents for weights and KV together.

    A request waits for its model at most `max_wait_s`, plus the time of one swap for its own model,
    plus the time of one swap for each model that has waited longer. The time of a swap is the sum
    of the minimum stay of the model that is unloaded, `max_drain_s`, and the load time of the model
    that is loaded.
    """

    def __init__(
        self,
        capacity: int,
        *,
        clock: Callable[[], float],
        max_wait_s: float = 30.0,
        max_drain_s: float = 10.0,
        retry_after_s: float = 5.0,
    ) -> None:
        self.capacity = capacity
        self._clock = clock
        self._max_wait_s = max_wait_s
        self._max_drain_s = max_drain_s
        self._retry_after_s = retry_after_s
        self.models: dict[str, ModelState] = {}

    @property
    def num_free(self) -> int:
        """Number of extents neither used nor planned for weights. KV pages may be in them."""
        return self.capacity - sum(m.num_extents for m in self.models.values() if m.tier != "host")

    @property
    def num_wanted(self) -> int:
        """Number of extents for the weights of all models in the catalog, or of all known models
        until the catalog is received."""
        return sum(m.num_extents for m in self.models.values() if m.is_named)

    def add(self, model: ModelState) -> None:
        """Adds a model whose weights are not on the device."""
        model.used_s = self._clock()
        self.models[model.digest] = model

    def remove(self, digest: str) -> None:
        del self.models[digest]

    def begun(self, digest: str) -> None:
        """Records that all extents of the model are allocated."""
        self.models[digest].tier = "loading"

    def loaded(self, digest: str, load_s: float) -> None:
        model, now = self.models[digest], self._clock()
        model.tier, model.load_s = "device", load_s
        model.since_s = model.used_s = now
        model.pressing_s = None
        model.num_swaps += 1

    def failed(self, digest: str) -> None:
        """Records a failed load. After `retry_after_s`, the model is loaded again if needed."""
        model = self.models[digest]
        model.tier = "host"
        model.unserved_s = model.pressing_s = None
        model.retry_s = self._clock() + self._retry_after_s

    def decide(self, demands: Mapping[str, Demand]) -> Orders:
        """Returns the actions to take now. Models in `Orders.leave` count as unloaded at once.
        demands: demand of each model that is not settled, by digest."""
        now, orders = self._clock(), Orders()
        models = [self.models[digest] for digest in demands]
        for model in models:
            self._observe(model, demands[model.digest], now)
        for model in models:
            if model.is_unloaded and model.is_here:
                self._drain(model, now, orders)
        loading = next((m for m in models if m.tier in ("gathering", "loading")), None)
        if loading is None:
            self._serve_claims(models, now, orders)
        elif not loading.is_wanted:
            loading.tier = "host"
            orders.cancel.append(loading.digest)
        elif loading.tier == "gathering":
            self._press(loading, now, orders)
        orders.held |= {m.digest for m in models if m.tier == "draining"}
        for model in models:
            model.is_held = model.digest in orders.held
        return orders

    def _observe(self, model: ModelState, demand: Demand, now: float) -> None:
        model.demand = demand
        if model.has_work:
            model.used_s = now
        if model.is_unserved:
            model.unserved_s = now if model.unserved_s is None else model.unserved_s
        else:
            model.pressing_s = None
            if not model.is_about_to_begin:
                model.unserved_s = None

    def _serve_claims(self, models: list[ModelState], now: float, orders: Orders) -> None:
        """Makes room for waiting models, the longest waiting first. Stops after the first model
        that can now be loaded, or for which other models drain, or that has waited `max_wait_s`.
        Otherwise models that have waited for less time might get the memory first."""
        claims = [(m.unserved_s, m) for m in models if m.unserved_s is not None]
        claims = sorted(claims, key=lambda claim: claim[0])
        draining: list[ModelState] = []
        for since, claim in claims:
            if claim.tier == "draining" or now < claim.retry_s:
                continue
            if claim.is_unserved:
                draining = self._make_room(claim, since, now, orders)
            if claim.is_unserved and claim.num_missing <= self.num_free:
                if claim.tier == "host":
                    claim.tier = "gathering"
                    break
                self._press(claim, now, orders)
            if draining or now - since >= self._max_wait_s:
                break
        for model in models:
            if model.tier == "draining" and model not in draining and not model.is_unloaded:
                model.tier = "device"

    def _make_room(
        self, claim: ModelState, since: float, now: float, orders: Orders
    ) -> list[ModelState]:
        """Drains or unloads other models if that makes enough room for the model `claim`. Returns
        the models that are still draining."""
        missing = claim.num_missing - self.num_free
        if missing <= 0:
            return []
        others = [m for m in self.models.values() if m is not claim and m.is_here]
        if missing > sum(m.num_extents for m in others if not m.is_pinned):
            claim.retry_s = now + (0.0 if claim.has_work else self._retry_after_s)
            orders.unsatisfiable.append(claim.digest)
            return []
        is_overdue = now - since >= self._max_wait_s
        able = [m for m in others if self._may_leave(m, now, is_overdue=is_overdue)]
        victims = _first_enough(sorted(able, key=_order_of_leaving), missing)
        for victim in victims:
            self._drain(victim, now, orders)
        return [victim for victim in victims if victim.is_here]

    def _may_leave(self, model: ModelState, now: float, *, is_overdue: bool) -> bool:
        if model.is_pinned:
            return False
        if model.tier == "draining":
            return True
        stay_s, idle_s = now - model.since_s, now - model.used_s
        if stay_s >= MIN_LOADS * model.load_s or (not model.has_work and idle_s >= model.load_s):
            return True
        return is_overdue and stay_s >= max(model.load_s, LEAST_STAY_S)

    def _drain(self, model: ModelState, now: float, orders: Orders) -> None:
        """Drains the model. Unloads it once no sequence of it is running, or at the deadline."""
        if model.tier == "device":
            model.tier, model.draining_s = "draining", now
        if not model.demand.num_running or now - model.draining_s >= self._max_drain_s:
            model.tier = "host"
            orders.leave.append(model.digest)

    def _press(self, claim: ModelState, now: float, orders: Orders) -> None:
        """Frees KV memory that other models' sequences occupy. Once the model `claim` has waited
        for `patience_s`, the other models admit no more sequences. After another `max_drain_s`, the
        running sequences of the other models are preempted."""
        patience_s = self._max_wait_s
        if claim.tier == "gathering":
            patience_s = min(patience_s, MIN_LOADS * claim.load_s)
        if claim.unserved_s is None or now - claim.unserved_s < patience_s:
            return
        if claim.pressing_s is None:
            claim.pressing_s = now
        others = {m.digest: m for m in self.models.values() if m is not claim and m.is_here}
        orders.held |= others.keys()
        pressed_s = now - claim.pressing_s
        if pressed_s >= self._max_drain_s:
            orders.preempt |= others.keys()
        if pressed_s >= self._max_drain_s + SETTLE_S:
            orders.unsatisfiable.append(claim.digest)


def _order_of_leaving(model: ModelState) -> tuple[bool, bool, float]:
    """Returns the sort key for unloading: first draining models, then idle models by the time of
    their last use, then busy models by the time of their load. Earlier times are first."""
    last_s = model.since_s if model.has_work else model.used_s
    return model.tier != "draining", model.has_work, last_s


def _first_enough(models: list[ModelState], num_extents: int) -> list[ModelState]:
    """Returns the first models that have at least `num_extents` extents in total, without models
    that are not needed to reach this total. Returns [] if all models together have too few."""
    chosen: list[ModelState] = []
    num_chosen = 0
    for model in models:
        if num_chosen < num_extents:
            chosen.append(model)
            num_chosen += model.num_extents
    if num_chosen < num_extents:
        return []
    for model in list(chosen):
        if num_chosen - model.num_extents >= num_extents:
            chosen.remove(model)
            num_chosen -= model.num_extents
    return chosen
