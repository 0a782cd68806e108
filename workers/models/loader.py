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
        self.num_bytes = 0
        """Of all that was loaded, on the device."""
        self._checkpoint = checkpoint
        self._dtype = dtype
        self._meter = meter

    def linear(self, modules: list[str], *, bias: bool = False) -> PackedLinear:
        """One packed linear whose rows are those of the modules, one module after the other."""
        weights = [self._read(f"{name}.weight", self._dtype) for name in modules]
        stacked = [self._read(f"{name}.bias", torch.float32) for name in modules] if bias else None
        packed = self.ops.pack_linear(
            weights[0] if len(weights) == 1 else torch.cat(weights),
            torch.cat(stacked) if stacked else None,
        )
        self.num_bytes += packed.num_bytes
        return packed

    def norm(self, module: str, offset: float) -> Tensor:
        """float32 [K], the family's offset folded in."""
        norm = self._read(f"{module}.weight", torch.float32).clone().add_(offset)
        self.num_bytes += norm.nbytes
        return norm

    def table(self, name: str) -> Tensor:
        """A copy that outlives the mapped file."""
        table = self._read(name, self._dtype).clone(memory_format=torch.contiguous_format)
        self.num_bytes += table.nbytes
        return table

    def _read(self, name: str, dtype: torch.dtype) -> Tensor:
        tensor = self._checkpoint.get(name)
        self._meter.add(tensor.nbytes)
        return tensor.to(self.ops.device, dtype)
