"""Copies between host and device. Several arrays are uploaded as one pinned buffer."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

Array = NDArray[Any]

ALIGNMENT = 16
"""Alignment in bytes of each array in the buffer, sufficient for any element type."""


class Packing:
    """Layout of several arrays in one buffer, by their shapes and element types."""

    def __init__(self, like: Iterable[Array]) -> None:
        self._places: list[tuple[int, int, tuple[int, ...], np.dtype[Any]]] = []
        self.num_bytes = 0
        for array in like:
            self._places.append((self.num_bytes, array.nbytes, array.shape, array.dtype))
            self.num_bytes += -(-array.nbytes // ALIGNMENT) * ALIGNMENT

    def arrays(self, buffer: Tensor) -> list[Array]:
        """Returns the arrays as views of a host buffer."""
        whole = buffer.numpy()
        return [
            whole[start : start + size].view(dtype).reshape(shape)
            for start, size, shape, dtype in self._places
        ]

    def tensors(self, buffer: Tensor) -> list[Tensor]:
        """Returns the arrays as views of a buffer on any device."""
        return [
            buffer[start : start + size].view(_TYPES[dtype]).view(shape)
            for start, size, shape, dtype in self._places
        ]


_TYPES = {
    np.dtype(np.int32): torch.int32,
    np.dtype(np.int64): torch.int64,
    np.dtype(np.float32): torch.float32,
}


def new_host_buffer(num_bytes: int, device: torch.device) -> Tensor:
    """Returns a buffer that the device can copy from asynchronously. torch does not reuse its
    memory before such a copy has ended."""
    return torch.empty(num_bytes, dtype=torch.uint8, pin_memory=device.type == "cuda")


def to_host(tensor: Tensor) -> Tensor:
    """Starts a copy to the host, which runs after the work already submitted. Does not block."""
    return tensor.to("cpu", non_blocking=True)


def upload(arrays: Sequence[Array], device: torch.device) -> list[Tensor]:
    """Copies the arrays to the device without blocking. CPU tensors share the arrays' memory."""
    if device.type == "cpu":
        return [torch.from_numpy(array) for array in arrays]
    packing = Packing(arrays)
    host = new_host_buffer(packing.num_bytes, device)
    for view, array in zip(packing.arrays(host), arrays, strict=True):
        view[...] = array
    return packing.tensors(host.to(device, non_blocking=True))
