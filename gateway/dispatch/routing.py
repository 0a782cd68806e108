"""Which worker a request goes to: the one where its first token is predicted to come soonest.

    first token =   queue       prompt tokens to be computed there before its own / prefill rate
                  + prefill     its own that are not cached there / prefill rate
                  + row         while every row is taken: those before it x an answer's time / rows
                  + model       until the base model is on the device: its load, after a drain where
                                there is no room
                  + adapter     until the adapter is: by the tier it is in there, and its bytes
                  + crowd       one more distinct adapter makes the steps of the batch longer, by
                                its share of the bytes that a step reads

A worker tells of itself once a second; what was sent there since is added, and what it has computed
since is taken off. A gateway knows what it sent itself, and takes every other to have sent as much:
they were told the same, and would all run to the worker that was the least busy. For that reason
too, not all workers are weighed, but a few drawn of those that hold the most of the prompt, of the
adapter's best holders, of the base model's, and of all. What no worker has goes to its home, two
workers by hash, so that gateways agree without a word. A hot adapter comes to the next worker as
soon as the queues of those that hold it are longer than its load. What each holds is noted when a
worker tells it: a choice weighs those that are drawn, however many there are.

Everything here is a function of its arguments, time and random numbers included.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Mapping, Sequence, Set
from contextlib import contextmanager
from dataclasses import dataclass, field
from heapq import nlargest
from random import Random
from typing import Generic
from zlib import crc32

import msgspec

from gateway.dispatch.worker_pool import NUM_DRAWN, Pool, W, draw
from workers.wire.prefix_index import Prefix
from workers.wire.protocol import OLDEST_VERSION, AdapterStatus, ModelStatus, WorkerStatus

STALE_S = 3.0
"""A worker whose last status is older takes nothing that another can take."""
DOUBT = 1.5
"""No prediction is exact: so much sooner must it be where nothing of the request's is yet."""

PREFILL_TOKENS_PER_S = 1000.0
"""Until a worker of the model has measured it; so are the next two."""
DECODE_STEP_S = 0.02
MODEL_LOAD_S = 5.0
ANSWER_TOKENS = 128
"""For how many steps a sequence is expected to stay."""
ADAPTER_BYTES = 8 << 20
"""Assumed size of an adapter that no worker holds."""
LOAD_OVERHEAD_S = 1e-3
COPY_BYTES_PER_S = 2.5e9
"""Host to device, on a CPU; a GPU's bus is quicker, but then all of this is next to nothing."""
FETCH_BYTES_PER_S = 4e8
"""To the host, from the disk cache or the store."""


@dataclass(slots=True, eq=False)
class Work:
    """What a request asks of a worker."""

    model: str
    """Digest of the base model."""
    adapter: str | None
    """Digest."""
    prompts: Sequence[Prefix]
    num_sequences: int
    least_version: int = OLDEST_VERSION
    """Version of the protocol that the worker must speak at least."""
    num_tokens: int = field(init=False)
    """Tokens of all prompts."""

    def __post_init__(self) -> None:
        self.num_tokens = sum(len(prompt.tokens) for prompt in self.prompts)


class ModelReport(msgspec.Struct, frozen=True):
    """A base model on one worker."""

    prefill_tokens_per_s: float = PREFILL_TOKENS_PER_S
    decode_step_s: float = DECODE_STEP_S
    num_bytes: int = 0
    num_rows: int = 0
    num_sequences: int = 0
    """Running and waiting."""
    wait_s: float = 0.0
    """Until it is on the device; 0: it is there."""

    def row_s(self, num_more: float) -> float:
        """Until a row is free for one sequence beside those and so many more."""
        num_before = self.num_sequences + num_more + 1 - self.num_rows
        if num_before <= 0 or not self.num_rows:
            return 0.0
        return num_before * ANSWER_TOKENS * self.decode_step_s / self.num_rows

    def crowd_s(self, num_bytes: int) -> float:
        """What another adapter of so many bytes adds to the steps of an answer."""
        share = num_bytes / self.num_bytes if self.num_bytes else 0.0
        return ANSWER_TOKENS * self.decode_step_s * share if self.num_sequences else 0.0


