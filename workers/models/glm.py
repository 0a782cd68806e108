"""Reads configs of GLM-4, which rotates half of each head, in pairs of neighbouring dimensions (see
`adapters.family_layout`). The releases of 2025 (`glm4`) also have norms after attention and MLP."""

from __future__ import annotations

from typing import Any

from workers.models.rope_config import partial_rotary, read_ropes, rotated
from workers.models.spec import ModelSpec, common_fields, layer_specs, require


def read_glm(config: dict[str, Any]) -> ModelSpec:
    require(config, "hidden_act", "silu", "silu")
    own = ("attention_bias", "partial_rotary_factor", "rope_parameters", "rope_scaling")
    fields = common_fields({"head_dim": 128, **config}, *own)
    head_dim = fields["head_dim"]
    ropes = rotated(read_ropes(config, 10_000.0), partial_rotary(config, head_dim, 0.5), head_dim)
    return ModelSpec(
        **fields,
        layers=layer_specs(config, ropes),
        qkv_bias=bool(config.get("attention_bias", True)),
        post_norms=config["model_type"] == "glm4",
    )
