"""Reads the config.json of native model families. The field `model_type` selects the family."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from adapters.manifest import RECORDED
from workers.models.gemma import read_gemma, read_gemma2, read_gemma3_text
from workers.models.glm import read_glm
from workers.models.llama import read_granite, read_llama, read_mistral, read_smollm3
from workers.models.olmo import read_olmo2, read_olmo3
from workers.models.phi import read_phi3
from workers.models.qwen import read_qwen2, read_qwen3
from workers.models.spec import ModelSpec, UnsupportedModel
from workers.models.transformers_spec import TransformersSpec

FAMILIES: dict[str, Callable[[dict[str, Any]], ModelSpec]] = {
    "llama": read_llama,
    "mistral": read_mistral,
    "smollm3": read_smollm3,
    "granite": read_granite,
    "qwen2": read_qwen2,
    "qwen3": read_qwen3,
    "olmo2": read_olmo2,
    "olmo3": read_olmo3,
    "phi3": read_phi3,
    "glm": read_glm,
    "glm4": read_glm,
    "gemma": read_gemma,
    "gemma2": read_gemma2,
    "gemma3_text": read_gemma3_text,
}


def read_any_spec(
    config: dict[str, Any], generation: dict[str, Any]
) -> ModelSpec | TransformersSpec:
    """Reads the spec of a canonical config.json. Raises UnsupportedModel if a field has an
    unsupported value.

    generation: content of generation_config.json. If it has end tokens, they replace the end tokens
    of config.json.
    """
    if generation.get("eos_token_id") is not None:
        config = {**config, "eos_token_id": generation["eos_token_id"]}
    return TransformersSpec.read(config) if RECORDED in config else read_spec(config)


def read_spec(config: dict[str, Any]) -> ModelSpec:
    """Reads the spec of a native family's config.json. Raises UnsupportedModel if a field has an
    unsupported value."""
    model_type = config.get("model_type")
    if model_type not in FAMILIES:
        raise UnsupportedModel("model_type", model_type, ", ".join(FAMILIES))
    return FAMILIES[model_type](config)
