"""Finds fields of config.json and generation_config.json that have no effect on a native model.

Every field of these files is used, refused or named. Only the fields in the tables below are left
out without a word.
"""

from __future__ import annotations

from typing import Any

from adapters.format.other_files import list_names
from workers.models import read_spec
from workers.models.spec import UnsupportedModel

LABELS = {
    *(
        "architectures",
        "dtype",
        "torch_dtype",
        "transformers_version",
        "model_type",
        "name_or_path",
    ),
    *("bos_token_id", "pad_token_id", "id2label", "label2id", "num_labels", "problem_type"),
    *("finetuning_task", "tokenizer_class", "task_specific_params", "is_decoder"),
    *("is_encoder_decoder", "unsloth_fixed", "unsloth_version", "chunk_size_feed_forward"),
}
"""Fields that describe the checkpoint or tasks other than generation."""
TRAINING = {
    *("attention_dropout", "initializer_range", "use_cache", "pretraining_tp", "embd_pdrop"),
    *("resid_pdrop", "attention_probs_dropout_prob", "hidden_dropout_prob", "classifier_dropout"),
    *("output_attentions", "output_hidden_states", "output_past", "return_dict", "torchscript"),
    *("use_return_dict", "gradient_checkpointing", "cache_implementation"),
}
"""Fields that have an effect only in training, or on what transformers returns or caches."""
SUPERSEDED = {
    *("sliding_window", "max_window_layers", "use_sliding_window", "sliding_window_pattern"),
    *("no_rope_layer_interval", "rope_theta", "rope_local_base_freq"),
    *("original_max_position_embeddings",),
}
"""Fields that have no effect if another field lists the layers or the rotary parameters, and that
configs then still have."""
SILENT_FIELDS = LABELS | TRAINING | SUPERSEDED
"""Fields of config.json that are never named."""
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


def name_config_fields(config: dict[str, Any]) -> list[str]:
    """Returns a sentence that names the fields of a native model's config without effect, or an
    empty list. config: config.json of the language model."""
    unused = [
        name
        for name, value in config.items()
        if not (_is_empty(value) or name in SILENT_FIELDS or name.startswith("_"))
        and not _is_used(config, name)
    ]
    return [f"not used of config.json: {list_names(unused)}"] if unused else []


def name_generation_fields(generation: dict[str, Any]) -> list[str]:
    """Returns a sentence that names the fields of generation_config.json without effect, or an
    empty list."""
    unused = [
        name
        for name, value in generation.items()
        if not (_is_empty(value) or name in GENERATION_FIELDS or name.startswith("_"))
        and not (name in NEUTRAL and value == NEUTRAL[name])
    ]
    return [f"not used of generation_config.json: {list_names(unused)}"] if unused else []


def _is_used(config: dict[str, Any], name: str) -> bool:
    """Returns whether the spec depends on a field. Reads the config again with values that no
    reader expects. A field is used if the result differs or a reader fails."""
    spec = read_spec(config)
    for value in (object(), None):
        try:
            if read_spec({**config, name: value}) != spec:
                return True
        except (UnsupportedModel, TypeError, ValueError, AttributeError, KeyError):
            return True
    return False


def _is_empty(value: object) -> bool:
    return value is None or value is False or value in ([], {}, "")
