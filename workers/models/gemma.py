"""Reads configs of Gemma 1, Gemma 2 (norms after each block, soft caps) and Gemma 3 (norm on q and
k, a second rope for sliding layers)."""

from __future__ import annotations

from typing import Any

from workers.layers.rope_spec import RopeSpec
from workers.models.rope_config import read_ropes
from workers.models.spec import LayerSpec, ModelSpec, common_fields, layer_specs, require

DEFAULTS: dict[str, Any] = {
    "head_dim": 256,
    "tie_word_embeddings": True,
    "query_pre_attn_scalar": 256,
    "sliding_window": 4096,
    "hidden_activation": "gelu_pytorch_tanh",
}
"""Defaults of fields that configs of Gemma 2 and 3 may omit."""


GEMMA3: dict[str, Any] = {
    "vocab_size": 262_208,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "max_position_embeddings": 131_072,
}
"""Defaults of fields that are not in `DEFAULTS`, and that published configs of Gemma 3 models with
image input omit."""


def read_gemma(config: dict[str, Any]) -> ModelSpec:
    """Reads a config of Gemma 1. The first releases have `hidden_act: gelu`, but use the tanh
    approximation."""
    config = {"head_dim": 256, "tie_word_embeddings": True, **config}
    require(config, "hidden_activation", "gelu_pytorch_tanh", "gelu_pytorch_tanh")
    if config.get("hidden_act") != "gelu":
        require(config, "hidden_act", "gelu_pytorch_tanh", "gelu_pytorch_tanh")
    return ModelSpec(
        **common_fields(config),
        layers=layer_specs(config, read_ropes(config, 10_000.0)),
        activation="gelu_tanh",
        embed_scale=config["hidden_size"] ** 0.5,
        norm_offset=1.0,
    )


def read_gemma2(config: dict[str, Any]) -> ModelSpec:
    """Reads a config of Gemma 2, whose layers alternate between sliding and full attention. The
    first layer has sliding attention."""
    softcaps = {"attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0}
    config = DEFAULTS | softcaps | config
    return ModelSpec(
        **_fields(config),
        layers=_layers(config, read_ropes(config, 10_000.0), 2),
        attention_softcap=config["attn_logit_softcapping"],
    )


def read_gemma3_text(config: dict[str, Any]) -> ModelSpec:
    """Reads a config of Gemma 3. Every sixth layer has full attention, unless the config has
    another pattern."""
    config = DEFAULTS | GEMMA3 | config
    require(config, "attn_logit_softcapping", None, None)
    period = config.get("sliding_window_pattern") or config.get("_sliding_window_pattern") or 6
    ropes = read_ropes(config, 1_000_000.0, local_theta=10_000.0)
    return ModelSpec(
        **_fields(config),
        layers=_layers(config, ropes, period),
        qk_norm=True,
    )


def _fields(config: dict[str, Any]) -> dict[str, Any]:
    require(config, "hidden_activation", "gelu_pytorch_tanh", None)
    return common_fields(config) | {
        "activation": "gelu_tanh",
        "attention_scale": config["query_pre_attn_scalar"] ** -0.5,
        "embed_scale": config["hidden_size"] ** 0.5,
        "logits_softcap": config.get("final_logit_softcapping"),
        "norm_offset": 1.0,
        "post_norms": True,
    }


def _layers(
    config: dict[str, Any], ropes: dict[str, RopeSpec], period: int
) -> tuple[LayerSpec, ...]:
    """Returns the layers. Every `period`-th layer has full attention, and all others have a sliding
    window."""
    window = config["sliding_window"]
    return layer_specs(config, ropes, window, lambda layer: (layer + 1) % period > 0)
