"""Weights on their way from the file into a backend's own form, one tensor at a time."""

from __future__ import annotations

import torch
from torch import Tensor

from ops.base import Ops, PackedLinear
from workers.models.checkpoint import Checkpoint
from workers.models.progress import ProgressMeter


class WeightLoader:
    """Casts, packs and counts. dtype: of linears and embeddings; norms are always float32."""

    def __init__(
        self, checkpoint: Checkpoint, ops: Ops, dtype: torch.dtype, meter: ProgressMeter
    ) -> None:
        self.ops = ops
        self._checkpoint = checkpoint
        self._dtype = dtype
        self._meter = meter

    def linear(self, modules: list[str], *, bias: bool = False) -> PackedLinear:
        """One packed linear whose rows are those of the modules, one module after the other."""
        weight = torch.cat([self._read(f"{name}.weight", self._dtype) for name in modules])
        stacked = [self._read(f"{name}.bias", torch.float32) for name in modules] if bias else None
        return self.ops.pack_linear(weight, torch.cat(stacked) if stacked else None)

    def norm(self, module: str, offset: float) -> Tensor:
        """float32 [K], the family's offset folded in."""
        return self._read(f"{module}.weight", torch.float32).clone().add_(offset)

    def table(self, name: str) -> Tensor:
        """A copy that outlives the mapped file."""
        return self._read(name, self._dtype).clone(memory_format=torch.contiguous_format)

    def _read(self, name: str, dtype: torch.dtype) -> Tensor:
        tensor = self._checkpoint.get(name)
        self._meter.add(tensor.nbytes)
        return tensor.to(self.ops.device, dtype)
