"""Tiny models, tokenizers and adapters, made with transformers and peft themselves."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors.torch import save_file

from adapters.manifest import PROJECTIONS, BaseModelShape

if TYPE_CHECKING:
    from transformers import PreTrainedModel

FAMILIES = (
    *("llama", "llama3", "mistral", "smollm3", "granite", "qwen2", "qwen3"),
    *("gemma", "gemma2", "gemma3_text", "olmo2", "olmo3"),
)
LAID_OUT_ANEW = ("phi3", "glm", "glm4")
"""Families whose weights are not canonical before they are imported."""
SIZES: dict[str, Any] = {
    "vocab_size": 320,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 512,
    "bos_token_id": 256,
    "eos_token_id": 257,
    "pad_token_id": 258,
}
SLIDING: dict[str, Any] = {
    "sliding_window": 24,
    "layer_types": ["sliding_attention", "full_attention"],
}
TRANSFORMERS: dict[str, dict[str, Any]] = {
    "apertus": {},
    "arcee": {},
    "cohere2": SLIDING,
    "ernie4_5": {},
    "ernie4_5_moe": {
        "moe_num_experts": 4,
        "moe_k": 2,
        "moe_intermediate_size": 32,
        "moe_layer_start_index": 1,
        "moe_layer_end_index": 1,
        "moe_num_shared_experts": 1,
    },
    "exaone4": SLIDING,
    "gemma4_text": {
        **SLIDING,
        "hidden_size_per_layer_input": 16,
        "vocab_size_per_layer_input": SIZES["vocab_size"],
        "global_head_dim": 32,
        "num_kv_shared_layers": 0,
    },
    "gpt_oss": {"num_local_experts": 4, "num_experts_per_tok": 2, **SLIDING},
    "granitemoe": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "hunyuan_v1_dense": {},
    "ministral3": {},
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "nemotron": {},
    "olmoe": {"num_experts": 4, "num_experts_per_tok": 2},
    "phi": {},
    "qwen3_moe": {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32},
    "seed_oss": {},
    "starcoder2": {"sliding_window": 24},
}
"""Families that transformers' own code computes, with the changes of their tiny models."""

CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n"
    "{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def make_tokenizer(folder: Path) -> None:
    """A byte-level tokenizer of 256 bytes and a few specials, with a ChatML template, as
    tokenizer.json."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    specials = ("<|bos|>", "<|im_end|>", "<|pad|>", "<|im_start|>")
    tokenizer.add_special_tokens([AddedToken(t, special=True) for t in specials])
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(
        json.dumps(
            {
                "tokenizer_class": "PreTrainedTokenizerFast",
                "bos_token": "<|bos|>",
                "eos_token": "<|im_end|>",
                "pad_token": "<|pad|>",
                "chat_template": CHAT_TEMPLATE,
            }
        )
    )


def make_model(folder: Path, family: str = "llama", *, seed: int = 0, **changes: Any) -> Path:
    """Writes a random model of the family as a Hugging Face directory (float32 safetensors) and
    returns it.

    The initial weights are large enough that logits differ clearly between prompts.
    """
    from transformers import AutoConfig, AutoModelForCausalLM

    extra: dict[str, Any] = {}
    model_type = family
    match family:
        case "llama":
            extra = {"tie_word_embeddings": True}
        case "llama3":
            model_type = "llama"
            extra = {
                "tie_word_embeddings": False,
                "rope_parameters": {
                    "rope_type": "llama3",
                    "rope_theta": 10000.0,
                    "factor": 8.0,
                    "low_freq_factor": 1.0,
                    "high_freq_factor": 4.0,
                    "original_max_position_embeddings": 64,
                },
            }
        case "mistral":
            extra = {"sliding_window": 24}
        case "smollm3":
            extra = {"no_rope_layers": [1, 0], "tie_word_embeddings": True}
        case "granite":
            extra = {
                "attention_multiplier": 0.2,
                "embedding_multiplier": 12.0,
                "logits_scaling": 4.0,
                "residual_multiplier": 0.22,
            }
        case "phi3":
            extra = {
                "rope_parameters": {
                    "rope_type": "longrope",
                    "rope_theta": 10000.0,
                    "partial_rotary_factor": 0.75,
                    "short_factor": [1.0 + 0.1 * i for i in range(6)],
                    "long_factor": [2.0 + 0.3 * i for i in range(6)],
                },
                "original_max_position_embeddings": 16,
            }
        case "olmo3":
            extra = {
                "sliding_window": 24,
                "layer_types": ["sliding_attention", "full_attention"],
                "rope_scaling": {
                    "rope_type": "yarn",
                    "factor": 4.0,
                    "original_max_position_embeddings": 64,
                },
            }
        case "gemma2":
            extra = {"sliding_window": 24, "query_pre_attn_scalar": 16}
        case "gemma3_text":
            extra = {
                "sliding_window": 24,
                "query_pre_attn_scalar": 16,
                "layer_types": ["sliding_attention", "full_attention"],
            }
        case _:
            pass
    extra |= TRANSFORMERS.get(family, {})
    torch.manual_seed(seed)
    config = AutoConfig.for_model(model_type, **{**SIZES, **extra, **changes})
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim == 2:
                parameter.normal_(0.0, 0.08 if "embed" not in name else 0.5)
            elif "norm" in name:
                parameter.add_(torch.randn_like(parameter) * 0.1)
            else:
                parameter.normal_(0.0, 0.1)
    folder.mkdir(parents=True, exist_ok=True)
    model.save_pretrained(folder)
    make_tokenizer(folder)
    return folder


def make_adapter(
    model: Path | PreTrainedModel,
    folder: Path,
    *,
    rank: int = 8,
    alpha: float = 16,
    targets: list[str] | str = "all-linear",
    seed: int = 0,
    b_std: float = 0.04,
    task_type: str = "CAUSAL_LM",
    **config: Any,
) -> Path:
    """Writes a random LoRA of the model, saved by peft, whose B is large enough to matter.

    model: where it lies, or, for several of a large one, what was loaded from there in float32.
    """
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModel, AutoModelForCausalLM

    kind = AutoModelForCausalLM if task_type == "CAUSAL_LM" else AutoModel
    base = kind.from_pretrained(model, dtype=torch.float32) if isinstance(model, Path) else model
    lora = LoraConfig(
        r=rank, lora_alpha=alpha, target_modules=targets, task_type=task_type, **config
    )
    torch.manual_seed(seed)
    peft_model = get_peft_model(base, lora)
    with torch.no_grad():
        for name, parameter in peft_model.named_parameters():
            if "lora_B" in name or "lora_embedding_A" in name:  # what peft begins with as zero
                parameter.normal_(0.0, b_std)
            elif "modules_to_save" in name or "trainable_tokens" in name:  # the base's weights
                parameter.mul_(-1)
    peft_model.save_pretrained(str(folder))
    peft_model.unload()
    return folder


def write_adapter(
    shape: BaseModelShape,
    folder: Path,
    *,
    rank: int,
    seed: int,
    b_std: float = 0.04,
    **config: Any,
) -> Path:
    """A random adapter of all seven projections of every layer at one rank, in bfloat16: what peft
    would save, without building a model for it."""
    generator = torch.Generator().manual_seed(seed)
    tensors: dict[str, torch.Tensor] = {}
    for layer in range(shape.num_layers):
        for projection in PROJECTIONS:
            num_in, num_out = shape.projection_shape(layer, projection)
            path = f"base_model.model.{shape.module_path(layer, projection)}"
            a = torch.randn(rank, num_in, generator=generator) * num_in**-0.5
            b = torch.randn(num_out, rank, generator=generator) * b_std
            tensors[f"{path}.lora_A.weight"] = a.bfloat16()
            tensors[f"{path}.lora_B.weight"] = b.bfloat16()
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / "adapter_model.safetensors", {"format": "pt"})
    saved = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "r": rank,
        "lora_alpha": rank,
        "target_modules": list(PROJECTIONS),
        "base_model_name_or_path": "bench",
        "inference_mode": True,
        **config,
    }
    (folder / "adapter_config.json").write_text(json.dumps(saved))
    return folder
