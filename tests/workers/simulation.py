"""An engine with everything real but the tensors and the clock: what tests of scheduling drive."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from adapters.pool.load_cost import LoadCost
from adapters.pool.loads import LoadCount
from adapters.pool.source import (
    AdapterLease,
    AdapterLoad,
    AdapterTurn,
    AdapterUnavailable,
    AdapterUse,
    Loading,
    LoadTimes,
    NoRoom,
)
from adapters.pool.turns import AdapterTurns
from adapters.reference import AdapterRef
from memory.accounts import NO_TENANT, Tenant
from memory.arena import Arena
from memory.eviction.adapter_memory import AdapterMemory
from memory.eviction.broker import MemoryBroker
from memory.kv_cache import KVCache
from ops.commands import PendingCommands
from tests.workers.simulator import END, VOCAB, FakeClock, SimulatedRunner, Slots, alone
from workers.execution.engine import Engine, Event
from workers.execution.observer import NoObserver, StepObserver
from workers.execution.step_input import Runner
from workers.observe.report import EngineReport
from workers.observe.ring import StepRing
from workers.policies.fair_scheduler import fair_scheduler
from workers.policies.queue_limits import QueueBounds
from workers.scheduling.constraint import ConstraintSource, Unconstrained
from workers.scheduling.scheduler import Scheduler
from workers.scheduling.sequence import Sequence
from workers.verification.adapter_verifier import ModelInstance
from workers.wire.protocol import (
    ErrorCode,
    Failed,
    FinishReason,
    Generate,
    ModelInfo,
    PromptProgress,
    SamplingParams,
    SequenceTimes,
)
from workers.wire.request_check import RequestLimits

PAGE_BYTES = 16 << 10
ANY_RATIO = 1e3
"""Limit of gaps for tests in which steps may be as long as the other rules allow."""


class StubTimes(LoadTimes):
    """Times that tell of one load, whenever a sequence arrived."""

    def __init__(self, load: AdapterLoad | None) -> None:
        super().__init__()
        self.load = load

    def since(self, arrival_s: float) -> AdapterLoad | None:
        return self.load


@dataclass
class StubAdapter:
    load_times: LoadTimes
    leases: int = 0
    num_unpaid_bytes: int = 0


@dataclass
class StubPool:
    """Adapters arrive some steps after they are first asked for; `num_slots` fit at a time."""

    num_slots: int
    delay_steps: int = 0
    broken: frozenset[str] = frozenset()
    slots: dict[str, int] = field(default_factory=dict)
    adapters: dict[int, StubAdapter] = field(default_factory=dict)
    """By slot."""
    asked: dict[str, int] = field(default_factory=dict)
    is_loading: bool = False
    loaded_bytes: int = 0
    """Of the next adapter that is leased."""
    last_load: AdapterLoad | None = None
    """What leases tell of their adapter's load."""
    num_evictions: int = 0
    num_failed: int = 0
    counts: dict[str, LoadCount] = field(default_factory=dict[str, LoadCount])
    clock: Callable[[], float] = lambda: 0.0
    """Of the simulation, which sets it."""

    def __post_init__(self) -> None:
        self.turns = AdapterTurns(self._missing_bytes, lambda _, __: True)

    @property
    def device(self) -> StubPool:
        return self

    @property
    def loads(self) -> StubPool:
        return self

    @property
    def is_busy(self) -> bool:
        return self.is_loading or any(adapter.leases for adapter in self.adapters.values())

    def prefetch(self, ref: AdapterRef, tenant: Tenant = NO_TENANT) -> None:
        self.asked.setdefault(ref.digest, self.delay_steps)

    def load(self, ref: AdapterRef, tenant: Tenant = NO_TENANT) -> None:
        if self.turns.is_open:
            self.prefetch(ref)

    def acquire(
        self, ref: AdapterRef, turn: AdapterTurn | None = None
    ) -> AdapterLease | Loading | NoRoom:
        if turn is None:
            return self._acquire(ref)
        return self.turns.acquire(ref, turn, lambda *_: self._acquire(ref))

    def _acquire(self, ref: AdapterRef) -> AdapterLease | Loading | NoRoom:
        if ref.digest in self.broken:
            raise AdapterUnavailable("adapter.test", "it is broken")
        if ref.digest not in self.slots:
            self.asked[ref.digest] = self.asked.get(ref.digest, self.delay_steps) - 1
            if self.asked[ref.digest] >= 0:
                return Loading()
            if not self._make_room():
                return NoRoom(1)
            slot = next(slot for slot in range(self.num_slots) if slot not in self.slots.values())
            self.slots[ref.digest] = slot
            self.adapters[slot] = StubAdapter(StubTimes(self.last_load))
            del self.asked[ref.digest]
        slot = self.slots[ref.digest]
        self.adapters[slot].leases += 1
        num_loaded, self.loaded_bytes = self.loaded_bytes, 0
        copy_s = LoadCost().copy_s(num_loaded)
        return AdapterLease(slot, 8, "", num_loaded, self.adapters[slot], copy_s)

    def _missing_bytes(self, ref: AdapterRef) -> int | None:
        if ref.digest in self.slots:
            return 0
        return 1 if self.asked.get(ref.digest, 0) < 0 else None

    def evict_all_idle(self, ref: AdapterRef) -> bool:
        return False

    def cancel(self, ref: AdapterRef) -> None:
        self.turns.forget(ref.digest)
        self.asked.pop(ref.digest, None)

    def begin_step(self, in_use: Iterable[AdapterUse]) -> bool:
        self.turns.begin(self.clock(), in_use)
        return not self.turns.lacks_pages

    def check_integrity(self) -> None:
        pass

    def _make_room(self) -> bool:
        if len(self.slots) < self.num_slots:
            return True
        for digest, slot in self.slots.items():
            if not self.adapters[slot].leases:
                del self.slots[digest]
                return True
        return False


