"""Metrics of a worker's current state, read from its last status."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from typing import Generic, NamedTuple, TypeVar

from opentelemetry.metrics import CallbackOptions, Observation

from memory.page_key import PAGE_TOKENS
from telemetry.engine_metrics import ENGINE, meter
from workers.wire.protocol import ModelStatus, WorkerStatus

EXTENTS = {"free": ".", "kv": "k", "adapters": "a", "weights": "w"}
TIERS = ("host", "device", "loading")

Figures = Iterable[tuple[float, Mapping[str, str]]]
"""Several values, with the labels that distinguish them."""
Find = Callable[[], WorkerStatus | None]
"""Function that returns the worker's last status, or None before the first one."""
T = TypeVar("T")


class Gauge(NamedTuple, Generic[T]):
    """Instrument, with the function that reads it from the status of a model or of the worker."""

    name: str
    description: str
    read: Callable[[T], float | Figures]


class Counter(Gauge[T]):
    """Instrument that only grows."""


def show(find: Find) -> None:
    """Creates the instruments. Called once per process."""
    for instrument in OF_MODELS:
        _make(instrument, partial(_observe_models, find, instrument))
    for instrument in OF_WORKER:
        _make(instrument, partial(_observe_worker, find, instrument))


def _make(
    instrument: Gauge[T], callback: Callable[[CallbackOptions], Iterable[Observation]]
) -> None:
    is_counter = isinstance(instrument, Counter)
    make = meter.create_observable_counter if is_counter else meter.create_observable_gauge
    name = instrument.name
    unit = "s" if name.endswith("_seconds") else "By" if name.endswith("_bytes") else ""
    make(name, [callback], unit, instrument.description)


def _observe_models(
    find: Find, instrument: Gauge[ModelStatus], _: CallbackOptions
) -> Iterator[Observation]:
    status = find()
    for model in [] if status is None else status.models:
        labels = {"model_name": model.name, "engine": ENGINE}
        yield from _observations(instrument.read(model), labels)


def _observe_worker(
    find: Find, instrument: Gauge[WorkerStatus], _: CallbackOptions
) -> Iterator[Observation]:
    if (status := find()) is not None:
        yield from _observations(instrument.read(status), {})


def _observations(figures: float | Figures, labels: dict[str, str]) -> Iterator[Observation]:
    for value, more in [(figures, {})] if isinstance(figures, int | float) else figures:
        yield Observation(value, {**labels, **more})


def _cache_usage(model: ModelStatus) -> float:
    used = model.pages_total - model.pages_free - model.pages_cached
    return used / max(model.pages_total, 1)


def _cache_config(model: ModelStatus) -> Figures:
    return [(1, {"block_size": str(PAGE_TOKENS), "num_gpu_blocks": str(model.pages_total)})]


def _by_tier(values: Mapping[str, float]) -> Figures:
    return [(value, {"tier": tier}) for tier, value in values.items()]


OF_MODELS: tuple[Gauge[ModelStatus], ...] = (
    Gauge("vllm.num_requests_running", "Sequences that run.", lambda m: m.num_running),
    Gauge(
        "vllm.num_requests_waiting",
        "Sequences that wait for their first step.",
        lambda m: m.num_waiting,
    ),
    Gauge("vllm.kv_cache_usage_perc", "Pages in use, of 1; kept ones are free.", _cache_usage),
    Gauge("vllm.gpu_cache_usage_perc", "Older name of vllm:kv_cache_usage_perc.", _cache_usage),
    Gauge(
        "vllm.cache_config_info", "Always 1: pages of the KV cache in its labels.", _cache_config
    ),
    Counter(
        "vllm.num_preemptions",
        "Sequences put back to waiting for lack of room.",
        lambda m: m.num_preemptions,
    ),
    Counter(
        "vllm.prefix_cache_queries",
        "Tokens looked for in the prefix cache.",
        lambda m: m.prefix_queried_tokens,
    ),
    Counter(
        "vllm.prefix_cache_hits", "Tokens found in the prefix cache.", lambda m: m.prefix_hit_tokens
    ),
    Counter(
        "vllm.gpu_prefix_cache_queries",
        "Older name of prefix_cache_queries.",
        lambda m: m.prefix_queried_tokens,
    ),
    Counter(
        "vllm.gpu_prefix_cache_hits",
        "Older name of prefix_cache_hits.",
        lambda m: m.prefix_hit_tokens,
    ),
    Gauge(
        "loraplex_waiting_tokens",
        "Prompt tokens that are neither computed nor kept.",
        lambda m: m.num_waiting_tokens,
    ),
    Counter(
        "loraplex_adapter_loads",
        "Adapters that came to a tier, by `tier`.",
        lambda m: _by_tier(m.adapter_loads),
    ),
    Counter(
        "loraplex_adapter_load_seconds",
        "Time that loads to a `tier` took together.",
        lambda m: _by_tier(m.adapter_load_s),
    ),
    Counter(
        "loraplex_adapter_load_failures",
        "Loads of adapters that failed.",
        lambda m: m.num_failed_adapter_loads,
    ),
    Counter(
        "loraplex_adapter_evictions",
        "Adapters taken off the device for others.",
        lambda m: m.num_adapter_evictions,
    ),
    Counter(
        "loraplex_integrity_failures",
        "Failed checks of the memory's accounting.",
        lambda m: m.num_integrity_failures,
    ),
    Gauge(
        "loraplex_model_on_device",
        "1 where the weights are on the device.",
        lambda m: int(m.tier in ("device", "draining")),
    ),
    Counter(
        "loraplex_model_swaps", "How often the weights came to the device.", lambda m: m.num_swaps
    ),
    Gauge(
        "loraplex_model_load_seconds",
        "How long the weights took to the device, the last time.",
        lambda m: m.load_s,
    ),
    Gauge("loraplex_model_weight_bytes", "Bytes of the weights.", lambda m: m.num_bytes),
)


