"""Description of a model that workers run with transformers' code. Does not import torch."""

from __future__ import annotations

from typing import Any

import msgspec

from adapters.manifest import RECORDED, BaseModelShape
from workers.models.spec import end_tokens

HEAD_STEP = 16
"""Unit of head sizes. Heads are padded with zeros to a multiple of this number, because all
backends support such head sizes."""


class AttentionSite(msgspec.Struct, frozen=True, array_like=True):
    """Attention of one module, as recorded when the model was imported.

    module: path of the module. head_dim: head size of queries and keys. value_dim: head size of
    values. window: number of tokens to which a token attends, itself included; None means all
    preceding tokens.
    """

    module: str
    num_heads: int
    num_kv_heads: int
    head_dim: int
    value_dim: int
    window: int | None

    @property
    def padded_dim(self) -> int:
        return -(-max(self.head_dim, self.value_dim) // HEAD_STEP) * HEAD_STEP


class Recorded(msgspec.Struct, frozen=True):
    """Facts that the import found by running the model. They are stored in the canonical
    config.json.

    - sites: attention modules in the order of their calls.
    - aliases: map from a second or further name of a tensor that has several names to the name
      under which the tensor is stored.
    - plain_linears: paths of linears that adapters cannot change.
    - matrix_numbers: upper bound of the total number of elements of linears and embedding tables.
    - other_numbers: upper bound of the total number of elements of other tensors.
    """

    shape: BaseModelShape
    sites: tuple[AttentionSite, ...]
    aliases: dict[str, str]
    plain_linears: tuple[str, ...]
    matrix_numbers: int
    other_numbers: int


class TransformersSpec(msgspec.Struct, frozen=True):
    """Description of a causal language model that transformers implements.

    config: content of config.json without the facts in `recorded`.
    """

    config: dict[str, Any]
    recorded: Recorded
    max_position_embeddings: int
    eos_token_ids: tuple[int, ...]

    @classmethod
    def read(cls, config: dict[str, Any]) -> TransformersSpec:
        """Reads a canonical config.json."""
        return cls(
            config={name: value for name, value in config.items() if name != RECORDED},
            recorded=msgspec.convert(config[RECORDED], Recorded),
            max_position_embeddings=config["max_position_embeddings"],
            eos_token_ids=end_tokens(config),
        )

    @property
    def model_type(self) -> str:
        return self.recorded.shape.model_type

    @property
    def vocab_size(self) -> int:
        return self.recorded.shape.vocab_size

    @property
    def head_dim(self) -> int:
        """Size of the largest head in the KV pages."""
        return max(site.padded_dim for site in self.recorded.sites)

    @property
    def tie_word_embeddings(self) -> bool:
        return self.recorded.shape.tie_word_embeddings

    @property
    def num_ropes(self) -> int:
        """Largest number of rotary tables that our own modules of the model use: one for each type
        of layers."""
        return len({*(self.config.get("layer_types") or ("",))})

    @property
    def linears(self) -> frozenset[str]:
        """Paths of all linears. Their weights are matrices in the serving dtype."""
        paths = [linear.path for linear in self.recorded.shape.linears]
        return frozenset([*paths, *self.recorded.plain_linears])

    def served(self, max_model_len: int) -> TransformersSpec:
        """Returns this spec, because it does not depend on the maximum length of texts."""
        return self
