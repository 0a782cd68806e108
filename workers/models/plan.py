"""What is known of a model before its weights are read."""

from __future__ import annotations

import json
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import torch

from adapters.manifest import BaseModelShape
from ops.base import KVLayout
from workers.models import read_spec
from workers.models.checkpoint import expected_tensors
from workers.models.spec import ModelSpec

MAX_PADDING = 64
"""Rows by which a backend may round a linear up."""


@dataclass(frozen=True, slots=True)
class ModelPlan:
    """A canonical folder, and how it is to be served. dtype: of weights and KV pages."""

    digest: str
    folder: Path
    spec: ModelSpec
    shape: BaseModelShape
    dtype: torch.dtype
    max_model_len: int

    @classmethod
    def read(
        cls, folder: Path, digest: str, dtype: torch.dtype, max_model_len: int | None = None
    ) -> ModelPlan:
        """Raises UnsupportedModel."""
        config = _read_json(folder / "config.json")
        spec = read_spec(config, _read_json(folder / "generation_config.json"))
        length = min(max_model_len or spec.max_position_embeddings, spec.max_position_embeddings)
        shape = BaseModelShape.from_config(config, digest)
        return cls(digest, folder, spec, shape, dtype, length)

    @property
    def kv_layout(self) -> KVLayout:
        spec = self.spec
        return KVLayout(spec.num_layers, spec.num_kv_heads, spec.head_dim, self.dtype)

    def max_bytes(self, linear: torch.dtype, *, shares_tables: bool = False) -> int:
        """Bytes of the loaded weights: at least what they take, and little more. linear: the dtype
        of the backend's packed linears. shares_tables: see Ops."""
        spec = self.spec
        tensors = dict(expected_tensors(spec))
        num_bytes = prod(tensors["model.embed_tokens.weight"]) * self.dtype.itemsize
        table = tensors.pop("model.embed_tokens.weight")
        if spec.tie_word_embeddings and not shares_tables:
            tensors["lm_head.weight"] = table
        for shape in tensors.values():
            if len(shape) == 2:
                num_bytes += (shape[0] + MAX_PADDING) * (shape[1] + 1) * linear.itemsize
            else:
                num_bytes += prod(shape) * torch.float32.itemsize
        num_ropes = len({layer.rope for layer in spec.layers})
        rope_bytes = self.max_model_len * spec.head_dim * torch.float32.itemsize
        return num_bytes + num_ropes * rope_bytes


def _read_json(path: Path) -> dict[str, Any]:
    return json.loads(path.read_text()) if path.is_file() else {}
