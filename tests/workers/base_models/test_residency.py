"""Which model comes and which leaves, on a simulated clock: nobody waits longer than the bound, the
time lost to loading is bounded, memory is never exceeded, and pins hold."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.scale import scaled
from tests.workers.simulator import FakeClock
from workers.base_models.residency import (
    LEAST_STAY_S,
    MIN_LOADS,
    NO_DEMAND,
    SETTLE_S,
    Demand,
    ModelResidency,
    ModelState,
    Orders,
)

TICK_S = 0.05


@dataclass
class Request:
    arrival_s: float
    service_s: float
    """What is left of it when it runs alone or with others: a device has room for all."""
    start_s: float | None = None


@dataclass
class Model:
    num_extents: int
    load_s: float
    waiting: list[Request] = field(default_factory=list[Request])
    running: list[Request] = field(default_factory=list[Request])
    due_s: float | None = None
    """When its load ends."""
    num_kv: int = 0
    """Extents that its requests need, together."""


class Worker:
    """Does what the policy orders, with loads that take their time; checks it at each tick."""

    def __init__(self, models: dict[str, Model], capacity: int, **limits: float) -> None:
        self.clock = FakeClock()
        self.models = models
        self.residency = ModelResidency(capacity, clock=self.clock, **limits)
        for name, model in models.items():
            self.residency.add(ModelState(name, model.num_extents, model.load_s))
        self.max_wait_s = limits.get("max_wait_s", 30.0)
        self.orders = Orders()
        self.loading_s = 0.0
        """In which nothing else was on the device."""
        self.waits_s: list[float] = []
        self.left: list[tuple[float, str]] = []

    def ask(self, name: str, service_s: float) -> None:
        self.models[name].waiting.append(Request(self.clock.now, service_s))

    def on_device(self) -> set[str]:
        return {name for name, state in self.residency.models.items() if state.is_here}

    def demand(self, name: str) -> Demand:
        model = self.models[name]
        num_kv = model.num_kv if model.waiting else 0
        is_short = name in self.on_device() and bool(model.waiting) and self.num_idle < num_kv
        return Demand(len(model.running), len(model.waiting), num_kv, is_short)

    @property
    def num_idle(self) -> int:
        """Extents that neither weights nor what runs has."""
        used = sum(m.num_kv for m in self.models.values() if m.running)
        weights = sum(self.models[name].num_extents for name in self.on_device())
        loading = sum(m.num_extents for m in self.models.values() if m.due_s is not None)
        return self.residency.capacity - used - weights - loading

    def tick(self) -> None:
        before = {n: (s.since_s, s.load_s) for n, s in self.residency.models.items()}
        oldest = min(
            (s.unserved_s for s in self.residency.models.values() if s.unserved_s is not None),
            default=self.clock.now,
        )
        demands = {name: self.demand(name) for name in self.models}
        settled = {name for name, state in self.residency.models.items() if state.is_settled}
        told = {n: d for n, d in demands.items() if n not in settled or d != NO_DEMAND}
        self.orders = orders = self.residency.decide(told)
        for name in orders.cancel:
            self.models[name].due_s = None
        for name in orders.leave:
            since_s, load_s = before[name]
            has_work = demands[name].num_running > 0 or demands[name].num_waiting > 0
            state, stay_s = self.residency.models[name], self.clock.now - since_s
            assert not state.is_pinned
            is_overdue = self.clock.now - oldest >= self.max_wait_s
            least_s = max(load_s, LEAST_STAY_S) if is_overdue else MIN_LOADS * load_s
            assert stay_s >= least_s or not has_work or state.is_unloaded
            self.preempt(name)
            self.left.append((self.clock.now, name))
        for name in orders.preempt:
            self.preempt(name)
        self.gather()
        if any(model.due_s is not None for model in self.models.values()) and not self.on_device():
            self.loading_s += TICK_S
        self.clock.now += TICK_S
        self.finish_load()
        self.run()
        weights = sum(s.num_extents for s in self.residency.models.values() if s.tier != "host")
        assert weights <= self.residency.capacity and self.num_idle >= 0

    def gather(self) -> None:
        for name, state in self.residency.models.items():
            if state.tier == "gathering" and state.num_extents <= self.num_idle:
                self.residency.begun(name)
                self.models[name].due_s = self.clock.now + self.models[name].load_s

    def finish_load(self) -> None:
        for name, model in self.models.items():
            if model.due_s is not None and model.due_s <= self.clock.now:
                model.due_s = None
                self.residency.loaded(name, model.load_s)

    def preempt(self, name: str) -> None:
        model = self.models[name]
        model.waiting[:0] = model.running
        model.running.clear()

    def run(self) -> None:
        now = self.clock.now
        for name in self.on_device() - self.orders.held:
            model = self.models[name]
            if model.waiting and (model.running or self.num_idle >= model.num_kv):
                for request in model.waiting:
                    if request.start_s is None:
                        request.start_s = now
                        self.waits_s.append(now - request.arrival_s)
                model.running += model.waiting
                model.waiting = []
        for name in self.on_device():
            for request in self.models[name].running:
                request.service_s -= TICK_S
            self.models[name].running = [r for r in self.models[name].running if r.service_s > 0]

    def run_until(self, seconds: float) -> None:
        while self.clock.now < seconds:
            self.tick()

    @property
    def has_work(self) -> bool:
        return any(model.waiting or model.running for model in self.models.values())


NAMES = "abcd"


@settings(max_examples=scaled(60, 2000), deadline=None)
@given(st.data())
def test_every_request_is_served_within_the_bound(data: st.DataObject) -> None:
    names = NAMES[: data.draw(st.integers(2, 4), "models")]
    models = {
        name: Model(
            data.draw(st.integers(1, 4), "extents"),
            data.draw(st.sampled_from([0.05, 0.3, 1.0]), "load_s"),
            num_kv=data.draw(st.integers(0, 2), "kv"),
        )
        for name in names
    }
    capacity = max(m.num_extents + m.num_kv for m in models.values())
    capacity += data.draw(st.integers(0, 4), "spare")
    max_wait_s = data.draw(st.sampled_from([0.5, 2.0, 10.0]), "max_wait_s")
    max_drain_s = data.draw(st.sampled_from([0.1, 1.0, 3.0]), "max_drain_s")
    worker = Worker(models, capacity, max_wait_s=max_wait_s, max_drain_s=max_drain_s)
    arrivals = data.draw(
        st.lists(
            st.tuples(
                st.floats(0, 20), st.sampled_from(names), st.sampled_from([0.05, 0.5, 4.0, 15.0])
            ),
            max_size=15,
        ),
        "arrivals",
    )
    for at_s, name, service_s in sorted(arrivals):
        worker.run_until(at_s)
        worker.ask(name, service_s)
    deadline_s = worker.clock.now + 1000
    while worker.has_work:
        worker.tick()
        assert not worker.orders.unsatisfiable
        assert worker.clock.now < deadline_s, worker.residency.models
    slowest_s = max(m.load_s for m in models.values())
    turn_s = max(slowest_s, LEAST_STAY_S) + max_drain_s + slowest_s + 6 * TICK_S
    held_s = max_wait_s + max_drain_s + SETTLE_S if any(m.num_kv for m in models.values()) else 0.0
    bound_s = max_wait_s + held_s + (len(names) + 1) * turn_s
    assert max(worker.waits_s, default=0.0) <= bound_s


@pytest.mark.parametrize("load_s", [0.2, 1.0])
@pytest.mark.parametrize("num_models", [2, 3])
def test_loading_takes_a_bounded_part_of_the_time(load_s: float, num_models: int) -> None:
    """Each of several models has always something to do, and there is room for one."""
    names = NAMES[:num_models]
    worker = Worker({n: Model(2, load_s) for n in names}, 2, max_wait_s=1e9, max_drain_s=1.0)
    while worker.clock.now < 400 * load_s:
        for name in names:
            if len(worker.models[name].waiting) < 2:
                worker.ask(name, 0.3)
        worker.tick()
    assert len(worker.left) > 20
    assert {name for _, name in worker.left} == set(names)
    assert worker.loading_s / worker.clock.now <= 1 / (1 + MIN_LOADS) + 0.01


def test_with_an_impatient_limit_it_is_half_at_most() -> None:
    worker = Worker({n: Model(2, 0.5) for n in "ab"}, 2, max_wait_s=0.1, max_drain_s=0.1)
    while worker.clock.now < 100:
        for name in "ab":
            if not worker.models[name].waiting:
                worker.ask(name, 0.3)
        worker.tick()
    assert 0.3 < worker.loading_s / worker.clock.now <= 0.5


def test_one_that_fits_comes_at_once_and_nobody_leaves() -> None:
    worker = Worker({"a": Model(2, 0.5), "b": Model(3, 0.5)}, 5)
    worker.ask("a", 5.0)
    worker.run_until(1.0)
    worker.ask("b", 1.0)
    worker.tick()
    assert worker.residency.models["b"].tier in ("gathering", "loading")
    worker.run_until(1.0 + 0.5 + 3 * TICK_S)
    assert worker.on_device() == {"a", "b"} and not worker.left


def test_the_one_idle_the_longest_leaves() -> None:
    worker = Worker({n: Model(1, 0.1) for n in "abcd"}, 3)
    for name in "bac":
        worker.ask(name, 0.1)
        worker.run_until(worker.clock.now + 5)
    worker.ask("b", 0.1)
    worker.run_until(worker.clock.now + 5)
    worker.ask("d", 0.1)
    worker.run_until(worker.clock.now + 1)
    assert [name for _, name in worker.left] == ["a"]


def test_an_idle_one_stays_for_as_long_as_it_would_take_to_bring_it_back() -> None:
    """It came a moment ago: whoever used it may be about to use it again."""
    worker = Worker({n: Model(1, 1.0) for n in "ab"}, 1)
    worker.ask("a", 0.1)
    worker.run_until(1.5)
    worker.ask("b", 0.1)
    worker.run_until(1.9)
    assert worker.on_device() == {"a"}
    worker.run_until(2.3)
    assert [name for _, name in worker.left] == ["a"]


def test_what_runs_may_end_but_nobody_is_admitted() -> None:
    worker = Worker({n: Model(1, 0.2) for n in "ab"}, 1, max_drain_s=5.0)
    worker.ask("a", 8.0)
    worker.run_until(5.0)
    worker.ask("b", 1.0)
    worker.run_until(5.5)
    assert "a" in worker.orders.held and worker.residency.models["a"].tier == "draining"
    worker.ask("a", 1.0)
    worker.run_until(8.0)
    assert len(worker.models["a"].waiting) == 1
    worker.run_until(9.0)
    ((left_s, _),) = worker.left
    assert left_s < 8.5, "when the last one ended"


def test_at_the_deadline_what_still_runs_is_preempted() -> None:
    worker = Worker({n: Model(1, 0.2) for n in "ab"}, 1, max_drain_s=1.0)
    worker.ask("a", 60.0)
    worker.run_until(5.0)
    worker.ask("b", 0.5)
    worker.run_until(6.5)
    assert len(worker.models["a"].waiting) == 1 and worker.left[0][0] < 6.2
    worker.run_until(100.0)
    assert not worker.has_work


def test_a_drain_is_called_off_with_its_reason() -> None:
    worker = Worker({n: Model(1, 0.2) for n in "ab"}, 1)
    worker.ask("a", 60.0)
    worker.run_until(5.0)
    worker.ask("b", 0.5)
    worker.run_until(5.5)
    worker.models["b"].waiting.clear()
    worker.tick()
    assert not worker.orders.held and worker.residency.models["a"].tier == "device"


def test_a_load_nobody_waits_for_is_cancelled() -> None:
    worker = Worker({"a": Model(1, 2.0)}, 1)
    worker.ask("a", 1.0)
    worker.run_until(1.0)
    worker.models["a"].waiting.clear()
    worker.tick()
    assert worker.residency.models["a"].tier == "host" and worker.residency.num_free == 1
    worker.run_until(4.0)
    assert not worker.on_device()


def test_pinned_ones_come_unasked_and_never_leave() -> None:
    worker = Worker({n: Model(1, 0.1) for n in "abc"}, 2, max_wait_s=1.0)
    worker.residency.models["a"].is_pinned = True
    worker.run_until(1.0)
    assert worker.on_device() == {"a"}
    for _ in range(20):
        worker.ask("b", 0.3)
        worker.ask("c", 0.3)
        worker.run_until(worker.clock.now + 1.0)
    assert {name for _, name in worker.left} == {"b", "c"} and "a" in worker.on_device()


def test_what_cannot_fit_beside_pins_is_unsatisfiable() -> None:
    worker = Worker({"a": Model(2, 0.1), "b": Model(3, 0.1), "c": Model(1, 0.1)}, 4)
    worker.residency.models["a"].is_pinned = True
    worker.run_until(1.0)
    worker.ask("b", 1.0)
    worker.ask("c", 1.0)
    worker.tick()
    assert worker.orders.unsatisfiable == ["b"] and worker.residency.models["c"].tier in (
        "gathering",
        "loading",
    )


def test_an_unloaded_one_drains_and_stays_away() -> None:
    worker = Worker({"a": Model(1, 0.1)}, 4)
    worker.ask("a", 2.0)
    worker.run_until(1.0)
    worker.residency.models["a"].is_unloaded = True
    worker.tick()
    assert worker.on_device() == {"a"} and worker.orders.held == {"a"}
    worker.run_until(3.0)
    worker.ask("a", 1.0)
    worker.run_until(5.0)
    assert not worker.on_device()


def test_a_failed_load_is_tried_again_after_a_while() -> None:
    worker = Worker({"a": Model(1, 0.1)}, 1, retry_after_s=5.0)
    worker.ask("a", 1.0)
    worker.tick()
    worker.models["a"].due_s = None
    worker.residency.failed("a")
    worker.run_until(4.9)
    assert worker.residency.models["a"].tier == "host"
    worker.run_until(6.0)
    assert worker.on_device() == {"a"}


def test_one_short_of_memory_gets_it_from_others_in_time() -> None:
    """Weights leave room enough, but what runs elsewhere takes it again and again."""
    worker = Worker(
        {"a": Model(1, 0.1, num_kv=3), "b": Model(1, 0.1, num_kv=3)},
        5,
        max_wait_s=2.0,
        max_drain_s=1.0,
    )
    worker.ask("b", 0.1)
    worker.run_until(1.0)
    worker.ask("a", 0.1)
    worker.run_until(2.0)
    assert worker.on_device() == {"a", "b"}
    while worker.clock.now < 20:
        worker.ask("a", 1.0)
        if worker.clock.now > 4 and not worker.models["b"].waiting:
            worker.ask("b", 0.5)
        worker.tick()
    assert len(worker.waits_s) > 20 and max(worker.waits_s) < 2 * (2.0 + 1.0) + 1.0


def test_only_as_many_leave_as_are_needed() -> None:
    worker = Worker({"a": Model(1, 0.1), "b": Model(3, 0.1), "c": Model(3, 0.1)}, 4)
    for name in "ab":
        worker.ask(name, 0.1)
        worker.run_until(worker.clock.now + 3)
    worker.ask("c", 0.1)
    worker.run_until(worker.clock.now + 3)
    assert [name for _, name in worker.left] == ["b"], "though a was idle for longer"
