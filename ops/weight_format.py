"""How the bytes of a weight, a KV page or an adapter's factor encode numbers."""

from __future__ import annotations

from enum import IntEnum

import torch


class WeightFormat(IntEnum):
    """A stored format. The numbers are those of `WeightFormat` in native/vector.h."""

    FP32 = 0
    BF16 = 1

    @classmethod
    def of(cls, dtype: torch.dtype) -> WeightFormat:
        """Format of a plain tensor. Raises KeyError for a dtype that no kernel reads."""
        return _OF[dtype]

    @property
    def depth_multiple(self) -> int:
        """Input columns that the CPU kernels multiply together; packed weights are padded to it."""
        return 2 if self is WeightFormat.BF16 else 1


_OF = {torch.float32: WeightFormat.FP32, torch.bfloat16: WeightFormat.BF16}
