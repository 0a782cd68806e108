"""Inputs of one forward pass, built once per step and passed down explicitly."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from ops.base import AttentionBatch, KVCacheView, LoRABatch


@dataclass(frozen=True, slots=True)
class ForwardBatch:
    """Inputs of the model. input_ids: int32 [T]. lora: None if no row has an adapter. sample_lora:
    `lora` with the segments of the sampled rows, for the output matrix."""

    input_ids: Tensor
    attention: AttentionBatch
    kv: KVCacheView
    lora: LoRABatch | None
    sample_lora: LoRABatch | None = None
