"""transformers + peft on the same GPU, shapes and random weights: what a step costs without us."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import torch

from benchmarks.shaped_model import Shape

MODULES = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


@torch.inference_mode()
def step_rows(
    shape: Shape, device: torch.device, rows: tuple[int, ...], prompt: int, count: int, steps: int
) -> Iterator[dict[str, Any]]:
    """Milliseconds a generated token: base, then `count` adapters of rank 16 mixed in a batch.

    prompt: tokens. steps: that are timed. Raises ImportError where transformers or peft is missing.
    """
    from peft import LoraConfig, get_peft_model
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=shape.vocab,
        hidden_size=shape.hidden,
        intermediate_size=shape.inner,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads,
        head_dim=shape.dim,
        max_position_embeddings=8192,
    )
    with device:
        base = LlamaForCausalLM._from_config(config, dtype=torch.bfloat16).eval()
    for num_rows in rows:
        took = _step_seconds(base, device, num_rows, prompt, steps, {})
        yield {"model": shape.name, "rows": num_rows, "adapters": 0, "ms": took * 1e3}
    lora = LoraConfig(r=16, lora_alpha=16, target_modules=MODULES, bias="none")
    adapted: Any = get_peft_model(base, lora, "a0").eval()
    for n in range(1, count):
        adapted.add_adapter(f"a{n}", lora)
    for num_rows in rows:
        names = {"adapter_names": [f"a{n % count}" for n in range(num_rows)]}
        took = _step_seconds(adapted, device, num_rows, prompt, steps, names)
        shown = min(count, num_rows)
        yield {"model": shape.name, "rows": num_rows, "adapters": shown, "ms": took * 1e3}


def _step_seconds(
    model: Any, device: torch.device, rows: int, prompt: int, steps: int, extra: dict[str, Any]
) -> float:
    """Of the difference between a long and a short generation, so that the prompt drops out."""
    ids = torch.ones(rows, prompt, dtype=torch.int64, device=device)

    def generate(count: int) -> float:
        options = {"max_new_tokens": count, "min_new_tokens": count, "do_sample": False}
        begin = time.perf_counter()
        result = model.generate(
            input_ids=ids,
            attention_mask=torch.ones_like(ids),
            pad_token_id=0,
            **options,
            **extra,
        )
        result[0, -1].item()
        return time.perf_counter() - begin

    generate(2)
    return (generate(2 + steps) - generate(2)) / steps