def _lora_requests(status: WorkerStatus) -> Figures:
    """Returns the time as the value, with the data in the labels. An endpoint picker searches for a
    request's `model` among the names, which it splits at commas alone: adapters on the device serve
    at once, loading ones soon.

    https://github.com/kubernetes-sigs/gateway-api-inference-extension, model server protocol
    """
    labels = {
        "max_lora": status.settings.get("max_loaded_adapters", ""),
        "running_lora_adapters": _names(status, "device"),
        "waiting_lora_adapters": _names(status, "loading"),
    }
    return [(time.time(), labels)]


def _names(status: WorkerStatus, tier: str) -> str:
    """Returns the tier's adapter names without versions, each once (tenants may share a name)."""
    names = (a.name.partition("@")[0] or a.digest[:12] for a in status.adapters if a.tier == tier)
    return ",".join(dict.fromkeys(names))


def _adapters(status: WorkerStatus) -> Figures:
    near = {tier: sum(a.tier == tier for a in status.adapters) for tier in TIERS}
    return _by_tier(near | {"disk": status.num_cached_adapters})


def _adapter_bytes(status: WorkerStatus) -> Figures:
    near = {tier: sum(a.num_bytes for a in status.adapters if a.tier == tier) for tier in TIERS}
    return _by_tier(near | {"disk": status.cached_adapter_bytes})


def _extents(status: WorkerStatus) -> Figures:
    return [(status.extents.count(mark), {"kind": kind}) for kind, mark in EXTENTS.items()]


OF_WORKER: tuple[Gauge[WorkerStatus], ...] = (
    Gauge(
        "vllm.lora_requests_info",
        "When it was read; names of adapters on the device and of those loading in its labels.",
        _lora_requests,
    ),
    Gauge(
        "loraplex_adapters",
        "Adapters by the nearest `tier` that has them; `disk`: all images of the disk cache.",
        _adapters,
    ),
    Gauge(
        "loraplex_adapter_bytes",
        "Bytes of adapters by their nearest `tier`; `disk`: of the disk cache.",
        _adapter_bytes,
    ),
    Gauge(
        "loraplex_adapter_leases",
        "Sequences that hold an adapter on the device.",
        lambda w: sum(a.leases for a in w.adapters),
    ),
    Counter("loraplex_steps", "Steps that have ended.", lambda w: w.step),
    Counter(
        "loraplex_late_kernels",
        "Kernels compiled after the worker was ready.",
        lambda w: w.num_late_kernels,
    ),
    Gauge(
        "loraplex_tokens_per_second",
        "Tokens generated a second, of late.",
        lambda w: w.tokens_per_s,
    ),
    Gauge("loraplex_arena_extents", "Parts of the device's memory, by `kind` of use.", _extents),
    Gauge("loraplex_arena_bytes", "The device's memory in all.", lambda w: w.arena_bytes),
    Gauge(
        "loraplex_worker_draining", "1 while it takes no new requests.", lambda w: int(w.draining)
    ),
)
