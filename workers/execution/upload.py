"""From the host to the device in one copy: arrays side by side in one pinned buffer."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from workers.execution.step_input import Array

ALIGNMENT = 16
"""Alignment of each array in the buffer, in bytes: any element type may be read there."""


class Packing:
    """Where arrays of given shapes and types lie in one buffer."""

    def __init__(self, like: Iterable[Array]) -> None:
        self._places: list[tuple[int, int, tuple[int, ...], np.dtype[Any]]] = []
        self.num_bytes = 0
        for array in like:
            self._places.append((self.num_bytes, array.nbytes, array.shape, array.dtype))
            self.num_bytes += -(-array.nbytes // ALIGNMENT) * ALIGNMENT

    def arrays(self, buffer: Tensor) -> list[Array]:
        """Views on a buffer of the host."""
        whole = buffer.numpy()
        return [
            whole[start : start + size].view(dtype).reshape(shape)
            for start, size, shape, dtype in self._places
        ]

    def tensors(self, buffer: Tensor) -> list[Tensor]:
        """Views on a buffer, wherever it is."""
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
    """One that the device can copy from by itself. It is not given out again before such a copy has
    ended."""
    return torch.empty(num_bytes, dtype=torch.uint8, pin_memory=device.type == "cuda")


def upload(arrays: Sequence[Array], device: torch.device) -> list[Tensor]:
    """The arrays on the device. Does not wait for it; on the CPU nothing is copied."""
    if device.type == "cpu":
        return [torch.from_numpy(array) for array in arrays]
    packing = Packing(arrays)
    host = new_host_buffer(packing.num_bytes, device)
    for view, array in zip(packing.arrays(host), arrays, strict=True):
        view[...] = array
    return packing.tensors(host.to(device, non_blocking=True))
