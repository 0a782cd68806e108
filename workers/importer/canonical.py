"""Canonical folder, which is the only form in which the store keeps a model.

The folder has config.json, tokenizer.json, tokenizer_config.json, chat_template.jinja (if the model
has a template), generation_config.json, pooling.json (if the source defines how an embedding is
made), and model.safetensors (or shards and their index). transformers can load the folder, unless
matrices are stored in quantised blocks.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from adapters.store.folder import Store, hold
from workers.models.spec import ModelSpec

CHUNK_BYTES = 8 << 20


class ImportRefused(ValueError):
    """Error raised if the source is not a model that can be imported."""


def publish(store: Store, write: Callable[[Path], None]) -> str:
    """Creates a folder, calls `write` to fill it, and moves it into the store under its digest.
    Returns the digest. If `write` fails, the store is unchanged."""
    staged = store.stage()
    try:
        with hold(staged):
            write(staged)
            digest = folder_digest(staged)
            store.put("models", digest, staged)
        return digest
    finally:
        shutil.rmtree(staged, ignore_errors=True)


def folder_digest(folder: Path) -> str:
    """Returns one SHA-256 (hex) over the name, length and bytes of every file, in name order."""
    digest = hashlib.sha256(b"loraplex model 1\0")
    for path in sorted(folder.iterdir()):
        name = path.name.encode()
        digest.update(len(name).to_bytes(8, "little") + name)
        digest.update(path.stat().st_size.to_bytes(8, "little"))
        with path.open("rb") as file:
            while chunk := file.read(CHUNK_BYTES):
                digest.update(chunk)
    return digest.hexdigest()


def write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2, sort_keys=True, ensure_ascii=False) + "\n")


def complete_config(config: dict[str, Any], spec: ModelSpec) -> dict[str, Any]:
    """Returns the config with explicit values for the fields that have defaults in some model
    families. The values are taken from the spec."""
    rotary_dim = spec.layers[0].rope.rotary_dim
    return (
        config
        | {
            "vocab_size": spec.vocab_size,
            "num_attention_heads": spec.num_heads,
            "max_position_embeddings": spec.max_position_embeddings,
            "head_dim": spec.head_dim,
            "num_key_value_heads": spec.num_kv_heads,
            "tie_word_embeddings": spec.tie_word_embeddings,
        }
        | ({"rotary_dim": rotary_dim} if rotary_dim else {})
    )
