"""What an adapter and its base declare about themselves. Torch-free."""

from __future__ import annotations

from typing import Any

import msgspec

PROJECTIONS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


class BaseModelShape(msgspec.Struct, frozen=True):
    """The modules of a base model that an adapter can bind to, from its canonical config.json."""

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

    @classmethod
    def from_config(cls, config: dict[str, Any], digest: str) -> BaseModelShape:
        """`config` is a Hugging Face config.json of one of the supported families."""
        heads: int = config["num_attention_heads"]
        return cls(
            digest=digest,
            model_type=config["model_type"],
            num_layers=config["num_hidden_layers"],
            hidden_size=config["hidden_size"],
            num_heads=heads,
            num_kv_heads=config.get("num_key_value_heads") or heads,
            head_dim=config.get("head_dim") or config["hidden_size"] // heads,
            intermediate_size=config["intermediate_size"],
            vocab_size=config["vocab_size"],
            tie_word_embeddings=bool(config.get("tie_word_embeddings", False)),
        )

    def projection_shape(self, projection: str) -> tuple[int, int]:
        """(in_features, out_features) of a projection; the same in every layer."""
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
        }[projection]

    def module_path(self, layer: int, projection: str) -> str:
        """The module's name as transformers and peft spell it."""
        block = "self_attn" if projection in PROJECTIONS[:4] else "mlp"
        return f"model.layers.{layer}.{block}.{projection}"


class AdapterManifest(msgspec.Struct, frozen=True):
    """A validated adapter version: what it is and what it touches."""

    digest: str
    """SHA-256 (hex) over the tagged, length-prefixed bytes of both files."""
    base_digest: str
    max_rank: int
    num_parameters: int
    file_bytes: int
    projections: tuple[str, ...]
    layers: tuple[int, ...]
    warnings: tuple[str, ...] = ()
    equals_base: bool = False
    """The adapter changes nothing, so no alias is pointed to it unless someone asks for that."""
    invocation_tokens: tuple[int, ...] = ()
    """Token ids of an activated LoRA: it acts from the start of their last occurrence in the prompt
    on, or not at all."""