UNKNOWN = ModelReport(wait_s=MODEL_LOAD_S)


class Report(msgspec.Struct, frozen=True):
    """A worker's status, as it is looked up for every request."""

    models: Mapping[str, ModelReport] = {}
    """By digest."""
    adapters: Mapping[str, AdapterStatus] = {}
    """By digest, those on the device or the host, or on their way."""
    queue_s: float = 0.0
    """To compute the prompts that are there."""
    instance_id: str = ""
    held: Set[str] = frozenset()
    """Adapters on the device."""
    resident: Set[str] = frozenset()
    """Base models on the device."""

    @staticmethod
    def of(status: WorkerStatus, rates: Mapping[str, float]) -> Report:
        """rates: prefill tokens/s by model, as other workers have measured them: a worker that has
        not yet is believed to be no slower."""
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
    """What was chosen to go to a worker and is not sent yet."""

    def __init__(self) -> None:
        self.seconds = 0.0
        """To compute the prompts."""
        self.num_sequences = 0

    def add(self, seconds: float, num_sequences: int) -> None:
        self.seconds += seconds
        self.num_sequences += num_sequences


class Standing:
    """A worker as one gateway sees it: its last report, and what it was sent since."""

    def __init__(self, report: Report, reported_at: float, num_gateways: float = 1.0) -> None:
        """num_gateways: of as much traffic as this one."""
        self.report = report
        self.reported_at = reported_at
        self.num_gateways = num_gateways
        self.num_more = 0
        """Sequences of this gateway that are there, less those that were when it was reported."""
        self.claims = Claims()
        """Requests of this gateway that wait for their limits."""
        self._known_s = report.queue_s
        self._sent_s = 0.0
        """Of this gateway's requests since the report."""
        self._queue_at = reported_at
        """When the worker had these two to compute."""
        self._sent_adapters: set[str] = set()
        self._sent_models: dict[str, float] = {}
        """Those that have to come for what was sent, with their waits."""

    @property
    def near(self) -> Set[str]:
        """Adapters that are there or on their way."""
        return self.report.adapters.keys() | self._sent_adapters

    def is_stale(self, now: float) -> bool:
        return now - self.reported_at > STALE_S

    def model(self, digest: str) -> ModelReport:
        return self.report.models.get(digest, UNKNOWN)

    def tier(self, adapter: str) -> str:
        """device | loading | host, or nothing."""
        if adapter in self._sent_adapters:
            return "loading"
        held = self.report.adapters.get(adapter)
        return "" if held is None else held.tier

    def wait_s(self, model: str) -> float:
        """Until the base model is on the device, after those that were asked for before it."""
        wait_s = self.model(model).wait_s
        if not wait_s:
            return 0.0
        if model in self._sent_models:
            return wait_s / 2
        return wait_s + sum(self._sent_models.values())

    def queue_s(self, now: float) -> float:
        """Seconds to compute the prompts that are there, or will be. The other gateways were told
        the same of the workers, and each is taken to have sent and to have claimed as much."""
        known_s, sent_s = self._left(now)
        return known_s + self.num_gateways * (sent_s + self.claims.seconds)

    def row_s(self, model: str) -> float:
        """Seconds until a row of the model is free for one more sequence."""
        num_more = self.num_more + self.claims.num_sequences
        return self.model(model).row_s(self.num_gateways * num_more)

    def send(self, work: Work, num_cached: int, now: float) -> None:
        """Counts a request that goes there."""
        known_s, sent_s = self._left(now)
        self._known_s, self._sent_s = known_s, sent_s + prefill_s(work, num_cached, self)
        self._queue_at = now
        self.num_more += work.num_sequences
        self.expect(work)

    def expect(self, work: Work) -> None:
        """Notes that what the request needs will be loaded."""
        if work.adapter is not None and self.tier(work.adapter) != "device":
            self._sent_adapters.add(work.adapter)
        if wait_s := self.model(work.model).wait_s:
            self._sent_models[work.model] = wait_s

    def _left(self, now: float) -> tuple[float, float]:
        """Returns what is left of the prompts that were reported, which are computed first, and of
        those sent since."""
        seconds = now - self._queue_at
        if seconds <= self._known_s:
            return self._known_s - seconds, self._sent_s
        return 0.0, max(self._sent_s - (seconds - self._known_s) / self.num_gateways, 0.0)


