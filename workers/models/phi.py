"""Reads configs of Phi 3, 3.5 and 4 (Phi-4 and Phi-4-mini). These models may rotate only a part of
each head and use LongRoPE, and their checkpoints store fused projections (see
`adapters.family_layout`)."""

from __future__ import annotations

from typing import Any

from workers.models.rope_config import partial_rotary, read_ropes, rotated
from workers.models.spec import ModelSpec, common_fields, layer_specs, require


def read_phi3(config: dict[str, Any]) -> ModelSpec:
    config = {"rms_norm_eps": 1e-5, "original_max_position_embeddings": 4096, **config}
    require(config, "hidden_act", "silu", "silu")
    own = ("partial_rotary_factor", "rope_parameters", "rope_scaling")
    fields = common_fields(config, *own)
    head_dim = fields["head_dim"]
    ropes = rotated(read_ropes(config, 10_000.0), partial_rotary(config, head_dim), head_dim)
    return ModelSpec(**fields, layers=layer_specs(config, ropes, config.get("sliding_window")))
