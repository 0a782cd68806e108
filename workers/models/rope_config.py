"""Rotary parameters out of config.json, in the spelling of transformers 5 and the older one."""

from __future__ import annotations

from typing import Any

from workers.layers.rope_spec import RopeSpec
from workers.models.spec import UnsupportedModel


def read_ropes(
    config: dict[str, Any], default_theta: float, local_theta: float | None = None
) -> dict[str, RopeSpec]:
    """Rope of each layer type: `full_attention` and `sliding_attention`.

    New form: `rope_parameters`, flat or by layer type. Old form: `rope_theta` and `rope_scaling`;
    in a family with a `local_theta`, sliding layers have `rope_local_base_freq` and no scaling.
    """
    default_theta = config.get("rope_theta", default_theta)
    parameters = config.get("rope_parameters")
    if parameters and "full_attention" in parameters:
        full = parameters["full_attention"]
        sliding = parameters.get("sliding_attention") or full
        return {
            "full_attention": _read_rope(full, default_theta),
            "sliding_attention": _read_rope(sliding, local_theta or default_theta),
        }
    if not parameters:
        parameters = config.get("rope_scaling") or {}
    full = _read_rope(parameters, default_theta)
    if local_theta is None:
        return {"full_attention": full, "sliding_attention": full}
    local = RopeSpec(config.get("rope_local_base_freq", local_theta))
    return {"full_attention": full, "sliding_attention": local}


def _read_rope(parameters: dict[str, Any], default_theta: float) -> RopeSpec:
    theta = float(parameters.get("rope_theta", default_theta))
    if parameters.get("partial_rotary_factor", 1.0) != 1.0:
        raise UnsupportedModel("partial_rotary_factor", parameters["partial_rotary_factor"], "1.0")
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
        case other:
            raise UnsupportedModel("rope_type", other, "default, linear, llama3")


def _number(parameters: dict[str, Any], field: str) -> float:
    value = parameters.get(field)
    if not isinstance(value, int | float) or value <= 0:
        raise UnsupportedModel(field, value, "a number above zero")
    return float(value)
