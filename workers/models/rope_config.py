"""Reads rotary parameters from config.json, in the form of transformers 5 or of older versions."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

from workers.layers.rope_spec import RopeSpec
from workers.models.spec import UnsupportedModel, require


def read_ropes(
    config: dict[str, Any], default_theta: float, local_theta: float | None = None
) -> dict[str, RopeSpec]:
    """Returns the rotary parameters of each layer type (`full_attention` and `sliding_attention`).

    In transformers 5, the field `rope_parameters` has one set of parameters for all layers, or one
    set for each layer type. In older versions, the fields are `rope_theta` and `rope_scaling`.

    default_theta: base frequency if the config has none. local_theta: base frequency of sliding
    layers, for families whose sliding layers have their own. Unless the config has one set for each
    layer type, the rotary frequencies of these sliding layers are not scaled, and the field
    `rope_local_base_freq` overrides `local_theta`.
    """
    default_theta = config.get("rope_theta", default_theta)
    parameters = config.get("rope_parameters")
    if parameters and "full_attention" in parameters:
        full = parameters["full_attention"]
        sliding = parameters.get("sliding_attention") or full
        return {
            "full_attention": _read_rope(full, default_theta, config),
            "sliding_attention": _read_rope(sliding, local_theta or default_theta, config),
        }
    if not parameters:
        parameters = config.get("rope_scaling") or {}
    full = _read_rope(parameters, default_theta, config)
    if local_theta is None:
        return {"full_attention": full, "sliding_attention": full}
    local = RopeSpec(config.get("rope_local_base_freq", local_theta))
    return {"full_attention": full, "sliding_attention": local}


def partial_rotary(config: dict[str, Any], head_dim: int, default: float = 1.0) -> int:
    """Returns the number of dimensions of a head that are rotated, for families that rotate only a
    part of each head."""
    parameters = config.get("rope_parameters") or config.get("rope_scaling") or {}
    factor = parameters.get("partial_rotary_factor", config.get("partial_rotary_factor", default))
    if not isinstance(factor, int | float) or not 0 < factor <= 1:
        raise UnsupportedModel("partial_rotary_factor", factor, "above 0, at most 1")
    if (rotary_dim := int(head_dim * factor)) % 2:
        raise UnsupportedModel("partial_rotary_factor", factor, "an even number of each head")
    return rotary_dim


def rotated(ropes: dict[str, RopeSpec], rotary_dim: int, head_dim: int) -> dict[str, RopeSpec]:
    """Returns a copy of the ropes that rotates only the first `rotary_dim` dimensions of a head."""
    return {
        kind: replace(rope, rotary_dim=0 if rotary_dim == head_dim else rotary_dim)
        for kind, rope in ropes.items()
    }


def _read_rope(
    parameters: dict[str, Any], default_theta: float, config: dict[str, Any]
) -> RopeSpec:
    theta = float(parameters.get("rope_theta", default_theta))
    match parameters.get("rope_type") or parameters.get("type") or "default":
        case "default":
            return RopeSpec(theta)
        case "linear":
            return RopeSpec(theta, "linear", _number(parameters, "factor"))
        case "llama3":
            return RopeSpec(
                theta,
                "llama3",
                _number(parameters, "factor"),
                _number(parameters, "low_freq_factor"),
                _number(parameters, "high_freq_factor"),
                int(_number(parameters, "original_max_position_embeddings")),
            )
        case "yarn":
            return _read_yarn(parameters, theta, config)
        case "longrope" | "su":
            return _read_longrope(parameters, theta, config)
        case other:
            raise UnsupportedModel("rope_type", other, "default, linear, llama3, yarn, longrope")


def _read_yarn(parameters: dict[str, Any], theta: float, config: dict[str, Any]) -> RopeSpec:
    for field, allowed in (("truncate", True), ("llama_4_scaling_beta", None)):
        require(parameters, field, allowed, allowed)
    factor = _number(parameters, "factor")
    original = _original_length(parameters, config)

    def magnitude(weight: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0

    attention_factor = parameters.get("attention_factor")
    if attention_factor is None:
        attention_factor = magnitude(1.0)
        weight, all_dims = parameters.get("mscale"), parameters.get("mscale_all_dim")
        if weight and all_dims:
            attention_factor = magnitude(weight) / magnitude(all_dims)
    return RopeSpec(
        theta,
        "yarn",
        factor,
        original_max_positions=original,
        beta_slow=float(parameters.get("beta_slow") or 1),
        beta_fast=float(parameters.get("beta_fast") or 32),
        attention_factor=float(attention_factor),
    )


def _read_longrope(parameters: dict[str, Any], theta: float, config: dict[str, Any]) -> RopeSpec:
    original = _original_length(parameters, config)
    factor = parameters.get("factor") or config["max_position_embeddings"] / original
    attention_factor = parameters.get("attention_factor")
    if attention_factor is None:
        attention_factor = (
            1.0 if factor <= 1 else math.sqrt(1 + math.log(factor) / math.log(original))
        )
    return RopeSpec(
        theta,
        "longrope",
        original_max_positions=original,
        attention_factor=float(attention_factor),
        short_factors=_factors(parameters, "short_factor"),
        long_factors=_factors(parameters, "long_factor"),
    )


def _original_length(parameters: dict[str, Any], config: dict[str, Any]) -> int:
    """Returns the number of positions that the model had before rope scaling extended its context.
    As in transformers, the field of the whole config takes precedence over the same field of the
    rope parameters."""
    field = "original_max_position_embeddings"
    found = config.get(field) or parameters.get(field) or config.get("max_position_embeddings")
    return int(_number({field: found}, field))


def _factors(parameters: dict[str, Any], field: str) -> tuple[float, ...]:
    value = parameters.get(field)
    if not isinstance(value, list) or not all(isinstance(each, int | float) for each in value):
        raise UnsupportedModel(field, value, "a list of numbers")
    return tuple(map(float, value))


def _number(parameters: dict[str, Any], field: str) -> float:
    value = parameters.get(field)
    if not isinstance(value, int | float) or value <= 0:
        raise UnsupportedModel(field, value, "a number above zero")
    return float(value)