EMPTY = Standing(Report(), 0.0)


class Workers(Generic[W]):
    """All workers as one gateway sees them, and which of them have what."""

    def __init__(self) -> None:
        self.all: Pool[W] = Pool()
        self.standings: dict[W, Standing] = {}
        """To read; they change by `put`, `send` and `remove`."""
        self._empty: Pool[W] = Pool()
        self._holders: dict[str, Pool[W]] = {}
        self._near: dict[str, Pool[W]] = {}
        self._resident: dict[str, Pool[W]] = {}

    def holders(self, adapter: str) -> Pool[W]:
        """Those on whose device it is."""
        return self._holders.get(adapter, self._empty)

    def near(self, adapter: str) -> Pool[W]:
        """The same with those that have it on the host or on its way."""
        return self._near.get(adapter, self._empty)

    def resident(self, model: str) -> Pool[W]:
        """Those on whose device the base model is."""
        return self._resident.get(model, self._empty)

    def put(self, worker: W, standing: Standing) -> None:
        """In place of what was known of the worker, if anything was."""
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
        """Counts a request that goes there."""
        self.standings[worker].send(work, num_cached, now)
        self._expect(worker, work)

    @contextmanager
    def claimed(self, worker: W, work: Work, num_cached: int) -> Generator[None]:
        """Counts a request that is to go there, until the block ends."""
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
    """From the pools of what it had to those of what it has; empty ones go."""
    for digest in before - after:
        pools[digest].discard(worker)
        if not pools[digest]:
            del pools[digest]
    for digest in after - before:
        pools.setdefault(digest, Pool()).add(worker)


def weigh(
    work: Work,
    workers: Workers[W],
    cached: Mapping[W, int],
    now: float,
    random: Random,
    is_able: Callable[[W], bool] = lambda _: True,
) -> dict[W, float]:
    """The candidates among the workers that are able, of which there must be one, with the seconds
    by which they are compared. `cached`: how many tokens of the prompts each has; none of those
    that are not there."""
    standings = workers.standings

    def is_fresh(worker: W) -> bool:
        return is_able(worker) and not standings[worker].is_stale(now)

    drawn = _candidates(work, workers, cached, is_fresh, random)
    drawn = drawn or _candidates(work, workers, cached, is_able, random)
    num_bytes = _adapter_bytes(work.adapter, workers) if work.adapter is not None else 0

    def seconds(worker: W) -> float:
        num_cached, standing = cached.get(worker, 0), standings[worker]
        predicted = predict(work, standing, num_cached, num_bytes, now)
        is_near = num_cached or (work.adapter and standing.tier(work.adapter))
        return predicted if is_near else DOUBT * predicted

    return {worker: seconds(worker) for worker in drawn}


def best(weighed: Mapping[W, float]) -> W:
    """The candidate of the least seconds."""
    return min(weighed, key=weighed.__getitem__)


def _candidates(
    work: Work,
    workers: Workers[W],
    cached: Mapping[W, int],
    is_able: Callable[[W], bool],
    random: Random,
) -> Iterable[W]:
    """Some of each kind, each once; empty if no worker is able."""
    drawn: dict[W, None] = {}
    if cached:
        drawn |= dict.fromkeys(draw(_deepest(cached, is_able), random))
    if work.adapter is not None:
        drawn |= dict.fromkeys(
            workers.holders(work.adapter).draw(is_able, random)
            or workers.near(work.adapter).draw(is_able, random)
            or _homes(work.adapter, workers, is_able)
        )
    drawn |= dict.fromkeys(
        workers.resident(work.model).draw(is_able, random) or _homes(work.model, workers, is_able)
    )
    drawn |= dict.fromkeys(workers.all.draw(is_able, random))
    return drawn


