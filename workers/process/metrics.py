"""A worker's state as Prometheus text, under the names that vLLM's dashboards and the Kubernetes
inference gateways read."""

from __future__ import annotations

import time

from workers.wire.protocol import ModelStatus, WorkerStatus


def render_metrics(status: WorkerStatus | None) -> bytes:
    """Prometheus text format; empty before the first status."""
    if status is None:
        return b""
    lines: list[str] = []
    for model in status.models:
        lines += _model_lines(model)
    leased = ", ".join(a.digest[:12] for a in status.adapters if a.leases)
    loading = ", ".join(a.digest[:12] for a in status.adapters if a.tier == "loading")
    labels = f'max_lora="{status.settings.get("max_loaded_adapters", "")}"'
    labels += f',running_lora_adapters="{leased}",waiting_lora_adapters="{loading}"'
    lines.append(f"vllm:lora_requests_info{{{labels}}} {time.time()}")
    lines.append(f"loraplex_adapter_leases {sum(a.leases for a in status.adapters)}")
    lines.append(f"loraplex_steps_total {status.step}")
    lines.append(f"loraplex_tokens_per_second {status.tokens_per_s}")
    lines += [
        f'loraplex_arena_extents{{kind="{kind}"}} {status.extents.count(mark)}'
        for kind, mark in (("free", "."), ("kv", "k"), ("adapters", "a"), ("weights", "w"))
    ]
    return ("\n".join(lines) + "\n").encode()


def _model_lines(model: ModelStatus) -> list[str]:
    used = model.pages_total - model.pages_free - model.pages_cached
    values = {
        "vllm:num_requests_running": model.num_running,
        "vllm:num_requests_waiting": model.num_waiting,
        "vllm:kv_cache_usage_perc": used / max(model.pages_total, 1),
        "vllm:num_preemptions_total": model.num_preemptions,
        "vllm:prefix_cache_queries_total": model.prefix_queried_tokens,
        "vllm:prefix_cache_hits_total": model.prefix_hit_tokens,
        "loraplex_adapter_evictions_total": model.num_adapter_evictions,
        "loraplex_integrity_failures_total": model.num_integrity_failures,
        "loraplex_model_on_device": int(model.tier in ("device", "draining")),
        "loraplex_model_swaps_total": model.num_swaps,
        "loraplex_model_load_seconds": model.load_s,
        "loraplex_model_weight_bytes": model.num_bytes,
    }
    return [f'{name}{{model_name="{model.name}"}} {value}' for name, value in values.items()]
