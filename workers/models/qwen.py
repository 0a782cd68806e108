"""Reads configs of Qwen 2 and 2.5 (bias on q, k and v) and Qwen 3 (norm on q and k)."""

from __future__ import annotations

from typing import Any

from workers.models.rope_config import read_ropes
from workers.models.spec import LayerSpec, ModelSpec, common_fields, layer_specs, require


def read_qwen2(config: dict[str, Any]) -> ModelSpec:
    return ModelSpec(**common_fields(config), layers=_layers(config), qkv_bias=True)


def read_qwen3(config: dict[str, Any]) -> ModelSpec:
    fields = common_fields({"head_dim": 128, **config})
    return ModelSpec(**fields, layers=_layers(config), qk_norm=True)


def _layers(config: dict[str, Any]) -> tuple[LayerSpec, ...]:
    """Returns the layers. If `use_sliding_window` is set and the config has no `layer_types`, the
    first `max_window_layers` layers have full attention, and all others have a sliding window."""
    require(config, "hidden_act", "silu", "silu")
    window = config.get("sliding_window") if config.get("use_sliding_window") else None
    first_sliding = config.get("max_window_layers", 28)
    ropes = read_ropes(config, 10_000.0)
    has_window = (lambda layer: layer >= first_sliding) if window is not None else None
    return layer_specs(config, ropes, window, has_window)