class TokenCount(NoObserver):
    """Counts the tokens that sequences are given."""

    def __init__(self, report: EngineReport) -> None:
        self.num_tokens = 0

    def on_tokens(self, sequence: Sequence, num_tokens: int, now: float) -> None:
        self.num_tokens += num_tokens


class Simulation:
    """An engine with everything real but the tensors."""

    runs_ahead = False
    """Where a test does not say: `conftest.py` has some suites run both ways."""

    def __init__(
        self,
        *,
        num_pages: int = 64,
        max_num_seqs: int = 8,
        max_batched_tokens: int = 64,
        max_token_gap_s: float = 0.25,
        max_gap_ratio: float = 1.8,
        pool: StubPool | None = None,
        bounds: QueueBounds = QueueBounds(),  # noqa: B008
        runner: Callable[[FakeClock, Slots], Runner] = SimulatedRunner,
        runs_ahead: bool | None = None,
        observe: Callable[[EngineReport], StepObserver] = lambda report: report,
        make_scheduler: Callable[..., Scheduler] = fair_scheduler,
        constraints: ConstraintSource = Unconstrained(),  # noqa: B008
    ) -> None:
        self.clock = FakeClock()
        self.is_held = False
        self.bounds = bounds
        self.pool = pool or StubPool(num_slots=4)
        self.pool.clock = self.clock
        arena = Arena(num_pages * PAGE_BYTES, 4 * PAGE_BYTES)
        source = MemoryBroker(arena, AdapterMemory(arena))
        self.kv = KVCache(arena, "model", PAGE_BYTES, source=source)
        self.slots = Slots()
        self.scheduler = make_scheduler(
            self.kv,
            self.pool,
            PendingCommands(),
            max_num_seqs=max_num_seqs,
            max_batched_tokens=max_batched_tokens,
            max_token_gap_s=max_token_gap_s,
            max_gap_ratio=max_gap_ratio,
            bounds=bounds,
        )
        self.slots.scheduler = self.scheduler
        self.runner = runner(self.clock, self.slots)
        self.ring = StepRing()
        info = ModelInfo("model", "m", 4096)
        self.report = EngineReport(info.name, self.scheduler, self.ring)
        self.observer = observe(self.report)
        self.engine = Engine(
            info,
            self.scheduler,
            self.runner,
            self.observer,
            constraints,
            RequestLimits(4096, self.kv.num_total, VOCAB, frozenset([END])),
            clock=self.clock,
            runs_ahead=self.runs_ahead if runs_ahead is None else runs_ahead,
        )
        self.instance = ModelInstance(
            *(self.engine, self.pool, self.report),  # pyright: ignore[reportArgumentType]
            effect_proof=None,  # pyright: ignore[reportArgumentType]
        )
        self.outputs: dict[int, list[int]] = {}
        self.finished: dict[int, FinishReason | ErrorCode] = {}
        self.cached: dict[int, int] = {}
        self.times: dict[int, SequenceTimes | None] = {}

    @property
    def num_counted(self) -> int:
        assert isinstance(self.observer, TokenCount)
        return self.observer.num_tokens

    def submit(self, request: Generate) -> Failed | None:
        self.clock.now += 1e-6
        self.outputs[request.id] = []
        failed = self.engine.submit(0, request)
        if failed is not None:
            self.finished[request.id] = failed.code
        return failed

    def step(self, count: int = 1) -> None:
        for _ in range(count):
            self._note(self.engine.step(is_held=self.is_held))
            self.kv.check_integrity(
                held=[
                    page
                    for sequence in [*self.scheduler.running, *self.scheduler.leaving]
                    for page in sequence.block_table.held_pages
                ]
            )

    def suspend(self) -> None:
        self._note(self.engine.suspend())

    def _note(self, events: list[Event]) -> None:
        for _, event in events:
            if isinstance(event, Failed):
                self.finished[event.id] = event.code
                self.times[event.id] = event.times
                continue
            if isinstance(event, PromptProgress):
                continue
            assert event.id not in self.finished
            self.outputs[event.id] += event.tokens
            if event.finish_reason is not None:
                self.finished[event.id] = event.finish_reason
                self.cached[event.id] = event.num_cached_tokens
                self.times[event.id] = event.times

    def run(self, *requests: Generate, max_steps: int = 20_000) -> None:
        """Submits the requests, and runs until nothing is left to do."""
        for request in requests:
            self.submit(request)
        for _ in range(max_steps):
            if not self.engine.has_work:
                return
            self.step()
        raise AssertionError("the engine did not come to rest")

    def assert_at_rest(self) -> None:
        self.kv.check_integrity(held=())
        assert self.kv.num_free == self.kv.num_total
        assert not self.pool.is_busy
        assert sorted(self.scheduler._free_slots) == [*range(self.scheduler.max_num_seqs)]


def generate(
    number: int,
    prompt: list[int],
    max_tokens: int = 12,
    adapter: str | None = None,
    **fields: object,
) -> Generate:
    return Generate(
        id=number,
        request_id=str(number),
        model="model",
        tokens=prompt,
        params=SamplingParams(max_tokens=max_tokens, seed=0, temperature=0.0),
        cache_domain="tenant",
        adapter=None if adapter is None else AdapterRef(adapter),
        **fields,  # pyright: ignore[reportArgumentType]
    )


def prompt_of(rng: random.Random, length: int) -> list[int]:
    return [rng.randrange(VOCAB - 1) for _ in range(length)]


def assert_equals_alone(simulation: Simulation, requests: list[Generate]) -> None:
    for request in requests:
        expected = alone(request)
        assert simulation.outputs[request.id] == expected
        ended = FinishReason.STOP if expected[-1] == END else FinishReason.LENGTH
        assert simulation.finished[request.id] == ended
