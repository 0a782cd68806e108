"""Inputs of one forward pass, built once per step."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from ops.base import AttentionBatch, KVCacheView, LoRABatch


@dataclass(frozen=True, slots=True)
class ForwardBatch:
    """Inputs of the model. input_ids: token ids, int32 [T]. lora: adapters of the rows, or None if
    no row has one. sample_lora: adapters of the sampled rows alone, for the output matrix."""

    input_ids: Tensor
    attention: AttentionBatch
    kv: KVCacheView
    lora: LoRABatch | None
    sample_lora: LoRABatch | None = None
