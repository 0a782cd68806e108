"""Interface to address ranges without memory, and to memory that can be mapped into them."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor


class VirtualMemory(Protocol):
    """Address space of a device. All sizes and addresses are multiples of `granularity`. Methods
    may raise MemoryError if memory is exhausted, or OSError for other errors. The error messages
    contain the name that the system gives the error."""

    granularity: int

    def create(self, num_bytes: int) -> int:
        """Allocates a piece of memory, which is not mapped yet, and returns its id. Unless the
        piece is released earlier, it is freed together with this object."""
        ...

    def release(self, piece: int) -> None:
        """Frees an unmapped piece."""
        ...

    def reserve(self, num_bytes: int) -> Tensor:
        """Reserves addresses without memory and returns a tensor of them, uint8 [num_bytes]. Access
        to the tensor faults until memory is mapped. The addresses are freed with the last tensor
        that views them."""
        ...

    def map(self, address: int, pieces: list[int], piece_bytes: int) -> None:
        """Maps whole pieces, one after the other, to the reserved addresses that begin at
        `address`. The pieces keep their contents. If this fails, no piece is mapped."""
        ...

    def unmap(self, address: int, num_bytes: int) -> None:
        """Unmaps the piece that begins at the address. The device must no longer use the piece."""
        ...

    def pin(self, tensor: Tensor) -> None:
        """Pins the tensor's pages of host memory until the memory is freed, so that asynchronous
        copies are possible. The tensor must consist of whole pages."""
        ...
