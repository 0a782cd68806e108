"""Finds fields of config.json that have no effect on a native model.

Every field of the file is used, refused or named. Only the fields in the tables below are left
out without a word.
"""

from __future__ import annotations

from typing import Any

from adapters.format.generation_fields import is_empty
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


def name_config_fields(config: dict[str, Any]) -> list[str]:
    """Returns a sentence that names the fields of a native model's config without effect, or an
    empty list. config: config.json of the language model."""
    unused = [
        name
        for name, value in config.items()
        if not (is_empty(value) or name in SILENT_FIELDS or name.startswith("_"))
        and not _is_used(config, name)
    ]
    return [f"not used of config.json: {list_names(unused)}"] if unused else []


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
