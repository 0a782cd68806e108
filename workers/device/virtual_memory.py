"""Address ranges without memory, and physical memory that can be mapped into them."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor


class VirtualMemory(Protocol):
    """Address space of a device. All sizes and addresses are multiples of `granularity`. Methods
    may raise OSError, or MemoryError if memory is exhausted, with the system's error name."""

    granularity: int

    def create(self, num_bytes: int) -> int:
        """Allocates a piece of memory, which is not mapped yet, and returns its id. Unless it is
        released earlier, it is freed with this object."""
        ...

    def release(self, piece: int) -> None:
        """Frees an unmapped piece."""
        ...

    def reserve(self, num_bytes: int) -> Tensor:
        """Reserves addresses without memory and returns a tensor of them, uint8 [num_bytes]. Access
        to them faults. The addresses are freed with the last tensor that views them."""
        ...

    def map(self, address: int, pieces: list[int], piece_bytes: int) -> None:
        """Maps whole pieces to adjacent reserved addresses. Keeps the pieces' contents. Maps none
        of them if it raises an error."""
        ...

    def unmap(self, address: int, num_bytes: int) -> None:
        """Unmaps the piece that begins at the address. The device must no longer use it."""
        ...

    def pin(self, tensor: Tensor) -> None:
        """Pins whole pages of host memory, for asynchronous copies, until the memory is freed."""
        ...