def predict(work: Work, worker: Standing, num_cached: int, adapter_bytes: int, now: float) -> float:
    """Seconds until the first token. adapter_bytes: of the request's adapter, if it has one."""
    model = worker.model(work.model)
    return (
        worker.queue_s(now)
        + prefill_s(work, num_cached, worker)
        + worker.row_s(work.model)
        + worker.wait_s(work.model)
        + (_adapter_s(work.adapter, worker, model, adapter_bytes) if work.adapter else 0.0)
    )


def prefill_s(work: Work, num_cached: int, worker: Standing) -> float:
    """Returns the seconds to compute the prompts of a request."""
    num_tokens = max(work.num_tokens - num_cached, 1)
    return num_tokens / worker.model(work.model).prefill_tokens_per_s


def _adapter_s(adapter: str, worker: Standing, model: ModelReport, num_bytes: int) -> float:
    held = worker.report.adapters.get(adapter)
    is_running = held is not None and held.leases > 0
    crowd_s = 0.0 if is_running else model.crowd_s(num_bytes)
    copy_s = LOAD_OVERHEAD_S + num_bytes / COPY_BYTES_PER_S
    match worker.tier(adapter):
        case "device":
            return crowd_s
        case "loading":
            return crowd_s + copy_s / 2
        case "host":
            return crowd_s + copy_s
        case _:
            return crowd_s + copy_s + LOAD_OVERHEAD_S + num_bytes / FETCH_BYTES_PER_S


def _adapter_bytes(adapter: str, workers: Workers[W]) -> int:
    for worker in workers.near(adapter):
        if (status := workers.standings[worker].report.adapters.get(adapter)) is not None:
            return status.num_bytes
    return ADAPTER_BYTES


def _homes(digest: str, workers: Workers[W], is_able: Callable[[W], bool]) -> Sequence[W]:
    """Where something goes first that no worker has: all gateways agree without a word."""

    def rank(worker: W) -> int:
        return crc32(f"{digest}{workers.standings[worker].report.instance_id}".encode())

    return nlargest(NUM_DRAWN, filter(is_able, workers.all), key=rank)


def _deepest(cached: Mapping[W, int], is_able: Callable[[W], bool]) -> list[W]:
    able = {worker: num for worker, num in cached.items() if is_able(worker)}
    most = max(able.values(), default=0)
    return [worker for worker, num in able.items() if num == most]


def _model_report(
    model: ModelStatus, status: WorkerStatus, rates: Mapping[str, float]
) -> ModelReport:
    rate = model.prefill_tokens_per_s or rates.get(model.digest, PREFILL_TOKENS_PER_S)
    return ModelReport(
        prefill_tokens_per_s=rate,
        decode_step_s=model.decode_step_s or DECODE_STEP_S,
        num_bytes=model.num_bytes,
        num_rows=model.max_num_seqs,
        num_sequences=model.num_running + model.num_waiting,
        wait_s=_wait_s(model, status),
    )


def _wait_s(model: ModelStatus, status: WorkerStatus) -> float:
    """On the average half of a load in progress is left. Otherwise those that are waited for come
    first, and where there is no room, what runs in another model has to end, and that model has to
    come back in its turn."""
    if model.tier == "device":
        return 0.0
    load_s = _load_s(model)
    if model.tier == "loading":
        return load_s / 2
    others = (m for m in status.models if m.digest != model.digest and m.tier != "device")
    queue_s = sum(_load_s(other) for other in others if other.num_waiting)
    free = status.arena_bytes * status.extents.count(".") // max(len(status.extents), 1)
    has_room = model.tier != "draining" and model.num_bytes <= free
    return queue_s + load_s + (0.0 if has_room else load_s + _drain_s(status))


def _load_s(model: ModelStatus) -> float:
    return model.load_s or MODEL_LOAD_S


def _drain_s(status: WorkerStatus) -> float:
    steps = (m.decode_step_s or DECODE_STEP_S for m in status.models if m.num_running)
    return ANSWER_TOKENS * max(steps, default=0.0)
