"""Metrics of a worker's current state, read from its last status."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from typing import Generic, NamedTuple, TypeVar

from memory.page_key import PAGE_TOKENS
from telemetry.engine_metrics import ENGINE
from telemetry.tallies import Figures, ReadCounter
from telemetry.tallies import Gauge as ReadGauge
from workers.wire.status import ModelStatus, WorkerStatus

EXTENTS = {"free": ".", "kv": "k", "adapters": "a", "weights": "w"}
TIERS = ("host", "device", "loading")

Find = Callable[[], WorkerStatus | None]
"""Function that returns the worker's last status, or None before the first one."""
T = TypeVar("T")


class Gauge(NamedTuple, Generic[T]):
    """Instrument, with the function that reads its value from the status of a model or worker."""

    name: str
    description: str
    read: Callable[[T], float | Figures]


class Counter(Gauge[T]):
    """Instrument whose value only grows."""


def show(find: Find) -> None:
    """Shows the metrics of the status that `find` returns. Called once per process."""
    for instrument in OF_MODELS:
        _show(instrument, partial(_figures, find, _models, instrument))
    for instrument in OF_WORKER:
        _show(instrument, partial(_figures, find, lambda status: [(status, {})], instrument))


def _show(instrument: Gauge[T], read: Callable[[], Figures]) -> None:
    kind = ReadCounter if isinstance(instrument, Counter) else ReadGauge
    kind(instrument.name, instrument.description, read)


def _figures(
    find: Find,
    parts: Callable[[WorkerStatus], Iterable[tuple[T, dict[str, str]]]],
    instrument: Gauge[T],
) -> Figures:
    """Yields the instrument's values. parts: function that returns the parts of a status that the
    instrument reads, each with its labels."""
    status = find()
    for part, labels in [] if status is None else parts(status):
        figures = instrument.read(part)
        for value, more in [(figures, {})] if isinstance(figures, int | float) else figures:
            yield value, {**labels, **more}


def _models(status: WorkerStatus) -> Iterator[tuple[ModelStatus, dict[str, str]]]:
    for model in status.models:
        yield model, {"model_name": model.name, "engine": ENGINE}


def _cache_usage(model: ModelStatus) -> float:
    used = model.pages_total - model.pages_free - model.pages_cached
    return used / max(model.pages_total, 1)


def _cache_config(model: ModelStatus) -> Figures:
    return [(1, {"block_size": str(PAGE_TOKENS), "num_gpu_blocks": str(model.pages_total)})]


def _by_tier(values: Mapping[str, float]) -> Figures:
    return [(value, {"tier": tier}) for tier, value in values.items()]


OF_MODELS: tuple[Gauge[ModelStatus], ...] = (
    Gauge("vllm:num_requests_running", "Running sequences.", lambda m: m.num_running),
    Gauge(
        "vllm:num_requests_waiting",
        "Sequences waiting for their first step.",
        lambda m: m.num_waiting,
    ),
    Gauge(
        "vllm:kv_cache_usage_perc",
        "Fraction of the KV pages in use. Cached pages count as free.",
        _cache_usage,
    ),
    Gauge("vllm:gpu_cache_usage_perc", "Older name of vllm:kv_cache_usage_perc.", _cache_usage),
    Gauge(
        "vllm:cache_config_info",
        "Always 1. The labels have the pages of the KV cache.",
        _cache_config,
    ),
    Counter(
        "vllm:num_preemptions",
        "Sequences preempted for lack of room.",
        lambda m: m.num_preemptions,
    ),
    Counter(
        "vllm:prefix_cache_queries",
        "Tokens looked up in the prefix cache.",
        lambda m: m.prefix_queried_tokens,
    ),
    Counter(
        "vllm:prefix_cache_hits", "Tokens found in the prefix cache.", lambda m: m.prefix_hit_tokens
    ),
    Counter(
        "vllm:gpu_prefix_cache_queries",
        "Older name of prefix_cache_queries.",
        lambda m: m.prefix_queried_tokens,
    ),
    Counter(
        "vllm:gpu_prefix_cache_hits",
        "Older name of prefix_cache_hits.",
        lambda m: m.prefix_hit_tokens,
    ),
    Gauge(
        "loraplex_waiting_tokens",
        "Prompt tokens that are neither computed nor cached.",
        lambda m: m.num_waiting_tokens,
    ),
    Counter(
        "loraplex_adapter_loads",
        "Adapters loaded into a tier, by `tier`.",
        lambda m: _by_tier(m.adapter_loads),
    ),
    Counter(
        "loraplex_adapter_load_seconds",
        "Sum of the times of loads to a `tier`.",
        lambda m: _by_tier(m.adapter_load_s),
    ),
    Counter(
        "loraplex_adapter_load_failures",
        "Loads of adapters that failed.",
        lambda m: m.num_failed_adapter_loads,
    ),
    Counter(
        "loraplex_adapter_evictions",
        "Adapters evicted from the device for others.",
        lambda m: m.num_adapter_evictions,
    ),
    Counter(
        "loraplex_integrity_failures",
        "Failed checks of the memory's accounting.",
        lambda m: m.num_integrity_failures,
    ),
    Gauge(
        "loraplex_model_on_device",
        "1 if the weights are on the device.",
        lambda m: int(m.tier in ("device", "draining")),
    ),
    Counter(
        "loraplex_model_swaps",
        "Number of times the weights were loaded on the device.",
        lambda m: m.num_swaps,
    ),
    Gauge(
        "loraplex_model_load_seconds",
        "Time of the last load of the weights.",
        lambda m: m.load_s,
    ),
    Gauge("loraplex_model_weight_bytes", "Bytes of the weights.", lambda m: m.num_bytes),
)


