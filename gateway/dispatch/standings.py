"""Estimates the state of each worker from its last report and the requests that this gateway has
sent to it since, and finds the workers that hold an adapter or a base model.

Workers report once a second. A gateway adds the requests that it has sent since the report, and
subtracts the work that the worker has done since. It assumes that every other gateway has sent as
much, because all gateways saw the same report and would otherwise choose the same idle worker. The
adapters and models of each worker are indexed when it reports, so that the holders of an adapter
are found without a search. Time and random numbers are arguments."""

from __future__ import annotations

from collections.abc import Callable, Generator, Hashable, Iterator, Mapping, Sequence, Set
from contextlib import contextmanager
from random import Random
from typing import Generic, TypeVar

import msgspec

from gateway.dispatch.run import Work
from workers.wire.queue_wait import ASSUMED_ANSWER_TOKENS, slot_wait_s
from workers.wire.status import AdapterStatus, ModelStatus, WorkerStatus

W = TypeVar("W", bound=Hashable)
"""Any hashable type that identifies workers."""

NUM_DRAWN = 2
"""Number of workers drawn from each pool."""
NUM_TRIES = 16
"""Maximum number of random draws of able workers. After that, all workers of the pool are
checked."""
STALE_S = 3.0
"""Seconds after which a status is stale. A worker with a stale status gets only requests that no
other worker can take."""
PREFILL_TOKENS_PER_S = 1000.0
"""Prefill tokens per second of a model, assumed until a worker has measured them. DECODE_STEP_S and
MODEL_LOAD_S are also assumed until a worker has measured the real values."""
DECODE_STEP_S = 0.02
MODEL_LOAD_S = 5.0


class ModelReport(msgspec.Struct, frozen=True):
    """State of a base model on one worker."""

    prefill_tokens_per_s: float = PREFILL_TOKENS_PER_S
    answer_s: float = ASSUMED_ANSWER_TOKENS * DECODE_STEP_S
    """Seconds of an answer, each of whose tokens takes one engine step."""
    num_bytes: int = 0
    num_rows: int = 0
    num_sequences: int = 0
    """Number of running and waiting sequences."""
    wait_s: float = 0.0
    """Seconds until the model is on the device. 0 if it is on the device already."""

    def crowd_s(self, num_bytes: int) -> float:
        """Returns the seconds by which one more adapter in the batch lengthens an answer."""
        share = num_bytes / self.num_bytes if self.num_bytes else 0.0
        return self.answer_s * share if self.num_sequences else 0.0


UNKNOWN = ModelReport(wait_s=MODEL_LOAD_S)


class Report(msgspec.Struct, frozen=True):
    """Status of a worker in a form for fast lookups."""

    models: Mapping[str, ModelReport] = {}
    """Base models of the worker by digest."""
    adapters: Mapping[str, AdapterStatus] = {}
    """Adapters on the device or the host, or being loaded, by digest."""
    queue_s: float = 0.0
    """Seconds to compute the waiting prompts."""
    instance_id: str = ""
    held: Set[str] = frozenset()
    """Digests of the adapters on the device."""
    resident: Set[str] = frozenset()
    """Digests of the base models on the device."""

    @staticmethod
    def of(status: WorkerStatus, rates: Mapping[str, float]) -> Report:
        """Returns the report for a worker's status. `rates` are the prefill tokens per second by
        model, as other workers measured them, for models that this worker has not measured."""
        models = {model.digest: _model_report(model, status, rates) for model in status.models}
        adapters = {adapter.digest: adapter for adapter in status.adapters if adapter.num_bytes}
        return Report(
            models,
            adapters,
            sum(
                model.num_waiting_tokens / models[model.digest].prefill_tokens_per_s
                for model in status.models
            ),
            status.instance_id,
            {digest for digest, adapter in adapters.items() if adapter.tier == "device"},
            {digest for digest, model in models.items() if not model.wait_s},
        )


class Claims:
    """Requests that were assigned to a worker but have not been sent to it yet."""

    def __init__(self) -> None:
        self.seconds = 0.0
        """Seconds that the worker needs to compute the prompts of the claimed requests."""
        self.num_sequences = 0

    def add(self, seconds: float, num_sequences: int) -> None:
        self.seconds += seconds
        self.num_sequences += num_sequences


