"""From the settings of all roles to a worker's own. No torch."""

from __future__ import annotations

from loraplex.settings import Settings
from workers.process.config import WorkerConfig

DRAIN_S = 120.0
"""Where `drain_s` says nothing."""


def worker_config(
    settings: Settings, models: dict[str, str], listen: str, health: str
) -> WorkerConfig:
    """`models` maps served names to digests."""
    return WorkerConfig(
        models=models,
        store=settings.store_location,
        cache_dir=settings.home / "cache",
        listen=listen,
        security=settings.security,
        health=health,
        device=settings.device,
        ops=settings.ops or "",
        dtype=settings.dtype,
        threads=settings.threads,
        memory=settings.memory or 0,
        device_memory=settings.device_memory,
        max_model_wait_s=settings.max_model_wait_s,
        max_model_drain_s=settings.max_model_drain_s,
        adapter_memory_min=settings.adapter_memory.min,
        adapter_memory_max=settings.adapter_memory.max,
        host_adapter_memory=settings.host_adapter_memory,
        host_model_memory=settings.host_model_memory,
        adapter_cache=settings.adapter_cache,
        max_num_seqs=settings.max_num_seqs,
        max_queued=settings.max_queued,
        max_queued_tokens=settings.max_queued_tokens,
        max_queue_wait=settings.max_queue_wait,
        max_batched_tokens=settings.max_batched_tokens or 0,
        max_token_gap=settings.max_token_gap,
        max_model_len=settings.max_model_len,
        max_lora_rank=settings.max_lora_rank,
        max_loaded_adapters=settings.max_loaded_adapters,
        drain_s=DRAIN_S if settings.drain_s is None else settings.drain_s,
        log_format=settings.log_format,
    )
