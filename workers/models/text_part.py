"""Finds the language model in a checkpoint that also has image or audio parts, which are not
served."""

from __future__ import annotations

from typing import Any

TEXT_TYPES = {
    "gemma3": "gemma3_text",
    "mistral3": "mistral",
    "qwen2_vl": "qwen2",
    "qwen2_vl_text": "qwen2",
    "qwen2_5_vl": "qwen2",
    "qwen2_5_vl_text": "qwen2",
    "qwen3_vl": "qwen3",
    "qwen3_vl_text": "qwen3",
}
"""Map from the `model_type` of a config or of its `text_config` to the language model's family."""
OTHER_PARTS = (
    *("model.audio_tower.", "model.embed_audio.", "model.embed_vision."),
    *("model.multi_modal_projector.", "model.vision_model.", "model.vision_tower."),
    "model.visual.",
)
"""Prefixes of the canonical names of tensors that belong to image or audio parts."""
INHERITED = ("bos_token_id", "eos_token_id", "pad_token_id", "tie_word_embeddings")
"""Fields whose values in the whole config take precedence over their values in `text_config`."""
NOT_OF_TEXT = ("text_config", "vision_config", "architectures")


def is_composite(config: dict[str, Any]) -> bool:
    """Returns whether the checkpoint has other parts in addition to its language model."""
    return isinstance(config.get("text_config"), dict) or "vision_config" in config


def text_part(config: dict[str, Any]) -> dict[str, Any]:
    """Returns the config of the language model alone. A text-only config is returned unchanged.

    Older Qwen configs have the fields of the language model alongside `vision_config`, and newer
    Qwen configs have these fields in `text_config`. Qwen's `mrope` is read as plain rotary
    embedding, because all three positions of a text token are equal.
    """
    if not is_composite(config):
        return config
    inner = config.get("text_config")
    if isinstance(inner, dict):
        text = inner | {name: config[name] for name in INHERITED if config.get(name) is not None}
    else:
        text = {name: value for name, value in config.items() if name not in NOT_OF_TEXT}
    model_type = text.get("model_type", config.get("model_type"))
    text["model_type"] = TEXT_TYPES.get(str(model_type), model_type)
    for field in ("rope_scaling", "rope_parameters"):
        if isinstance(text.get(field), dict) and "mrope_section" in text[field]:
            text[field] = _without_axes(text[field])
    return text


def _without_axes(rope: dict[str, Any]) -> dict[str, Any]:
    kept = {name: value for name, value in rope.items() if not name.startswith("mrope_")}
    for field in ("type", "rope_type"):
        if kept.get(field) == "mrope":
            kept[field] = "default"
    return kept
