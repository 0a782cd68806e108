"""Which base models are on the device and which comes next: a policy over extents and a clock.

    host --> loading --> device <--> draining --> host

A model that requests wait for comes at once if there is room. If there is none, the model that was
idle the longest leaves; else a busy one, but only when it has been there for so many times its load
as bounds the time lost to loading, or when the wait has become too long. A busy one drains: it
admits no sequence, and what runs there may end; at a deadline it is preempted and goes on when the
model is back.

No tensors, no threads, no memory but these numbers; the caller does what is ordered.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Literal

from workers.scheduling.demand import Demand

Tier = Literal["host", "loading", "device", "draining"]

MIN_LOADS = 10.0
"""A busy model stays for so many times its load: of all time at most 1 part in 1 + MIN_LOADS is
lost to loading."""
LEAST_STAY_S = 0.25
"""How long a model stays at least, even while others have waited too long."""
SETTLE_S = 1.0
"""When everything else is preempted, and there still is no room after so long, there will be
none."""


NO_DEMAND = Demand()


@dataclass(slots=True)
class Orders:
    """What is to be done, in this order, by digest."""

    cancel: list[str] = field(default_factory=list[str])
    """No request waits for this load any more."""
    leave: list[str] = field(default_factory=list[str])
    """What still runs there is preempted."""
    held: set[str] = field(default_factory=set[str])
    """May admit no sequence, as long as this is said."""
    preempt: set[str] = field(default_factory=set[str])
    """Their memory is needed now."""
    unsatisfiable: list[str] = field(default_factory=list[str])
    """What they need can never be had beside what is pinned."""


@dataclass(slots=True, eq=False)
class ModelState:
    """One model as the policy knows it. Times are of its clock, in seconds."""

    digest: str
    num_extents: int
    """Extents that its weights take."""
    load_s: float
    """How long its load takes: an estimate, then the last one measured."""
    is_pinned: bool = False
    """To be on the device, whatever waits."""
    is_unloaded: bool = False
    """Not to be there."""
    is_named: bool = True
    """The catalog has it."""
    tier: Tier = "host"
    num_swaps: int = 0
    is_gathering: bool = False
    """Loading, but not all of its extents are free yet."""
    since_s: float = 0.0
    """When it came to the device."""
    used_s: float = 0.0
    """When it last had work."""
    unserved_s: float | None = None
    """Since when a request waits for the model, or in it for memory."""
    draining_s: float = 0.0
    pressing_s: float | None = None
    """Since when all others are held for it."""
    retry_s: float = 0.0
    """Not before then is it loaded: the last time failed."""
    demand: Demand = NO_DEMAND

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
        """It has come, and whether there is memory too for what waits is not known yet: what comes
        without it keeps the place that it has by its wait."""
        return self.tier == "device" and self.demand.num_waiting > 0 == self.demand.num_running

    @property
    def num_missing(self) -> int:
        """Extents that it needs besides those it has."""
        weights = 0 if self.is_here else self.num_extents
        return weights + self.demand.num_extents


class ModelResidency:
    """capacity: extents that weights and KV may have in all. One load at a time.

    A request waits for its model at most max_wait_s, and then, for its own and each model that has
    waited longer, the least stay of the model before it, max_drain_s and the load.
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
        """Extents that no weights have, or are about to have."""
        return self.capacity - sum(m.num_extents for m in self.models.values() if m.tier != "host")

    @property
    def num_wanted(self) -> int:
        """Extents of the weights that the catalog names. Before it was heard of, all are."""
        return sum(m.num_extents for m in self.models.values() if m.is_named)

    @property
    def is_settled(self) -> bool:
        """Nothing is loading, drains or waits to be served."""
        models, now = self.models.values(), self._clock()
        is_waiting = any(m.is_unserved and now >= m.retry_s for m in models)
        return not is_waiting and not any(m.tier in ("loading", "draining") for m in models)

    def add(self, digest: str, num_extents: int, load_s: float) -> ModelState:
        """A model on the host. load_s: an estimate."""
        model = self.models[digest] = ModelState(digest, num_extents, load_s, used_s=self._clock())
        return model

    def begun(self, digest: str) -> None:
        """All its extents are gathered."""
        self.models[digest].is_gathering = False

    def loaded(self, digest: str, load_s: float) -> None:
        model, now = self.models[digest], self._clock()
        model.tier, model.is_gathering, model.load_s = "device", False, load_s
        model.since_s = model.used_s = now
        model.pressing_s = None
        model.num_swaps += 1

    def failed(self, digest: str) -> None:
        """Its load did; it is tried again after a while, if a request still waits."""
        model = self.models[digest]
        model.tier, model.is_gathering = "host", False
        model.unserved_s = model.pressing_s = None
        model.retry_s = self._clock() + self._retry_after_s

    def decide(self, demands: Mapping[str, Demand]) -> Orders:
        """What is to be done now. A model that is ordered to leave has left."""
        now, orders = self._clock(), Orders()
        for model in self.models.values():
            self._observe(model, demands.get(model.digest, NO_DEMAND), now)
        for model in self.models.values():
            if model.is_unloaded and model.is_here:
                self._drain(model, now, orders)
        loading = next((m for m in self.models.values() if m.tier == "loading"), None)
        if loading is None:
            self._serve_claims(now, orders)
        elif not loading.is_wanted:
            loading.tier, loading.is_gathering = "host", False
            orders.cancel.append(loading.digest)
        elif loading.is_gathering:
            self._press(loading, now, orders)
        orders.held |= {m.digest for m in self.models.values() if m.tier == "draining"}
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

    def _serve_claims(self, now: float, orders: Orders) -> None:
        """The longest unserved first. While one has models drained for it, or has waited too long,
        no younger model may take the room."""
        claims = [(m.unserved_s, m) for m in self.models.values() if m.unserved_s is not None]
        claims = sorted(claims, key=lambda claim: claim[0])
        draining: list[ModelState] = []
        for since, claim in claims:
            if claim.tier == "draining" or now < claim.retry_s:
                continue
            if claim.is_unserved:
                draining = self._make_room(claim, since, now, orders)
            if claim.is_unserved and claim.num_missing <= self.num_free:
                if claim.tier == "host":
                    claim.tier, claim.is_gathering = "loading", True
                    break
                self._press(claim, now, orders)
            if draining or now - since >= self._max_wait_s:
                break
        for model in self.models.values():
            if model.tier == "draining" and model not in draining and not model.is_unloaded:
                model.tier = "device"

    def _make_room(
        self, claim: ModelState, since: float, now: float, orders: Orders
    ) -> list[ModelState]:
        """Has others leave, if that makes room; returns those that must drain first."""
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
        """Begins or goes on to; it leaves when nothing runs any more, or at the deadline."""
        if model.tier == "device":
            model.tier, model.draining_s = "draining", now
        if not model.demand.num_running or now - model.draining_s >= self._max_drain_s:
            model.tier = "host"
            orders.leave.append(model.digest)

    def _press(self, claim: ModelState, now: float, orders: Orders) -> None:
        """The weights of others leave room, but what runs there has it. After a while no other
        sequence is admitted, after another what runs is preempted."""
        patience_s = self._max_wait_s
        if claim.tier == "loading":
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
    """Those that drain already, then idle ones by their last use, then those longest here."""
    last_s = model.since_s if model.has_work else model.used_s
    return model.tier != "draining", model.has_work, last_s


def _first_enough(models: list[ModelState], num_extents: int) -> list[ModelState]:
    """The first that have so many extents together, without those that are not needed for it; none
    if all are too few."""
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
