"""Descriptions of a base model's modules and of a validated adapter. Torch-free."""

from __future__ import annotations

from functools import cached_property
from typing import Any

import msgspec

from adapters.family_layout import JOINED, NEIGHBOURS, head_order

PROJECTIONS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
"""Projections in each layer of a native family, that is, a family that our own code computes."""
OUTER = ("embed_tokens", "lm_head")
"""Modules outside of the layers of a native family that an adapter may change."""
RECORDED = "loraplex"
"""Key in a canonical config.json, whose value describes a model computed by transformers. The key
is written when the model is imported."""


class ModelLinear(msgspec.Struct, frozen=True, array_like=True):
    """Linear module of a model computed by transformers. Adapters can change the module.

    path: path of the module in a causal language model. layer: index of the module's decoder layer,
    or the number of layers if the module is outside of the layers.
    """

    path: str
    layer: int
    in_features: int
    out_features: int

    @property
    def name(self) -> str:
        """Path of the module within its layer."""
        _, separator, name = self.path.partition(f".{self.layer}.")
        return name if separator else self.path


class BaseModelShape(msgspec.Struct, frozen=True, dict=True):
    """Modules of a base model that an adapter can change, read from its canonical config.json."""

    digest: str
    model_type: str
    num_layers: int
    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    vocab_size: int
    tie_word_embeddings: bool
    rotary_dim: int = 0
    """Number of rows of each head that are rotated. 0 means all rows."""
    linears: tuple[ModelLinear, ...] = ()
    """Linear modules of a model computed by transformers. Empty for a native family."""

    @classmethod
    def from_config(cls, config: dict[str, Any], digest: str) -> BaseModelShape:
        """Returns the shape that a canonical config.json describes.

        config: config.json of a native family, or a config.json with the shape that was recorded
        when a model computed by transformers was imported.
        """
        if (recorded := config.get(RECORDED)) is not None:
            return msgspec.convert({**recorded["shape"], "digest": digest}, cls)
        heads: int = config["num_attention_heads"]
        head_dim = config.get("head_dim") or config["hidden_size"] // heads
        return cls(
            digest=digest,
            model_type=config["model_type"],
            num_layers=config["num_hidden_layers"],
            hidden_size=config["hidden_size"],
            num_heads=heads,
            num_kv_heads=config.get("num_key_value_heads") or heads,
            head_dim=head_dim,
            intermediate_size=config["intermediate_size"],
            vocab_size=config["vocab_size"],
            tie_word_embeddings=bool(config.get("tie_word_embeddings", False)),
            rotary_dim=config.get("rotary_dim", 0),
        )

    @property
    def served_by(self) -> str:
        """Code that computes the model: `native`, or `transformers` for transformers' modelling
        code."""
        return "transformers" if self.linears else "native"

    @property
    def projections(self) -> tuple[str, ...]:
        """Names on the `projection` axis of the adapter tables."""
        if not self.linears:
            return PROJECTIONS
        return tuple(dict.fromkeys(linear.name for linear in self.linears))

    def modules(self, layer: int) -> tuple[str, ...]:
        """Returns the names of the layer's modules, as on the `projection` axis of the adapter
        tables. `num_layers` as the layer stands for the modules outside of the layers."""
        is_outer = layer == self.num_layers and not self.linears
        return OUTER if is_outer else self.projections

    def projection_shape(self, layer: int, projection: str) -> tuple[int, int]:
        """Returns (in_features, out_features) of a module in the layer. The embedding has one input
        feature per token of the vocabulary."""
        if self.linears:
            linear = self._by_site[layer, projection]
            return linear.in_features, linear.out_features
        q_width = self.num_heads * self.head_dim
        kv_width = self.num_kv_heads * self.head_dim
        return {
            "q_proj": (self.hidden_size, q_width),
            "k_proj": (self.hidden_size, kv_width),
            "v_proj": (self.hidden_size, kv_width),
            "o_proj": (q_width, self.hidden_size),
            "gate_proj": (self.hidden_size, self.intermediate_size),
            "up_proj": (self.hidden_size, self.intermediate_size),
            "down_proj": (self.intermediate_size, self.hidden_size),
            "embed_tokens": (self.vocab_size, self.hidden_size),
            "lm_head": (self.hidden_size, self.vocab_size),
        }[projection]

    def module_path(self, layer: int, projection: str) -> str:
        """Returns the module's path in a canonical folder. It equals the path in transformers,
        unless the family joins several projections into one module."""
        if self.linears:
            return self._by_site[layer, projection].path
        if projection in OUTER:
            return projection if projection == "lm_head" else f"model.{projection}"
        return f"model.layers.{layer}.{_block(projection)}.{projection}"

    def trained_modules(self, layer: int) -> dict[str, tuple[str, ...]]:
        """Returns the projections in each module of a layer, by the module's path in transformers
        and peft."""
        if self.linears:
            return {each.path: (each.name,) for each in self.linears if each.layer == layer}
        if layer == self.num_layers:
            return {self.module_path(layer, name): (name,) for name in OUTER}
        joined = JOINED.get(self.model_type, {})
        apart = {name: (name,) for name in PROJECTIONS}
        for names in joined.values():
            for name in names:
                del apart[name]
        return {
            f"model.layers.{layer}.{_block(names[0])}.{module}": names
            for module, names in (joined | apart).items()
        }

    def row_order(self, projection: str) -> list[int] | None:
        """Returns, for each canonical row of a projection, the index of this row in the family's
        layout. Returns None if both layouts are equal."""
        if projection not in ("q_proj", "k_proj"):
            return None
        are_neighbours = self.model_type in NEIGHBOURS
        order = head_order(self.head_dim, self.rotary_dim or self.head_dim, are_neighbours)
        if order is None:
            return None
        heads = self.num_heads if projection == "q_proj" else self.num_kv_heads
        num_rows = heads * self.head_dim
        return [start + row for start in range(0, num_rows, self.head_dim) for row in order]

    @cached_property
    def _by_site(self) -> dict[tuple[int, str], ModelLinear]:
        return {(linear.layer, linear.name): linear for linear in self.linears}


def _block(projection: str) -> str:
    return "self_attn" if projection in PROJECTIONS[:4] else "mlp"


class AdapterManifest(msgspec.Struct, frozen=True):
    """Description of a validated adapter version and of the modules that it changes."""

    digest: str
    """SHA-256 (hex) over a tag and the adapter's two files, each file preceded by its size."""
    base_digest: str
    max_rank: int
    num_parameters: int
    file_bytes: int
    projections: tuple[str, ...]
    layers: tuple[int, ...]
    warnings: tuple[str, ...] = ()
    equals_base: bool = False
    """Whether the adapter has no effect. If so, an alias is set to the version only if the client
    explicitly requests it."""
    invocation_tokens: tuple[int, ...] = ()
    """Token ids that activate the adapter, if it is an activated LoRA (aLoRA). The adapter is
    active from the start of their last occurrence in the prompt. If the prompt does not contain
    them, the adapter stays inactive."""
