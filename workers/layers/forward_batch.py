"""What one forward pass reads: built once a step, passed down explicitly."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from ops.base import AttentionBatch, KVCacheView, LoRABatch


@dataclass(frozen=True, slots=True)
class ForwardBatch:
    """input_ids int32 [T]; `lora` is None when no row has an adapter."""

    input_ids: Tensor
    attention: AttentionBatch
    kv: KVCacheView
    lora: LoRABatch | None