def _lora_requests(status: WorkerStatus) -> Figures:
    """Returns the current time as the value, and the names of adapters in the labels. The endpoint
    picker of the Gateway API inference extension splits these labels at commas, without trimming
    spaces, and searches them for the `model` of a request. An adapter on the device can serve the
    request at once, and a loading adapter soon.

    https://github.com/kubernetes-sigs/gateway-api-inference-extension, model server protocol
    """
    labels = {
        "max_lora": status.settings.get("max_loaded_adapters", ""),
        "running_lora_adapters": _names(status, "device"),
        "waiting_lora_adapters": _names(status, "loading"),
    }
    return [(time.time(), labels)]


def _names(status: WorkerStatus, tier: str) -> str:
    """Returns the names, without versions, of the adapters in the tier, separated by commas. A name
    that several tenants use is listed once."""
    names = (a.name.partition("@")[0] or a.digest[:12] for a in status.adapters if a.tier == tier)
    return ",".join(dict.fromkeys(names))


def _adapters(status: WorkerStatus) -> Figures:
    near = {tier: status.adapter_counts.get(tier, 0) for tier in TIERS}
    return _by_tier(near | {"disk": status.num_cached_adapters})


def _adapter_bytes(status: WorkerStatus) -> Figures:
    near = {tier: status.adapter_bytes.get(tier, 0) for tier in TIERS}
    return _by_tier(near | {"disk": status.cached_adapter_bytes})


def _extents(status: WorkerStatus) -> Figures:
    return [(status.extents.count(mark), {"kind": kind}) for kind, mark in EXTENTS.items()]


OF_WORKER: tuple[Gauge[WorkerStatus], ...] = (
    Gauge(
        "vllm:lora_requests_info",
        "Time of the reading. The labels have the names of adapters on the device and of those "
        "loading.",
        _lora_requests,
    ),
    Gauge(
        "loraplex_adapters",
        "Adapters by the nearest `tier` that has them. `disk` counts all images of the disk cache.",
        _adapters,
    ),
    Gauge(
        "loraplex_adapter_bytes",
        "Bytes of adapters by their nearest `tier`. `disk` is the disk cache.",
        _adapter_bytes,
    ),
    Gauge(
        "loraplex_adapter_leases",
        "Sequences that hold an adapter on the device.",
        lambda w: sum(a.leases for a in w.adapters),
    ),
    Gauge(
        "loraplex_unlisted_adapters",
        "Adapters that the worker's status leaves out, because its list has a maximum length.",
        lambda w: w.num_unlisted_adapters,
    ),
    Counter("loraplex_steps", "Steps that have ended.", lambda w: w.step),
    Counter(
        "loraplex_late_kernels",
        "Kernels compiled after the worker was ready.",
        lambda w: w.num_late_kernels,
    ),
    Gauge(
        "loraplex_tokens_per_second",
        "Tokens generated a second, recently.",
        lambda w: w.tokens_per_s,
    ),
    Gauge("loraplex_arena_extents", "Extents of the device's arena, by `kind` of use.", _extents),
    Gauge("loraplex_arena_bytes", "Total memory of the device's arena.", lambda w: w.arena_bytes),
    Gauge(
        "loraplex_worker_draining",
        "1 while the worker accepts no new requests.",
        lambda w: int(w.draining),
    ),
)
