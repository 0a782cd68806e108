"""Writes a tiny Hugging Face model as GGUF, by the rules that llama.cpp's converter documents."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGMLQuantizationType, GGUFWriter
from gguf.quants import quantize
from safetensors.torch import load_file

ARCHITECTURES = {"gemma3_text": "gemma3", "mistral": "llama"}
TOP = {
    "model.embed_tokens.weight": "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
}
MODULES = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
GEMMA_MODULES = MODULES | {
    "post_attention_layernorm": "post_attention_norm",
    "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
}


def write_gguf(
    model: Path,
    path: Path,
    *,
    metadata: dict[str, Any] | None = None,
    tensors: dict[str, np.ndarray] | None = None,
) -> Path:
    """`metadata` and `tensors` are added, or replace what would be written."""
    config = json.loads((model / "config.json").read_text())
    model_type: str = config["model_type"]
    architecture = ARCHITECTURES.get(model_type, model_type)
    writer = GGUFWriter(path, architecture)
    for key, value in (_metadata(model, config, architecture) | (metadata or {})).items():
        _add(writer, key, value)
    weights = {
        name: weight.float().numpy()
        for name, weight in load_file(model / "model.safetensors").items()
    }
    converted = {_name(name, architecture): name for name in weights}
    converted = {name: source for name, source in converted.items() if name not in (tensors or {})}
    for name, source in converted.items():
        weight = _convert(source, weights[source], config, architecture)
        if source.endswith("down_proj.weight"):
            kind = GGMLQuantizationType.Q8_0
            writer.add_tensor(name, quantize(weight, kind), raw_dtype=kind)
        else:
            writer.add_tensor(name, weight)
    for name, array in (tensors or {}).items():
        writer.add_tensor(name, array)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _metadata(model: Path, config: dict[str, Any], architecture: str) -> dict[str, Any]:
    tokenizer = json.loads((model / "tokenizer.json").read_text())
    tokens = {index: token for token, index in tokenizer["model"]["vocab"].items()}
    tokens[260] = "ab"
    tokens |= {token["id"]: token["content"] for token in tokenizer["added_tokens"]}
    size = config["vocab_size"]
    section = {
        "context_length": config["max_position_embeddings"],
        "embedding_length": config["hidden_size"],
        "block_count": config["num_hidden_layers"],
        "feed_forward_length": config["intermediate_size"],
        "attention.head_count": config["num_attention_heads"],
        "attention.head_count_kv": config["num_key_value_heads"],
        "attention.key_length": config["head_dim"],
        "attention.value_length": config["head_dim"],
        "attention.layer_norm_rms_epsilon": config["rms_norm_eps"],
        "rope.freq_base": _theta(config["rope_parameters"]),
        "attention.sliding_window": config.get("sliding_window"),
        "attn_logit_softcapping": config.get("attn_logit_softcapping"),
        "final_logit_softcapping": config.get("final_logit_softcapping"),
    }
    return {f"{architecture}.{key}": value for key, value in section.items()} | {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.tokens": [tokens.get(i, f"[PAD{i}]") for i in range(size)],
        "tokenizer.ggml.token_type": [_token_type(tokens.get(i)) for i in range(size)],
        "tokenizer.ggml.merges": ["a b"],
        "tokenizer.ggml.bos_token_id": 256,
        "tokenizer.ggml.eos_token_id": 257,
        "tokenizer.ggml.add_bos_token": False,
        "tokenizer.chat_template": "{{ messages[0]['content'] }}",
    }


def _token_type(token: str | None) -> int:
    if token is None:
        return 5
    return 3 if token.startswith("<|") else 1


def _theta(parameters: dict[str, Any]) -> float:
    return parameters.get("full_attention", parameters)["rope_theta"]


def _add(writer: GGUFWriter, key: str, value: Any) -> None:
    match value:
        case None:
            pass
        case bool():
            writer.add_bool(key, value)
        case int():
            writer.add_uint32(key, value)
        case float():
            writer.add_float32(key, value)
        case str():
            writer.add_string(key, value)
        case _:
            writer.add_array(key, value)


def _name(name: str, architecture: str) -> str:
    if name in TOP:
        return TOP[name]
    modules = GEMMA_MODULES if architecture.startswith("gemma") else MODULES
    layer, rest = name.removeprefix("model.layers.").split(".", 1)
    module, kind = rest.rsplit(".", 1)
    return f"blk.{layer}.{modules[module]}.{kind}"


def _convert(
    name: str, weight: np.ndarray, config: dict[str, Any], architecture: str
) -> np.ndarray:
    if architecture.startswith("gemma") and name.endswith("norm.weight"):
        return weight + 1
    heads = {"q_proj": "num_attention_heads", "k_proj": "num_key_value_heads"}
    module = name.split(".")[-2]
    if architecture == "llama" and module in heads:
        count = config[heads[module]]
        halves = weight.reshape(count, 2, len(weight) // count // 2, -1)
        return np.ascontiguousarray(halves.swapaxes(1, 2).reshape(weight.shape))
    return weight
