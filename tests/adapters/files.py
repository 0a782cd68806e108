"""Adapter files written by hand, so that tests can break them byte by byte."""

from __future__ import annotations

import json
import struct
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from adapters.format.module_list import write_module_list
from adapters.format.validator import (
    AdapterFiles,
    Limits,
    content_digest,
    validate_and_list,
)
from adapters.manifest import PROJECTIONS, AdapterManifest, BaseModelShape

BASE = BaseModelShape(
    digest="b" * 64,
    model_type="llama",
    num_layers=2,
    hidden_size=64,
    num_heads=4,
    num_kv_heads=2,
    head_dim=16,
    intermediate_size=96,
    vocab_size=320,
    tie_word_embeddings=True,
)

CONFIG: dict[str, Any] = {
    "peft_type": "LORA",
    "task_type": "CAUSAL_LM",
    "r": 4,
    "lora_alpha": 8,
    "target_modules": ["q_proj", "v_proj"],
    "bias": "none",
    "base_model_name_or_path": "/etc/passwd",
    "peft_version": "0.21.2",
}

DTYPES = {"float32": "F32", "float16": "F16", "float64": "F64", "uint16": "BF16", "int8": "I8"}


def tensor_name(module: str, factor: str) -> str:
    return f"base_model.model.{module}.lora_{factor}.weight"


def factors(
    rank: int = 4,
    projections: tuple[str, ...] = ("q_proj", "v_proj"),
    layers: tuple[int, ...] = (0, 1),
    base: BaseModelShape = BASE,
    seed: int = 0,
) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    tensors: dict[str, np.ndarray] = {}
    for layer in layers:
        for projection in projections:
            rows, columns = base.projection_shape(layer, projection)
            module = base.module_path(layer, projection)
            tensors[tensor_name(module, "A")] = rng.normal(0, 0.1, (rank, rows)).astype(np.float32)
            tensors[tensor_name(module, "B")] = rng.normal(0, 0.1, (columns, rank)).astype(
                np.float32
            )
    return tensors


def entries(tensors: dict[str, np.ndarray]) -> tuple[dict[str, Any], bytes]:
    """(safetensors header without metadata, data)."""
    header: dict[str, Any] = {}
    data = b""
    for name, array in tensors.items():
        end = len(data) + array.nbytes
        header[name] = {
            "dtype": DTYPES[str(array.dtype)],
            "shape": list(array.shape),
            "data_offsets": [len(data), end],
        }
        data += array.tobytes()
    return header, data


def encode(header: Any, data: bytes) -> bytes:
    raw = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(raw)) + raw + data


def validate(
    files: AdapterFiles,
    bases: BaseModelShape | Sequence[BaseModelShape],
    limits: Limits | None = None,
) -> AdapterManifest:
    """The manifest of an adapter that can be served. Raises AdapterRejected for anything else."""
    candidates = [bases] if isinstance(bases, BaseModelShape) else bases
    return validate_and_list(files, candidates, limits or Limits()).manifest


def write(folder: Path, config: Any, weights: bytes) -> AdapterFiles:
    folder.mkdir(parents=True, exist_ok=True)
    files = AdapterFiles.in_folder(folder)
    files.config.write_bytes(config if isinstance(config, bytes) else json.dumps(config).encode())
    files.weights.write_bytes(weights)
    return files


def write_adapter(
    folder: Path, *, rank: int = 4, projections: tuple[str, ...] = PROJECTIONS, seed: int = 0
) -> str:
    """A sound adapter of BASE; returns its digest."""
    config = CONFIG | {"r": rank, "target_modules": list(projections)}
    header, data = entries(factors(rank, projections, seed=seed))
    return content_digest(write(folder, config, encode(header, data)))


def stage_adapter(
    folder: Path, *, rank: int = 4, projections: tuple[str, ...] = PROJECTIONS, seed: int = 0
) -> str:
    """Writes a sound adapter of BASE with its list of modules, as an upload stages it, and returns
    its digest."""
    digest = write_adapter(folder, rank=rank, projections=projections, seed=seed)
    listed(folder)
    return digest


def listed(folder: Path, base: BaseModelShape = BASE) -> AdapterFiles:
    """Adds the list of modules to an adapter's files, as an upload does."""
    files = AdapterFiles.in_folder(folder)
    limits = Limits(max_rank=1 << 16, max_file_bytes=1 << 40)
    write_module_list(folder, validate_and_list(files, [base], limits).modules)
    return files
