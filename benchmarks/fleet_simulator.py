"""Simulation of a fleet of workers without tensors or wall clock, to compare routing policies.

The simulation is coarser than the engine. It has no steps. Prompts are computed one after the
other, each answer takes a time that is proportional to its tokens, a worker has a limited number of
rows, and base models and adapters must be loaded to the device first. Times are those of an 8B
model in bfloat16 on a large GPU.
"""

from __future__ import annotations

import heapq
import math
from collections import Counter, OrderedDict, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import count
from typing import Any

from workers.wire.status import AdapterStatus, ModelStatus, WorkerStatus

PREFILL_TOKENS_PER_S = 20_000.0
STEP_S = 0.012
MODEL_BYTES = 16 << 30
LOAD_OVERHEAD_S = 1e-3
COPY_BYTES_PER_S = 2.5e9
FETCH_BYTES_PER_S = 4e8
MIN_RESIDENCY = 2.0
"""Minimum time that a base model stays on the device, as a multiple of its load time."""
STATUS_PERIOD_S = 1.0


@dataclass(frozen=True)
class Machine:
    """Capacity and speed of each worker."""

    num_rows: int = 64
    num_slots: int = 32
    """Maximum number of adapters on the device."""
    num_images: int = 128
    """Maximum number of adapters in host memory."""
    num_models: int = 1
    """Maximum number of base models on the device at a time."""
    num_registered: int = 1
    """Number of base models that the worker serves."""
    cache_tokens: int = 300_000
    load_s: float = 2.0
    """Seconds to load a base model from host memory to the device."""
    speed: float = 1.0


@dataclass(slots=True, eq=False)
class Request:
    """Simulated request. `segments` divide the prompt. Each is a pair: a key that identifies the
    prompt up to the segment's end, and the number of tokens up to there."""

    arrival_s: float
    model: int
    adapter: int | None
    adapter_bytes: int
    segments: list[tuple[object, int]]
    num_output: int
    num_cached: int = 0
    was_on_device: bool = True
    was_near: bool = True
    first_s: float = 0.0
    end_s: float = 0.0

    @property
    def num_tokens(self) -> int:
        return self.segments[-1][1]

    @property
    def ttft_s(self) -> float:
        return self.first_s - self.arrival_s


class Clock:
    """Simulated clock, which calls scheduled functions in order of time."""

    def __init__(self) -> None:
        self.now = 0.0
        self._due: list[tuple[float, int, Callable[..., None], tuple[Any, ...]]] = []
        self._numbers = count()

    def at(self, when: float, call: Callable[..., None], *arguments: Any) -> None:
        heapq.heappush(self._due, (max(when, self.now), next(self._numbers), call, arguments))

    def run(self, until: Callable[[], bool]) -> None:
        while not until():
            self.now, _, call, arguments = heapq.heappop(self._due)
            call(*arguments)


