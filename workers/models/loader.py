"""Converts weights from files to the form that a backend reads, one tensor at a time."""

from __future__ import annotations

import torch
from torch import Tensor

from ops.base import Ops, PackedLinear
from ops.block_matrix import BlockMatrix, Weight, densify
from workers.device.weight_image import WeightImage
from workers.models.checkpoint import Checkpoint
from workers.models.progress import ProgressMeter


class WeightLoader:
    """Loader that casts and packs weights, and counts their bytes. dtype: dtype of all weights,
    except norms and biases, which are float32."""

    def __init__(
        self,
        checkpoint: Checkpoint,
        ops: Ops,
        dtype: torch.dtype,
        meter: ProgressMeter,
        image: WeightImage | None = None,
    ) -> None:
        """image: weight image in host memory that receives the weights. If it is None, the device
        receives the weights."""
        self.ops = ops
        self.image = image
        self.num_bytes = 0
        """Bytes of all weights that have been loaded, in their packed form."""
        self._checkpoint = checkpoint
        self._dtype = dtype
        self._meter = meter
        self._device = ops.device if image is None else torch.device("cpu")

    def linear(self, modules: list[str], *, bias: bool = False) -> PackedLinear:
        """Loads the linears of all `modules` as one packed linear, with their rows stacked in this
        order."""
        weights = [self._weight(f"{name}.weight") for name in modules]
        stacked = [self._read(f"{name}.bias", torch.float32) for name in modules] if bias else None
        packed = self.ops.pack_linear(*weights, bias=torch.cat(stacked) if stacked else None)
        self.num_bytes += packed.num_bytes
        return packed if self.image is None else packed.placed(self.image.place)

    def norm(self, module: str, offset: float) -> Tensor:
        """Loads a norm's weight, float32 [K], and adds the model family's offset to it."""
        return self.keep(self._read(f"{module}.weight", torch.float32) + offset)

    def table(self, name: str) -> Tensor:
        """Loads an embedding table and casts it to the dtype of weights."""
        return self.tensor(name, self._dtype)

    def tensor(self, name: str, dtype: torch.dtype | None) -> Tensor:
        """Loads a copy of a tensor, which stays valid when the checkpoint is closed. dtype: dtype
        of the copy. If it is None, the copy has the stored dtype."""
        read = self._read(name, dtype)
        return self.keep(read.clone(memory_format=torch.contiguous_format))

    def on_host(self, name: str) -> Tensor:
        """Returns a stored tensor on the host, which is not part of the loaded weights."""
        return densify([self._checkpoint.get(name)]).clone()

    def keep(self, tensor: Tensor) -> Tensor:
        """Copies a tensor unchanged to the device, or into the weight image if there is one.
        Returns the tensor on the device, which is valid once the image, if any, is copied there."""
        self.num_bytes += tensor.nbytes
        return tensor.to(self._device) if self.image is None else self.image.place(tensor)

    def end_part(self) -> None:
        """Ends a part of the weight image. A forward pass waits for the copies of the parts one by
        one, so that it can start before the whole image is copied."""
        if self.image is not None:
            self.image.end_part()

    def _weight(self, name: str) -> Weight:
        """Reads a linear's matrix. A matrix that is stored in blocks stays in blocks if the dtype
        of weights is bfloat16, and is dequantised otherwise."""
        found = self._checkpoint.get(name)
        if isinstance(found, Tensor) or self._dtype is not torch.bfloat16:
            return self._read(name, self._dtype)
        self._meter.add(found.blocks.nbytes)
        return BlockMatrix(found.format, found.blocks.to(self._device))

    def _read(self, name: str, dtype: torch.dtype | None) -> Tensor:
        found = self._checkpoint.get(name)
        self._meter.add((found if isinstance(found, Tensor) else found.blocks).nbytes)
        plain = densify([found])
        return plain.to(self._device, plain.dtype if dtype is None else dtype)
