"""Reads configs of OLMo 2 and 3. These models have norms only after each block. They normalise q
over all its heads together, and k over all its heads together."""

from __future__ import annotations

from typing import Any

from workers.models.rope_config import read_ropes
from workers.models.spec import ModelSpec, common_fields, layer_specs, require


def read_olmo2(config: dict[str, Any]) -> ModelSpec:
    layers = layer_specs(config, read_ropes(config, 10_000.0))
    return ModelSpec(**_fields(config), layers=layers)


def read_olmo3(config: dict[str, Any]) -> ModelSpec:
    """Reads a config of OLMo 3. Every fourth layer has full attention. Only the rotary frequencies
    of these layers are scaled."""
    config = {"sliding_window": 4096, **config}
    ropes = read_ropes(config, 500_000.0, local_theta=500_000.0)
    layers = layer_specs(config, ropes, config["sliding_window"], lambda layer: (layer + 1) % 4 > 0)
    return ModelSpec(**_fields(config), layers=layers)


def _fields(config: dict[str, Any]) -> dict[str, Any]:
    require(config, "hidden_act", "silu", "silu")
    fields = common_fields({"rms_norm_eps": 1e-5, **config})
    return fields | {"pre_norms": False, "post_norms": True, "wide_qk_norm": True}
