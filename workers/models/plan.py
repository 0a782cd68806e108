"""Properties of a model that are known before its weights are read."""

from __future__ import annotations

import json
from dataclasses import dataclass, field, replace
from math import prod
from pathlib import Path
from typing import Any

import torch

from adapters.manifest import BaseModelShape
from ops.base import KVLayout, Ops
from ops.weight_format import BLOCK_SIZES, WeightFormat
from workers.models import read_any_spec
from workers.models.checkpoint import (
    Checkpoint,
    CheckpointError,
    expected_tensors,
)
from workers.models.spec import ModelSpec
from workers.models.transformers_spec import TransformersSpec

MAX_PADDING = 64
"""Upper bound of the number of rows that a backend adds to a linear as padding, and also of the
number of unused elements between two tensors of a weight image."""


@dataclass(frozen=True, slots=True)
class ModelPlan:
    """Canonical folder of a model, as an import writes it, and how to serve the model.

    dtype: dtype of weights and KV pages. formats: format of each tensor that is stored in blocks.
    """

    digest: str
    folder: Path
    spec: ModelSpec | TransformersSpec
    shape: BaseModelShape
    dtype: torch.dtype
    max_model_len: int
    formats: dict[str, WeightFormat] = field(default_factory=dict[str, WeightFormat])

    @classmethod
    def read(
        cls, folder: Path, digest: str, dtype: torch.dtype, max_model_len: int | None = None
    ) -> ModelPlan:
        """Reads the plan of a canonical folder. Raises UnsupportedModel if a config field has an
        unsupported value."""
        config = _read_json(folder / "config.json")
        spec = read_any_spec(config, _read_json(folder / "generation_config.json"))
        length = min(max_model_len or spec.max_position_embeddings, spec.max_position_embeddings)
        shape = BaseModelShape.from_config(config, digest)
        return cls(digest, folder, spec.served(length), shape, dtype, length, _read_formats(folder))

    @property
    def kv_layout(self) -> KVLayout:
        """Layout of a KV page. If attention modules differ in the number or size of their heads,
        all layers of this layout have the heads of the module that needs the most bytes, and there
        are just enough layers for a page to hold the keys and values of all modules."""
        spec = self.spec
        if isinstance(spec, ModelSpec):
            return KVLayout(spec.num_layers, spec.num_kv_heads, spec.head_dim, self.dtype)
        places = self.site_layouts
        end = max((layer + 1) * layout.layer_bytes for layout, layer in places)
        largest = max((layout for layout, _ in places), key=lambda layout: layout.layer_bytes)
        return replace(largest, num_layers=-(-end // largest.layer_bytes))

    @property
    def site_layouts(self) -> list[tuple[KVLayout, int]]:
        """KV layout of each attention module, with the module's heads, and the layer of the layout
        in which the module's keys and values are stored. Only for a model that workers run with
        transformers' code. In a KV page, the bytes of two modules do not overlap."""
        assert isinstance(self.spec, TransformersSpec)
        sites = self.spec.recorded.sites
        places: list[tuple[KVLayout, int]] = []
        end = 0
        for site in sites:
            layout = KVLayout(len(sites), site.num_kv_heads, site.padded_dim, self.dtype)
            layer = -(-end // layout.layer_bytes)
            places.append((layout, layer))
            end = (layer + 1) * layout.layer_bytes
        return places

    def max_bytes(self, ops: Ops) -> int:
        """Returns an upper bound of the number of bytes of the loaded weights. The bound is
        slightly above the actual number."""
        spec = self.spec
        # The reference backend stores weights as float32.
        plain = 4 if ops.name == "reference" else self.dtype.itemsize
        if isinstance(spec, TransformersSpec):
            rope_numbers = spec.num_ropes * self.max_model_len * spec.head_dim
            others = (spec.recorded.other_numbers + rope_numbers) * torch.float32.itemsize
            return spec.recorded.matrix_numbers * plain + others
        keeps_blocks = ops.keeps_blocks and self.dtype is torch.bfloat16
        tensors = dict(expected_tensors(spec))
        table = tensors.pop("model.embed_tokens.weight")
        num_bytes = prod(table) * self.dtype.itemsize
        formats = self.formats if keeps_blocks else {}
        if spec.tie_word_embeddings and not ops.shares_tables:
            tensors["lm_head.weight"] = table
            if (format := formats.get("model.embed_tokens.weight")) is not None:
                formats = formats | {"lm_head.weight": format}
        for name, shape in tensors.items():
            if len(shape) == 2:
                format = formats.get(name)
                bits = 8 * plain if format is None else BLOCK_SIZES[format].panel_bits
                num_bytes += int((shape[0] + MAX_PADDING) * (shape[1] + 1) * bits) // 8
            else:
                num_bytes += prod(shape) * torch.float32.itemsize
        num_ropes = len({layer.rope for layer in spec.layers})
        rope_bytes = self.max_model_len * spec.head_dim * torch.float32.itemsize
        return num_bytes + num_ropes * rope_bytes


def _read_formats(folder: Path) -> dict[str, WeightFormat]:
    """Returns the format of each tensor that is stored in blocks. If the weights cannot be read,
    returns an empty dictionary, because a later attempt to load the weights reports the error."""
    try:
        with Checkpoint(folder, "np") as checkpoint:
            return checkpoint.formats
    except CheckpointError:
        return {}


def _read_json(path: Path) -> dict[str, Any]:
    return json.loads(path.read_text()) if path.is_file() else {}
