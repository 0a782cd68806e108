"""Inputs of one forward pass, built once per step and passed down explicitly."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from ops.base import AttentionBatch, KVCacheView, LoRABatch


@dataclass(frozen=True, slots=True)
class ForwardBatch:
    """Inputs of the model's layers. input_ids: int32 [T]. lora: None if no row has an adapter."""

    input_ids: Tensor
    attention: AttentionBatch
    kv: KVCacheView
    lora: LoRABatch | None
