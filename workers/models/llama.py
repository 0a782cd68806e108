"""Reads configs of Llama and similar families: Llama 2 and 3, SmolLM2 and 3, Mistral, Granite."""

from __future__ import annotations

from typing import Any

from workers.layers.rope_spec import RopeSpec
from workers.models.rope_config import read_ropes
from workers.models.spec import (
    MAX_LAYERS,
    LayerSpec,
    ModelSpec,
    UnsupportedModel,
    common_fields,
    layer_specs,
    positive,
    require,
)


def read_llama(config: dict[str, Any]) -> ModelSpec:
    require(config, "hidden_act", "silu", "silu")
    layers = layer_specs(config, read_ropes(config, 10_000.0))
    return ModelSpec(**common_fields(config), layers=layers)


def read_mistral(config: dict[str, Any]) -> ModelSpec:
    """Reads a config of Mistral. Every layer has a sliding window (4,096 by default), unless
    `sliding_window` is null."""
    require(config, "hidden_act", "silu", "silu")
    window = config.get("sliding_window", 4096)
    layers = layer_specs(config, read_ropes(config, 10_000.0), window)
    return ModelSpec(**common_fields(config), layers=layers)


def read_smollm3(config: dict[str, Any]) -> ModelSpec:
    """Reads a config of SmolLM3. Layers with 0 in `no_rope_layers` have no rope. If the field is
    missing, every `no_rope_layer_interval`-th layer has no rope (by default, every fourth)."""
    config = {"tie_word_embeddings": True, **config}
    require(config, "hidden_act", "silu", "silu")
    num_layers = min(positive(config, "num_hidden_layers"), MAX_LAYERS + 1)
    interval = config.get("no_rope_layer_interval") or 4
    has_rope = config.get("no_rope_layers") or [
        (layer + 1) % interval != 0 for layer in range(num_layers)
    ]
    if len(has_rope) < num_layers:
        raise UnsupportedModel("no_rope_layers", has_rope, "one entry a layer")
    window = config.get("sliding_window") if config.get("use_sliding_window") else None
    ropes = read_ropes(config, 2_000_000.0)
    has_window = [window is not None and not rope for rope in has_rope]
    layers = layer_specs(config, ropes, window, has_window.__getitem__)
    none = RopeSpec(1.0, "none")
    return ModelSpec(
        **common_fields(config),
        layers=tuple(
            layer if rope else LayerSpec(none, layer.window)
            for layer, rope in zip(layers, has_rope, strict=False)
        ),
    )


def read_granite(config: dict[str, Any]) -> ModelSpec:
    """Reads a config of Granite 3, which multiplies each block's output by `residual_multiplier`
    before adding it to the residual stream. Our decoder instead computes a residual stream that is
    divided by the multiplier. Norms undo the division, because their epsilon is divided by the
    square of the multiplier."""
    require(config, "hidden_act", "silu", "silu")
    residual = _multiplier(config, "residual_multiplier")
    fields = common_fields(config)
    return ModelSpec(
        **fields
        | {
            "attention_scale": _multiplier(config, "attention_multiplier"),
            "embed_scale": _multiplier(config, "embedding_multiplier") / residual,
            "logits_scale": 1 / _multiplier(config, "logits_scaling"),
            "rms_norm_eps": fields["rms_norm_eps"] / residual**2,
        },
        layers=layer_specs(config, read_ropes(config, 10_000.0)),
    )


def _multiplier(config: dict[str, Any], field: str) -> float:
    value = config.get(field, 1.0)
    if not isinstance(value, int | float) or value <= 0:
        raise UnsupportedModel(field, value, "a number above zero")
    return float(value)
