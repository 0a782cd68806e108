"""What a worker is at the moment, as instruments that are read from its last status."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from types import MappingProxyType
from typing import Literal, NamedTuple

from opentelemetry.metrics import CallbackOptions, Observation

from memory.page_key import PAGE_TOKENS
from workers.telemetry import ENGINE, meter
from workers.wire.protocol import ModelStatus, WorkerStatus

EXTENTS = {"free": ".", "kv": "k", "adapters": "a", "weights": "w"}
TIERS = ("host", "device", "loading")


class Figure(NamedTuple):
    """One number of a model or of the worker, with the labels that tell several apart."""

    value: float
    labels: Mapping[str, str] = MappingProxyType({})


Read = Callable[[ModelStatus], Iterable[Figure]]
ReadWorker = Callable[[WorkerStatus], Iterable[Figure]]
Kind = Literal["gauge", "counter"]


class OfModel(NamedTuple):
    """An instrument, and how it is read from the status of each model."""

    kind: Kind
    name: str
    description: str
    read: Read


class OfWorker(NamedTuple):
    """The same of the worker."""

    kind: Kind
    name: str
    description: str
    read: ReadWorker


def show(status: Callable[[], WorkerStatus | None]) -> None:
    """Makes the instruments; once a process. `status`: the last, None before there is one."""
    for kind, name, description, read in OF_MODELS:
        _make(kind, name, description, partial(_observe_models, status, read))
    for kind, name, description, read in OF_WORKER:
        _make(kind, name, description, partial(_observe_worker, status, read))


def _make(
    kind: Kind,
    name: str,
    description: str,
    callback: Callable[[CallbackOptions], Iterable[Observation]],
) -> None:
    if kind == "counter":
        meter.create_observable_counter(name, [callback], description=description)
    else:
        meter.create_observable_gauge(name, [callback], description=description)


def _observe_models(
    status: Callable[[], WorkerStatus | None], read: Read, _: CallbackOptions
) -> Iterator[Observation]:
    now = status()
    for model in [] if now is None else now.models:
        for figure in read(model):
            labels = {"model_name": model.name, "engine": ENGINE}
            yield Observation(figure.value, {**labels, **figure.labels})


def _observe_worker(
    status: Callable[[], WorkerStatus | None], read: ReadWorker, _: CallbackOptions
) -> Iterator[Observation]:
    if (now := status()) is not None:
        yield from (Observation(figure.value, dict(figure.labels)) for figure in read(now))


def _cache_usage(model: ModelStatus) -> list[Figure]:
    used = model.pages_total - model.pages_free - model.pages_cached
    return [Figure(used / max(model.pages_total, 1))]


def _prefix_queries(model: ModelStatus) -> list[Figure]:
    return [Figure(model.prefix_queried_tokens)]


def _prefix_hits(model: ModelStatus) -> list[Figure]:
    return [Figure(model.prefix_hit_tokens)]


def _cache_config(model: ModelStatus) -> list[Figure]:
    labels = {"block_size": str(PAGE_TOKENS), "num_gpu_blocks": str(model.pages_total)}
    return [Figure(1, labels)]


def _by_tier(values: dict[str, int] | dict[str, float]) -> list[Figure]:
    return [Figure(value, {"tier": tier}) for tier, value in values.items()]


OF_MODELS: tuple[OfModel, ...] = (
    OfModel(
        "gauge",
        "vllm.num_requests_running",
        "Sequences that run.",
        lambda model: [Figure(model.num_running)],
    ),
    OfModel(
        "gauge",
        "vllm.num_requests_waiting",
        "Sequences that wait for their first step.",
        lambda model: [Figure(model.num_waiting)],
    ),
    OfModel(
        "gauge",
        "vllm.kv_cache_usage_perc",
        "Pages in use, of 1; kept ones are free.",
        _cache_usage,
    ),
    OfModel(
        "gauge",
        "vllm.gpu_cache_usage_perc",
        "Older name of vllm:kv_cache_usage_perc.",
        _cache_usage,
    ),
    OfModel(
        "gauge",
        "vllm.cache_config_info",
        "Always 1: pages of the KV cache in its labels.",
        _cache_config,
    ),
    OfModel(
        "counter",
        "vllm.num_preemptions",
        "Sequences put back to waiting for lack of room.",
        lambda model: [Figure(model.num_preemptions)],
    ),
    OfModel(
        "counter",
        "vllm.prefix_cache_queries",
        "Tokens looked for in the prefix cache.",
        _prefix_queries,
    ),
    OfModel(
        "counter",
        "vllm.prefix_cache_hits",
        "Tokens found in the prefix cache.",
        _prefix_hits,
    ),
    OfModel(
        "counter",
        "vllm.gpu_prefix_cache_queries",
        "Older name of prefix_cache_queries.",
        _prefix_queries,
    ),
    OfModel(
        "counter",
        "vllm.gpu_prefix_cache_hits",
        "Older name of prefix_cache_hits.",
        _prefix_hits,
    ),
    OfModel(
        "gauge",
        "loraplex_waiting_tokens",
        "Prompt tokens that are neither computed nor kept.",
        lambda model: [Figure(model.num_waiting_tokens)],
    ),
    OfModel(
        "counter",
        "loraplex_adapter_loads",
        "Adapters that came to a tier, by `tier`.",
        lambda model: _by_tier(model.adapter_loads),
    ),
    OfModel(
        "counter",
        "loraplex_adapter_load_seconds",
        "Time that loads to a `tier` took together.",
        lambda model: _by_tier(model.adapter_load_s),
    ),
    OfModel(
        "counter",
        "loraplex_adapter_load_failures",
        "Loads of adapters that failed.",
        lambda model: [Figure(model.num_failed_adapter_loads)],
    ),
    OfModel(
        "counter",
        "loraplex_adapter_evictions",
        "Adapters taken off the device for others.",
        lambda model: [Figure(model.num_adapter_evictions)],
    ),
    OfModel(
        "counter",
        "loraplex_integrity_failures",
        "Failed checks of the memory's accounting.",
        lambda model: [Figure(model.num_integrity_failures)],
    ),
    OfModel(
        "gauge",
        "loraplex_model_on_device",
        "1 where the weights are on the device.",
        lambda model: [Figure(int(model.tier in ("device", "draining")))],
    ),
    OfModel(
        "counter",
        "loraplex_model_swaps",
        "How often the weights came to the device.",
        lambda model: [Figure(model.num_swaps)],
    ),
    OfModel(
        "gauge",
        "loraplex_model_load_seconds",
        "How long the weights took to the device, the last time.",
        lambda model: [Figure(model.load_s)],
    ),
    OfModel(
        "gauge",
        "loraplex_model_weight_bytes",
        "Bytes of the weights.",
        lambda model: [Figure(model.num_bytes)],
    ),
)


def _lora_requests(status: WorkerStatus) -> list[Figure]:
    """As vLLM has it: the value is the time, what is told stands in the labels."""
    leased = ", ".join(a.digest[:12] for a in status.adapters if a.leases)
    loading = ", ".join(a.digest[:12] for a in status.adapters if a.tier == "loading")
    labels = {
        "max_lora": status.settings.get("max_loaded_adapters", ""),
        "running_lora_adapters": leased,
        "waiting_lora_adapters": loading,
    }
    return [Figure(time.time(), labels)]


def _adapters(status: WorkerStatus) -> list[Figure]:
    return [Figure(sum(a.tier == tier for a in status.adapters), {"tier": tier}) for tier in TIERS]


def _adapter_bytes(status: WorkerStatus) -> list[Figure]:
    return [
        Figure(sum(a.num_bytes for a in status.adapters if a.tier == tier), {"tier": tier})
        for tier in TIERS
    ]


OF_WORKER: tuple[OfWorker, ...] = (
    OfWorker(
        "gauge",
        "vllm.lora_requests_info",
        "When it was read; adapters in its labels.",
        _lora_requests,
    ),
    OfWorker(
        "gauge",
        "loraplex_adapters",
        "Adapters by the nearest `tier` that has them.",
        _adapters,
    ),
    OfWorker(
        "gauge",
        "loraplex_adapter_bytes",
        "Bytes of adapters by their nearest `tier`.",
        _adapter_bytes,
    ),
    OfWorker(
        "gauge",
        "loraplex_adapter_leases",
        "Sequences that hold an adapter on the device.",
        lambda status: [Figure(sum(a.leases for a in status.adapters))],
    ),
    OfWorker(
        "counter",
        "loraplex_steps",
        "Steps that have ended.",
        lambda status: [Figure(status.step)],
    ),
    OfWorker(
        "counter",
        "loraplex_late_kernels",
        "Kernels compiled after the worker was ready.",
        lambda status: [Figure(status.num_late_kernels)],
    ),
    OfWorker(
        "gauge",
        "loraplex_tokens_per_second",
        "Tokens generated a second, of late.",
        lambda status: [Figure(status.tokens_per_s)],
    ),
    OfWorker(
        "gauge",
        "loraplex_arena_extents",
        "Parts of the device's memory, by `kind` of use.",
        lambda status: [Figure(status.extents.count(m), {"kind": k}) for k, m in EXTENTS.items()],
    ),
    OfWorker(
        "gauge",
        "loraplex_arena_bytes",
        "The device's memory in all.",
        lambda status: [Figure(status.arena_bytes)],
    ),
    OfWorker(
        "gauge",
        "loraplex_worker_draining",
        "1 while it takes no new requests.",
        lambda status: [Figure(int(status.draining))],
    ),
)
