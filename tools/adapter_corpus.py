"""`python -m tools.adapter_corpus FILE`: appends to FILE what the installed version of peft writes
for several LoRA configurations of a tiny model. Each line is a JSON object with the configuration
and the names and shapes of the tensors.

To record another version, run `pip install --target DIR --no-deps peft==VERSION` and set
PYTHONPATH to DIR.
"""

from __future__ import annotations

import json
import sys
import tempfile
import warnings
from dataclasses import fields
from pathlib import Path
from typing import Any

import peft
from peft import LoraConfig, get_peft_model
from safetensors import safe_open
from transformers import LlamaConfig, LlamaForCausalLM

SIZES: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 320,
    "tie_word_embeddings": True,
}
KINDS: dict[str, dict[str, Any]] = {
    "attention": {"r": 8, "lora_alpha": 16, "target_modules": ["q_proj", "v_proj"]},
    "all-linear, rsLoRA": {"r": 16, "use_rslora": True, "target_modules": "all-linear"},
    "patterns": {
        "r": 4,
        "target_modules": ["k_proj", "down_proj"],
        "rank_pattern": {"down_proj": 6},
        "alpha_pattern": {"k_proj": 5},
    },
    "expression, some layers": {
        "r": 4,
        "target_modules": r".*\.1\.(self_attn\.(q|o)_proj|mlp\.up_proj)",
    },
    "output matrix": {"r": 4, "target_modules": ["o_proj", "lm_head"]},
    "DoRA": {"r": 4, "use_dora": True, "target_modules": ["q_proj"]},
    "modules_to_save": {"r": 4, "target_modules": ["q_proj"], "modules_to_save": ["lm_head"]},
    "embedding saved": {
        "r": 4,
        "target_modules": ["q_proj"],
        "modules_to_save": ["embed_tokens"],
    },
    "trainable_token_indices": {
        "r": 4,
        "target_modules": ["q_proj"],
        "trainable_token_indices": [300, 5, 7],
    },
}


def written(kind: str, folder: Path) -> dict[str, Any]:
    """Saves an adapter of this kind with peft. Returns its configuration and the shapes of its
    tensors."""
    model = LlamaForCausalLM(LlamaConfig(**SIZES))
    config = LoraConfig(task_type="CAUSAL_LM", **KINDS[kind])
    get_peft_model(model, config).save_pretrained(str(folder))
    with safe_open(folder / "adapter_model.safetensors", "pt") as file:
        shapes = {name: file.get_slice(name).get_shape() for name in file.keys()}  # noqa: SIM118
    saved = json.loads((folder / "adapter_config.json").read_text())
    if isinstance(saved["target_modules"], list):
        saved["target_modules"].sort()
    return {
        "tool": "peft",
        "version": peft.__version__,
        "is_documented": False,
        "kind": kind,
        "config": saved,
        "tensors": shapes,
    }


def main() -> None:
    warnings.simplefilter("ignore")
    with Path(sys.argv[1]).open("a") as lines, tempfile.TemporaryDirectory() as folder:
        known = {field.name for field in fields(LoraConfig)}
        for kind in KINDS:
            if not KINDS[kind].keys() <= known:
                continue  # only later versions of peft have these settings
            line = written(kind, Path(folder) / kind)
            lines.write(json.dumps(line, separators=(",", ":")) + "\n")


if __name__ == "__main__":
    main()