@dataclass(eq=False)
class Worker:
    clock: Clock
    machine: Machine
    number: int
    holders: dict[object, dict[int, int]]
    """Cached segments of all workers, by segment and worker, with the tokens up to the segment's
    end."""
    report: Callable[[int, WorkerStatus], None]
    num_swaps: int = 0
    waiting: deque[Request] = field(default_factory=deque[Request])
    num_running: int = 0
    _running_of: dict[int, int] = field(default_factory=dict[int, int])
    _leases: dict[int, int] = field(default_factory=dict[int, int])
    _bytes: dict[int, int] = field(default_factory=dict[int, int])
    _device: OrderedDict[int, None] = field(default_factory=OrderedDict[int, None])
    """Adapters on the device, the least recently used first. The next three dictionaries have the
    same order."""
    _host: OrderedDict[int, None] = field(default_factory=OrderedDict[int, None])
    _models: OrderedDict[int, float] = field(default_factory=OrderedDict[int, float])
    """Time at which each base model was loaded to the device."""
    _cached: OrderedDict[object, int] = field(default_factory=OrderedDict[object, int])
    _num_cached: int = 0
    _loading: set[int] = field(default_factory=set[int])
    _loader_free_s: float = 0.0
    _coming: int | None = None
    """Base model that is being loaded."""
    _draining: int | None = None
    _wakes_at: float = 0.0
    _prefill_free_s: float = 0.0
    _prefilled: tuple[float, float] = 0.0, 0.0
    """Recently computed prompt tokens, and the seconds that they took. Both decay."""
    _uncomputed: int = 0
    _answered: tuple[float, float] = 0.0, 0.0
    """Recent answers and their tokens. Both numbers decay."""

    def __post_init__(self) -> None:
        """Loads the first base models, which differ between workers."""
        machine = self.machine
        for index in range(min(machine.num_models, machine.num_registered)):
            model = (self.number * machine.num_models + index) % machine.num_registered
            self._models[model] = -math.inf

    def submit(self, request: Request) -> None:
        self.waiting.append(request)
        adapter = request.adapter
        if adapter is not None:
            self._bytes[adapter] = request.adapter_bytes
            request.was_on_device = adapter in self._device
            request.was_near = request.was_on_device or adapter in self._host
        self._advance()

    def tell(self) -> None:
        """Reports the worker's status, now and then every second."""
        self.report(self.number, self.status())
        self.clock.at(self.clock.now + STATUS_PERIOD_S, self.tell)

    def _advance(self) -> None:
        """Starts waiting requests in order. Skips requests that wait for a load."""
        passed: deque[Request] = deque()
        while self.waiting and self.num_running < self.machine.num_rows:
            request = self.waiting.popleft()
            if self._has_model(request.model) and self._has_adapter(request.adapter):
                self._start(request)
            else:
                passed.append(request)
        passed.extend(self.waiting)
        self.waiting = passed

    def _has_model(self, model: int) -> bool:
        if model in self._models and model != self._draining:
            self._models.move_to_end(model)
            return True
        if self._coming is not None or model == self._draining:
            return False
        if len(self._models) >= self.machine.num_models and not self._gave_way():
            return False
        self._coming = model
        self.num_swaps += 1
        self.clock.at(self.clock.now + self.machine.load_s, self._model_came)
        return False

    def _gave_way(self) -> bool:
        """Unloads the least recently used model if its minimum residency has passed and no request
        runs on it. Returns whether it was unloaded."""
        victim = next(iter(self._models))
        stays_until = self._models[victim] + MIN_RESIDENCY * self.machine.load_s
        if self.clock.now < stays_until:
            if self._wakes_at <= self.clock.now:
                self._wakes_at = stays_until
                self.clock.at(stays_until, self._advance)
            return False
        self._draining = victim
        if self._running_of.get(victim):
            return False
        del self._models[victim]
        self._draining = None
        return True

    def _model_came(self) -> None:
        assert self._coming is not None
        self._models[self._coming] = self.clock.now
        self._coming = None
        self._advance()

    def _has_adapter(self, adapter: int | None) -> bool:
        if adapter is None:
            return True
        if adapter in self._device:
            self._device.move_to_end(adapter)
            return True
        if adapter in self._loading:
            return False
        if len(self._device) + len(self._loading) >= self.machine.num_slots:
            idle = next((a for a in self._device if not self._leases.get(a)), None)
            if idle is None:
                return False
            del self._device[idle]
        num_bytes = self._bytes[adapter]
        seconds = LOAD_OVERHEAD_S + num_bytes / COPY_BYTES_PER_S
        if adapter not in self._host:
            seconds += LOAD_OVERHEAD_S + num_bytes / FETCH_BYTES_PER_S
        self._loading.add(adapter)
        self._loader_free_s = max(self._loader_free_s, self.clock.now) + seconds
        self.clock.at(self._loader_free_s, self._adapter_came, adapter)
        return False

    def _adapter_came(self, adapter: int) -> None:
        self._loading.remove(adapter)
        self._device[adapter] = None
        self._host[adapter] = None
        self._host.move_to_end(adapter)
        if len(self._host) > self.machine.num_images:
            self._host.popitem(last=False)
        self._advance()

    def _start(self, request: Request) -> None:
        self.num_running += 1
        self._running_of[request.model] = self._running_of.get(request.model, 0) + 1
        if request.adapter is not None:
            self._leases[request.adapter] = self._leases.get(request.adapter, 0) + 1
        request.num_cached = self._find(request)
        num_tokens = request.num_tokens - request.num_cached
        self._uncomputed += num_tokens
        busy = 1 + self.num_running / self.machine.num_rows
        seconds = num_tokens * busy / (PREFILL_TOKENS_PER_S * self.machine.speed)
        self._prefilled = 0.9 * self._prefilled[0] + num_tokens, 0.9 * self._prefilled[1] + seconds
        self._prefill_free_s = max(self._prefill_free_s, self.clock.now) + seconds
        self.clock.at(self._prefill_free_s, self._began, request, num_tokens)

    def _began(self, request: Request, num_tokens: int) -> None:
        self._uncomputed -= num_tokens
        request.first_s = self.clock.now
        self._keep(request)
        self.clock.at(self.clock.now + request.num_output * self._step_s(), self._ended, request)

    def _step_s(self) -> float:
        """Returns the seconds of a decode step, which reads the weights and the adapters in use."""
        num_bytes = sum(self._bytes[adapter] for adapter in self._leases)
        return STEP_S * (1 + num_bytes / MODEL_BYTES) / self.machine.speed

    def _ended(self, request: Request) -> None:
        request.end_s = self.clock.now
        num_answers, num_tokens = self._answered
        self._answered = 0.97 * num_answers + 1, 0.97 * num_tokens + request.num_output
        self.num_running -= 1
        self._running_of[request.model] -= 1
        if request.adapter is not None:
            self._leases[request.adapter] -= 1
            if not self._leases[request.adapter]:
                del self._leases[request.adapter]
        self._advance()

    def _find(self, request: Request) -> int:
        found = 0
        for segment, num_tokens in request.segments:
            if segment not in self._cached:
                break
            self._cached.move_to_end(segment)
            found = num_tokens
        return min(found, request.num_tokens - 1)

    def _keep(self, request: Request) -> None:
        before = 0
        for segment, num_tokens in request.segments:
            if segment not in self._cached:
                self._cached[segment] = num_tokens - before
                self._num_cached += num_tokens - before
                self.holders.setdefault(segment, {})[self.number] = num_tokens
            before = num_tokens
        while self._num_cached > self.machine.cache_tokens:
            segment, num_tokens = self._cached.popitem(last=False)
            self._num_cached -= num_tokens
            del self.holders[segment][self.number]

    def _tier(self, model: int) -> str:
        if model == self._draining:
            return "draining"
        if model == self._coming:
            return "loading"
        return "device" if model in self._models else "host"

    def status(self) -> WorkerStatus:
        num_tokens, seconds = self._prefilled
        num_answers, num_answer_tokens = self._answered
        waiting = sum(r.num_tokens - self._find(r) for r in self.waiting)
        of_model = Counter(request.model for request in self.waiting)
        models = [
            ModelStatus(
                *(
                    str(model),
                    "",
                    self._running_of.get(model, 0),
                    of_model[model],
                    0,
                    0,
                    0,
                    0,
                    0,
                    0,
                ),
                tier=self._tier(model),
                num_bytes=MODEL_BYTES,
                load_s=self.machine.load_s,
                max_num_seqs=self.machine.num_rows,
                num_waiting_tokens=self._uncomputed + waiting if model == 0 else 0,
                prefill_tokens_per_s=num_tokens / seconds if seconds else 0.0,
                decode_step_s=self._step_s(),
                answer_tokens=num_answer_tokens / num_answers if num_answers else 0.0,
            )
            for model in range(self.machine.num_registered)
        ]
        tiers = dict.fromkeys(self._host, "host")
        tiers |= dict.fromkeys(self._loading, "loading")
        tiers |= dict.fromkeys(self._device, "device")
        adapters = [
            AdapterStatus(str(a), tier, self._bytes[a], self._leases.get(a, 0), False)
            for a, tier in tiers.items()
        ]
        room = self.machine.num_models - len(self._models) - (self._coming is not None)
        extents = "." * room + "w" * len(self._models)
        return WorkerStatus(
            str(self.number),
            False,
            models,
            adapters,
            MODEL_BYTES * self.machine.num_models,
            *(extents, {}, 0, 0.0),
        )