class Standing:
    """Estimated state of a worker, which one gateway computes from the worker's last report and the
    requests that it has sent to the worker since."""

    def __init__(self, report: Report, reported_at: float, num_gateways: float = 1.0) -> None:
        """`num_gateways` is the estimated total traffic of all gateways, in multiples of this
        gateway's."""
        self.report = report
        self.reported_at = reported_at
        self.num_gateways = num_gateways
        self.num_more = 0
        """Change in the number of this gateway's sequences on the worker since the report."""
        self.claims = Claims()
        """Requests that are assigned to the worker, and wait for their limits to be reserved."""
        self._known_s = report.queue_s
        self._sent_s = 0.0
        """Estimated seconds of the requests that this gateway sent since the worker's report."""
        self._queue_at = reported_at
        """Time at which `_known_s` and `_sent_s` were last updated."""
        self._sent_adapters: set[str] = set()
        self._sent_models: dict[str, float] = {}
        """Seconds until each model is on the device, for models that must be loaded for requests
        sent since the report."""

    @property
    def near(self) -> Set[str]:
        """Digests of the adapters that the worker holds or is expected to load."""
        return self.report.adapters.keys() | self._sent_adapters

    def is_stale(self, now: float) -> bool:
        return now - self.reported_at > STALE_S

    def model(self, digest: str) -> ModelReport:
        return self.report.models.get(digest, UNKNOWN)

    def tier(self, adapter: str) -> str:
        """Returns where the adapter is: `device`, `loading`, `host`, or an empty string if the
        worker does not hold it."""
        if adapter in self._sent_adapters:
            return "loading"
        held = self.report.adapters.get(adapter)
        return "" if held is None else held.tier

    def wait_s(self, model: str) -> float:
        """Returns the seconds until the base model is on the device, including the loads of other
        models that earlier requests need. If one needs this model, half of its load is left."""
        wait_s = self.model(model).wait_s
        if not wait_s:
            return 0.0
        if model in self._sent_models:
            return wait_s / 2
        return wait_s + sum(self._sent_models.values())

    def queue_s(self, now: float) -> float:
        """Returns the seconds to compute the prompts that wait at the worker. Each other gateway
        saw the same report, and is assumed to have sent and claimed as much as this one."""
        known_s, sent_s = self._left(now)
        return known_s + self.num_gateways * (sent_s + self.claims.seconds)

    def slot_s(self, model: str) -> float:
        """Returns the seconds until a row of the model is free for one more sequence."""
        report = self.model(model)
        num_more = self.num_gateways * (self.num_more + self.claims.num_sequences)
        num_behind = report.num_sequences + num_more + 1 - report.num_rows
        return slot_wait_s(num_behind, report.num_rows, report.answer_s)

    def send(self, work: Work, num_cached: int, now: float) -> None:
        """Counts a request as sent to the worker."""
        known_s, sent_s = self._left(now)
        self._known_s, self._sent_s = known_s, sent_s + prefill_s(work, num_cached, self)
        self._queue_at = now
        self.num_more += work.num_sequences
        self.expect(work)

    def expect(self, work: Work) -> None:
        """Records that the worker will load the request's adapter and base model."""
        if work.adapter is not None and self.tier(work.adapter) != "device":
            self._sent_adapters.add(work.adapter)
        if wait_s := self.model(work.model).wait_s:
            self._sent_models[work.model] = wait_s

    def _left(self, now: float) -> tuple[float, float]:
        """Returns the seconds that remain for the prompts in the report, which are computed first,
        and the seconds that remain for the prompts sent since the report."""
        seconds = now - self._queue_at
        if seconds <= self._known_s:
            return self._known_s - seconds, self._sent_s
        return 0.0, max(self._sent_s - (seconds - self._known_s) / self.num_gateways, 0.0)


EMPTY = Standing(Report(), 0.0)


class Workers(Generic[W]):
    """Standings of all workers, with indexes of the adapters and models that they hold."""

    def __init__(self) -> None:
        self.all: Pool[W] = Pool()
        self.standings: dict[W, Standing] = {}
        """Standing of each worker. Callers must not change the dict. Use `put`, `send` and
        `remove`."""
        self._empty: Pool[W] = Pool()
        self._holders: dict[str, Pool[W]] = {}
        self._near: dict[str, Pool[W]] = {}
        self._resident: dict[str, Pool[W]] = {}

    def holders(self, adapter: str) -> Pool[W]:
        """Returns the workers with the adapter on the device."""
        return self._holders.get(adapter, self._empty)

    def near(self, adapter: str) -> Pool[W]:
        """Returns the workers with the adapter on the device or the host, or being loaded."""
        return self._near.get(adapter, self._empty)

    def resident(self, model: str) -> Pool[W]:
        """Returns the workers with the base model on the device."""
        return self._resident.get(model, self._empty)

    def put(self, worker: W, standing: Standing) -> None:
        """Adds a worker, or replaces its standing."""
        before = self.standings.get(worker, EMPTY)
        if before is not EMPTY:
            standing.claims = before.claims
        self.standings[worker] = standing
        self.all.add(worker)
        self._note(worker, before, standing)

    def remove(self, worker: W) -> None:
        self._note(worker, self.standings.pop(worker), EMPTY)
        self.all.discard(worker)

    def send(self, worker: W, work: Work, num_cached: int, now: float) -> None:
        """Counts a request as sent to the worker."""
        self.standings[worker].send(work, num_cached, now)
        self._expect(worker, work)

    @contextmanager
    def claimed(self, worker: W, work: Work, num_cached: int) -> Generator[None]:
        """Counts a request as assigned to the worker until the block ends."""
        standing = self.standings[worker]
        standing.expect(work)
        self._expect(worker, work)
        claims, seconds = standing.claims, prefill_s(work, num_cached, standing)
        claims.add(seconds, work.num_sequences)
        try:
            yield
        finally:
            claims.add(-seconds, -work.num_sequences)

    def _expect(self, worker: W, work: Work) -> None:
        if work.adapter is not None:
            self._near.setdefault(work.adapter, Pool()).add(worker)

    def _note(self, worker: W, before: Standing, after: Standing) -> None:
        _move(worker, self._holders, before.report.held, after.report.held)
        _move(worker, self._near, before.near, after.near)
        _move(worker, self._resident, before.report.resident, after.report.resident)


