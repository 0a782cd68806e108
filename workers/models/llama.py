"""Llama and those that only differ from it in attention span: Llama 2 and 3, SmolLM2, Mistral."""

from __future__ import annotations

from typing import Any

from workers.models.rope_config import read_ropes
from workers.models.spec import ModelSpec, common_fields, layer_specs, positive, require


def read_llama(config: dict[str, Any]) -> ModelSpec:
    require(config, "hidden_act", "silu", "silu")
    pattern = ["full_attention"] * positive(config, "num_hidden_layers")
    layers = layer_specs(config, read_ropes(config, 10_000.0), pattern, None)
    return ModelSpec(**common_fields(config), layers=layers)


def read_mistral(config: dict[str, Any]) -> ModelSpec:
    """Every layer slides, unless `sliding_window` is null; the family's default is 4,096."""
    require(config, "hidden_act", "silu", "silu")
    window = config.get("sliding_window", 4096)
    kind = "full_attention" if window is None else "sliding_attention"
    pattern = [kind] * positive(config, "num_hidden_layers")
    layers = layer_specs(config, read_ropes(config, 10_000.0), pattern, window)
    return ModelSpec(**common_fields(config), layers=layers)
