"""Derives a worker's configuration from the settings of all roles. Does not import torch."""

from __future__ import annotations

from loraplex.settings import Settings
from workers.process.config import WorkerConfig

DRAIN_S = 120.0
"""Default of `drain_s`, in seconds."""


def worker_config(
    settings: Settings, models: dict[str, str], listen: str, health: str
) -> WorkerConfig:
    """Returns a worker's configuration. `models` maps served names to digests. Settings that have
    the same name in the worker's configuration are copied."""
    values = settings.common_with(WorkerConfig) | {
        "models": models,
        "store": settings.store_location,
        "cache_dir": settings.home / "cache",
        "listen": listen,
        "security": settings.security,
        "health": health,
        "log_format": settings.log_format or "text",
        "ops": settings.ops or "",
        "kernel_variant": settings.kernel_variant or "",
        "memory": settings.memory or 0,
        "adapter_memory_min": settings.adapter_memory.min,
        "adapter_memory_max": settings.adapter_memory.max,
        "max_batched_tokens": settings.max_batched_tokens or 0,
        "drain_s": DRAIN_S if settings.drain_s is None else settings.drain_s,
    }
    return WorkerConfig(**values)