def _move(worker: W, pools: dict[str, Pool[W]], before: Set[str], after: Set[str]) -> None:
    """Moves a worker from the pools of the digests `before` to the pools of the digests `after`.
    Removes empty pools."""
    for digest in before - after:
        pools[digest].discard(worker)
        if not pools[digest]:
            del pools[digest]
    for digest in after - before:
        pools.setdefault(digest, Pool()).add(worker)


def prefill_s(work: Work, num_cached: int, worker: Standing) -> float:
    """Returns the seconds to compute the prompts of a request."""
    num_tokens = max(work.num_tokens - num_cached, 1)
    return num_tokens / worker.model(work.model).prefill_tokens_per_s


def _model_report(
    model: ModelStatus, status: WorkerStatus, rates: Mapping[str, float]
) -> ModelReport:
    rate = model.prefill_tokens_per_s or rates.get(model.digest, PREFILL_TOKENS_PER_S)
    return ModelReport(
        prefill_tokens_per_s=rate,
        answer_s=_answer_s(model),
        num_bytes=model.num_bytes,
        num_rows=model.max_num_seqs,
        num_sequences=model.num_running + model.num_waiting,
        wait_s=_wait_s(model, status),
    )


def _wait_s(model: ModelStatus, status: WorkerStatus) -> float:
    """Returns the seconds until a model is on the device. Counts a load in progress as half done.
    Otherwise, adds the loads of models for which requests wait and, if there is no room, the time
    until another model has finished its requests, and an estimate of that model's later reload."""
    if model.tier == "device":
        return 0.0
    load_s = _load_s(model)
    if model.tier == "loading":
        return load_s / 2
    others = (m for m in status.models if m.digest != model.digest and m.tier != "device")
    queue_s = sum(_load_s(other) for other in others if other.num_waiting)
    free = status.arena_bytes * status.extents.count(".") // max(len(status.extents), 1)
    running = (_answer_s(other) for other in status.models if other.num_running)
    has_room = model.tier != "draining" and model.num_bytes <= free
    return queue_s + load_s + (0.0 if has_room else load_s + max(running, default=0.0))


def _load_s(model: ModelStatus) -> float:
    return model.load_s or MODEL_LOAD_S


def _answer_s(model: ModelStatus) -> float:
    num_tokens = model.answer_tokens or ASSUMED_ANSWER_TOKENS
    return num_tokens * (model.decode_step_s or DECODE_STEP_S)


class Pool(Generic[W]):
    """Set of workers from which random ones are drawn. Each operation takes constant time, unless
    `draw` finds few able workers."""

    def __init__(self) -> None:
        self._members: list[W] = []
        self._places: dict[W, int] = {}

    def __len__(self) -> int:
        return len(self._members)

    def __iter__(self) -> Iterator[W]:
        return iter(self._members)

    def add(self, worker: W) -> None:
        if worker not in self._places:
            self._places[worker] = len(self._members)
            self._members.append(worker)

    def discard(self, worker: W) -> None:
        """Removes a worker. The last worker of the list takes its position."""
        place = self._places.pop(worker, None)
        if place is None:
            return
        last = self._members.pop()
        if place < len(self._members):
            self._members[place] = last
            self._places[last] = place

    def draw(self, is_able: Callable[[W], bool], random: Random) -> Sequence[W]:
        """Draws up to two workers for which `is_able` is true. Returns an empty list only if there
        are none."""
        members = self._members
        if not members:
            return []
        if len(members) > NUM_DRAWN:
            drawn: list[W] = []
            for _ in range(NUM_TRIES):
                worker = members[int(random.random() * len(members))]
                if is_able(worker):
                    drawn.append(worker)
                    if len(drawn) == NUM_DRAWN:
                        return drawn
        return draw([worker for worker in members if is_able(worker)], random)


def draw(kind: Sequence[W], random: Random) -> Sequence[W]:
    """Draws up to two workers in random order, because callers choose the first of equally good
    ones. The two may be the same worker."""
    if len(kind) <= NUM_DRAWN:
        return kind if random.random() < 0.5 else kind[::-1]
    return [kind[int(random.random() * len(kind))] for _ in range(NUM_DRAWN)]
