"""Finds fields of generation_config.json that have no effect. Torch-free.

Every field of the file is used, refused or named. Only the fields in the tables below are left out
without a word.
"""

from __future__ import annotations

from typing import Any

from adapters.format.other_files import list_names

GENERATION_FIELDS = {
    *("temperature", "top_k", "top_p", "min_p", "repetition_penalty", "eos_token_id"),
    *("bos_token_id", "pad_token_id", "transformers_version", "do_sample", "use_cache"),
    *("cache_implementation", "return_dict_in_generate", "output_attentions"),
    *("output_hidden_states", "output_scores", "output_logits", "trust_remote_code"),
}
"""Fields of generation_config.json that are used, and fields that do not change a text."""
NEUTRAL = {
    "length_penalty": 1.0,
    "num_beams": 1,
    "num_beam_groups": 1,
    "num_return_sequences": 1,
    "diversity_penalty": 0.0,
    "encoder_repetition_penalty": 1.0,
    "no_repeat_ngram_size": 0,
    "typical_p": 1.0,
    "epsilon_cutoff": 0.0,
    "eta_cutoff": 0.0,
    "min_length": 0,
    "encoder_no_repeat_ngram_size": 0,
    "guidance_scale": 1.0,
    "exponential_decay_length_penalty": None,
}
"""Values of generation parameters with which they have no effect."""


def name_generation_fields(generation: dict[str, Any]) -> list[str]:
    """Returns a sentence that names the fields of generation_config.json without effect, or an
    empty list."""
    unused = [
        name
        for name, value in generation.items()
        if not (is_empty(value) or name in GENERATION_FIELDS or name.startswith("_"))
        and not (name in NEUTRAL and value == NEUTRAL[name])
    ]
    return [f"not used of generation_config.json: {list_names(unused)}"] if unused else []


def is_empty(value: object) -> bool:
    """Returns whether a field with this value is off in every config."""
    return value is None or value is False or value in ([], {}, "")
