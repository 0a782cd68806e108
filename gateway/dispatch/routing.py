"""Chooses the worker on which a request's first token is predicted to come soonest.

    first token =   queue       prompt tokens of earlier requests / prefill rate
                  + prefill     the request's prompt tokens that are not cached / prefill rate
                  + row         wait for a row of a full batch (`workers.wire.queue_wait`)
                  + model       wait until the base model is on the device. If there is no room,
                                another model must finish its requests first
                  + adapter     wait until the adapter is on the device, by its tier and bytes
                  + crowd       time by which one more adapter in the batch lengthens its steps,
                                from the adapter's share of the bytes that a step reads

All gateways see the same reports and would choose the same idle worker. Therefore only a few
randomly drawn workers are compared: some that have most of the prompt cached, some that hold the
adapter, some that hold the base model, and some drawn from all. An adapter or a model that no
worker holds goes to one of two workers that are determined by a hash, so that gateways agree
without coordination. A popular adapter spreads to another worker once the queues of the workers
that hold it take longer than loading it.

Functions in this module read neither a clock nor a global random generator. Time and random numbers
are arguments."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from heapq import nlargest
from random import Random
from zlib import crc32

from gateway.dispatch.run import Work
from gateway.dispatch.standings import NUM_DRAWN, ModelReport, Standing, W, Workers, draw, prefill_s

DOUBT = 1.5
"""Factor for the predicted seconds of a worker that has neither the prefix nor the adapter. Because
predictions are inexact, such a worker is chosen only if it is faster by this factor."""
ADAPTER_BYTES = 8 << 20
"""Assumed bytes of an adapter that no worker holds."""
LOAD_OVERHEAD_S = 1e-3
COPY_BYTES_PER_S = 2.5e9
"""Bytes per second of a copy from host to device on a machine without a GPU. A GPU's bus is faster,
but with a GPU the copy is only a small part of the predicted seconds."""
FETCH_BYTES_PER_S = 4e8
"""Bytes per second of a load to the host, from the disk cache or the store."""


def weigh(
    work: Work,
    workers: Workers[W],
    cached: Mapping[W, int],
    now: float,
    random: Random,
    is_able: Callable[[W], bool] = lambda _: True,
) -> dict[W, float]:
    """Returns the candidates for a request and their predicted seconds to the first token.
    `is_able` must be true for at least one worker. `cached` is the number of cached prompt tokens
    of each worker that has any."""
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
    """Returns the candidate with the fewest predicted seconds."""
    return min(weighed, key=weighed.__getitem__)


def _candidates(
    work: Work,
    workers: Workers[W],
    cached: Mapping[W, int],
    is_able: Callable[[W], bool],
    random: Random,
) -> Iterable[W]:
    """Returns a few able workers: some that hold the prefix, some that hold the adapter, some that
    hold the model, and some drawn from all workers. Returns nothing if no worker is able."""
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
    """Returns the predicted seconds until the first token. `adapter_bytes` is 0 without an
    adapter."""
    model = worker.model(work.model)
    return (
        worker.queue_s(now)
        + prefill_s(work, num_cached, worker)
        + worker.slot_s(work.model)
        + worker.wait_s(work.model)
        + (_adapter_s(work.adapter, worker, model, adapter_bytes) if work.adapter else 0.0)
    )


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
    """Returns the two able workers that a hash determines for an adapter or a model that no worker
    holds. All gateways choose the same two."""

    def rank(worker: W) -> int:
        return crc32(f"{digest}{workers.standings[worker].report.instance_id}".encode())

    return nlargest(NUM_DRAWN, filter(is_able, workers.all), key=rank)


def _deepest(cached: Mapping[W, int], is_able: Callable[[W], bool]) -> list[W]:
    able = {worker: num for worker, num in cached.items() if is_able(worker)}
    most = max(able.values(), default=0)
    return [worker for worker, num in able.items() if num == most]
