"""Builds config.json and generation_config.json from the metadata of a GGUF file."""

from __future__ import annotations

from typing import Any

import numpy as np

from workers.importer.canonical import ImportRefused
from workers.importer.gguf_tensors import GGUFTensors
from workers.models.spec import MAX_LAYERS

ARCHITECTURES = {
    "llama": "llama",
    "qwen2": "qwen2",
    "qwen3": "qwen3",
    "gemma2": "gemma2",
    "gemma3": "gemma3_text",
}
CLASSES = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "gemma2": "Gemma2ForCausalLM",
    "gemma3_text": "Gemma3ForCausalLM",
}
MAX_HEAD_DIM = 1 << 16
GEMMA_27B_LAYERS = {"gemma2": 46, "gemma3_text": 62}
"""Number of layers of the 27B model of each Gemma family. The import recognises 27B models by this
number, because they compute the query scale differently and GGUF files do not store the scale."""

LLAMA3_ROPE = {
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


class _Section:
    """Access to the metadata keys that begin with the name of the file's architecture, for example
    `llama.block_count`. Callers leave out this prefix."""

    def __init__(self, metadata: dict[str, Any], architecture: str) -> None:
        self._metadata = metadata
        self._architecture = architecture

    def get(self, key: str, default: Any = None) -> Any:
        return self._metadata.get(f"{self._architecture}.{key}", default)

    def require(self, key: str) -> Any:
        """Returns the value of a key. Raises ImportRefused if the key is missing."""
        return self._metadata[f"{self._architecture}.{key}"]


def build_config(metadata: dict[str, Any], tensors: GGUFTensors) -> dict[str, Any]:
    """Returns the content of config.json. Raises ImportRefused, naming the metadata key, if a key
    is missing or has an unsupported value."""
    architecture = metadata.get("general.architecture")
    if architecture not in ARCHITECTURES:
        allowed = ", ".join(ARCHITECTURES)
        raise ImportRefused(f"general.architecture = {architecture!r}; allowed: {allowed}")
    section = _Section(metadata, architecture)
    config = _geometry(section, metadata) | {
        "model_type": ARCHITECTURES[architecture],
        "tie_word_embeddings": "lm_head.weight" not in tensors,
        "dtype": "bfloat16",
    }
    config |= _token_ids(metadata)
    if architecture.startswith("gemma"):
        config |= _gemma(section, config)
    else:
        config |= {"hidden_act": "silu", "rope_parameters": _rope(section, config, tensors)}
        if architecture == "llama" and (window := section.get("attention.sliding_window")):
            config |= {"model_type": "mistral", "sliding_window": window}
    return config | {"architectures": [CLASSES[config["model_type"]]]}


def build_generation_config(metadata: dict[str, Any]) -> dict[str, Any]:
    """Returns the content of generation_config.json. The tokens that end a text, a turn or a
    message (`eos`, `eot` and `eom`) all become end tokens of the generation."""
    ends = [metadata.get(f"tokenizer.ggml.{kind}_token_id") for kind in ("eos", "eot", "eom")]
    distinct = list(dict.fromkeys(token for token in ends if token is not None))
    return _token_ids(metadata) | {"eos_token_id": distinct}


def _geometry(section: _Section, metadata: dict[str, Any]) -> dict[str, Any]:
    hidden, heads = section.require("embedding_length"), section.require("attention.head_count")
    if section.get("expert_count"):
        raise ImportRefused(f"expert_count = {section.get('expert_count')}: no mixture of experts")
    if not isinstance(heads, int):
        raise ImportRefused("attention.head_count differs between layers")
    head_dim = section.get("attention.key_length", hidden // heads)
    for key in ("attention.value_length", "rope.dimension_count"):
        if section.get(key, head_dim) != head_dim:
            raise ImportRefused(f"{key} = {section.get(key)}; allowed: the head size, {head_dim}")
    kv_heads = section.get("attention.head_count_kv", heads)
    if not isinstance(kv_heads, int):
        raise ImportRefused("attention.head_count_kv differs between layers")
    num_layers = section.require("block_count")
    for key, value, limit in (
        ("block_count", num_layers, MAX_LAYERS),
        ("attention.key_length", head_dim, MAX_HEAD_DIM),
    ):
        if not isinstance(value, int) or not 0 < value <= limit:
            raise ImportRefused(f"{key} = {value}; allowed: 1 to {limit}")
    return {
        "vocab_size": len(metadata["tokenizer.ggml.tokens"]),
        "hidden_size": hidden,
        "intermediate_size": section.require("feed_forward_length"),
        "num_hidden_layers": num_layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim,
        "rms_norm_eps": _shorten(section.require("attention.layer_norm_rms_epsilon")),
        "max_position_embeddings": section.require("context_length"),
    }


def _token_ids(metadata: dict[str, Any]) -> dict[str, Any]:
    kinds = {"bos": "bos", "eos": "eos", "pad": "padding"}
    return {
        f"{kind}_token_id": metadata.get(f"tokenizer.ggml.{name}_token_id")
        for kind, name in kinds.items()
    }


def _rope(section: _Section, config: dict[str, Any], tensors: GGUFTensors) -> dict[str, Any]:
    theta = _shorten(section.get("rope.freq_base", 10_000.0))
    factors = tensors.rope_factors()
    if factors is not None:
        return {"rope_theta": theta} | _llama3(factors, theta, config["head_dim"])
    kind = section.get("rope.scaling.type", "none")
    if kind == "none":
        return {"rope_type": "default", "rope_theta": theta}
    if kind != "linear":
        raise ImportRefused(f"rope.scaling.type = {kind!r}; allowed: none, linear")
    factor = _shorten(section.require("rope.scaling.factor"))
    return {"rope_type": kind, "rope_theta": theta, "factor": factor}


def _llama3(factors: np.ndarray, theta: float, head_dim: int) -> dict[str, Any]:
    """Returns the Llama 3 rope parameters that produce these frequency factors. All parameters
    except `factor` have their published values. This function repeats in numpy the smoothing of
    `workers/layers/rotary.py`, because the import of GGUF files does not use torch."""
    factor = float(factors.max())
    low, high = LLAMA3_ROPE["low_freq_factor"], LLAMA3_ROPE["high_freq_factor"]
    waves = 2 * np.pi * theta ** (np.arange(0, head_dim, 2) / head_dim)
    turns = LLAMA3_ROPE["original_max_position_embeddings"] / waves
    blend = np.clip((turns - low) / (high - low), 0.0, 1.0)
    implied = 1 / ((1 - blend) / factor + blend)
    if implied.shape != factors.shape or not np.allclose(implied, factors, rtol=1e-3):
        raise ImportRefused("tensor rope_freqs.weight is not of Llama 3's rope scaling")
    return {"rope_type": "llama3", "factor": factor, **LLAMA3_ROPE}


def _gemma(section: _Section, config: dict[str, Any]) -> dict[str, Any]:
    """Returns the Gemma settings that a GGUF file omits because GGUF readers have them built in."""
    model_type, num_layers = config["model_type"], config["num_hidden_layers"]
    is_27b = num_layers == GEMMA_27B_LAYERS[model_type]
    heads_width = config["hidden_size"] // config["num_attention_heads"]
    fields: dict[str, Any] = {
        "hidden_activation": "gelu_pytorch_tanh",
        "query_pre_attn_scalar": heads_width if is_27b else config["head_dim"],
        "sliding_window": section.require("attention.sliding_window"),
        "attn_logit_softcapping": section.get("attn_logit_softcapping"),
        "final_logit_softcapping": section.get("final_logit_softcapping"),
    }
    if model_type == "gemma2":
        theta = _shorten(section.get("rope.freq_base", 10_000.0))
        return fields | {"rope_parameters": {"rope_type": "default", "rope_theta": theta}}
    full = {"rope_type": "default", "rope_theta": _shorten(section.get("rope.freq_base", 1e6))}
    if factor := section.get("rope.scaling.factor"):
        full |= {"rope_type": "linear", "factor": _shorten(factor)}
    local = {"rope_type": "default", "rope_theta": 10_000.0}
    return fields | {
        "layer_types": [
            "sliding_attention" if (layer + 1) % 6 else "full_attention"
            for layer in range(num_layers)
        ],
        "rope_parameters": {"full_attention": full, "sliding_attention": local},
    }


def _shorten(value: float) -> float:
    """Returns the shortest decimal number that rounds to the same float32, for example 1e-05 for
    9.999999747378752e-06."""
    return float(str(np.float32(value)))
