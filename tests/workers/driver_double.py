"""libcuda's calls by the rules of its header, on memory of the host."""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from tests.workers.host_virtual_memory import HostVirtualMemory
from workers.device.cuda_memory import Addresses, CudaDriver, CudaVirtualMemory

GRANULARITY = 1 << 21
INVALID_VALUE, OUT_OF_MEMORY, ALREADY_REGISTERED = 1, 2, 712
NAMES = {
    INVALID_VALUE: b"CUDA_ERROR_INVALID_VALUE",
    OUT_OF_MEMORY: b"CUDA_ERROR_OUT_OF_MEMORY",
    ALREADY_REGISTERED: b"CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED",
}
CONTEXT = 77
READ_WRITE = 3


class DriverDouble:
    """Refuses what the header says that the driver does."""

    def __init__(self, num_pieces: int = 1000) -> None:
        """num_pieces: that there is memory for."""
        self._num_pieces = num_pieces
        self._host = HostVirtualMemory()
        self._ranges: dict[int, Tensor] = {}
        self._functions: dict[str, Callable[..., int]] = {}
        self.pieces: dict[int, int] = {}
        """Bytes of each handle that is held."""
        self.reserved: dict[int, int] = {}
        self.mapped: dict[int, tuple[int, int]] = {}
        """Handle and bytes by address."""
        self.pinned: dict[int, int] = {}
        self.num_access_calls = 0

    @classmethod
    def make(cls) -> CudaVirtualMemory:
        return cls().virtual_memory()

    def virtual_memory(self) -> CudaVirtualMemory:
        return CudaVirtualMemory(CudaDriver(self), 0, _view)  # pyright: ignore

    def __getattr__(self, name: str) -> Callable[..., int]:
        """A function that takes attributes, as those of ctypes do."""
        if not name.startswith("cu"):
            raise AttributeError(name)
        method: Callable[..., int] = getattr(type(self), f"_{name}")
        return self._functions.setdefault(name, lambda *arguments: method(self, *arguments))

    def _cuGetErrorName(self, error: int, name: Any) -> int:
        name._obj.value = NAMES[error]
        return 0

    def _cuCtxGetCurrent(self, context: Any) -> int:
        context._obj.value = CONTEXT
        return 0

    def _cuCtxSetCurrent(self, context: ctypes.c_void_p) -> int:
        return 0 if context.value == CONTEXT else INVALID_VALUE

    def _cuCtxSynchronize(self) -> int:
        return 0

    def _cuMemGetAllocationGranularity(self, granularity: Any, prop: Any, option: int) -> int:
        granularity._obj.value = GRANULARITY
        return 0

    def _cuMemCreate(self, piece: Any, num_bytes: int, prop: Any, flags: int) -> int:
        assert (prop._obj.type, prop._obj.location.type, prop._obj.location.id) == (1, 1, 0)
        if num_bytes % GRANULARITY or flags:
            return INVALID_VALUE
        if len(self.pieces) == self._num_pieces:
            return OUT_OF_MEMORY
        # A handle is where its bytes begin in the host's file, and a bit more: none is 0.
        piece._obj.value = self._host.create(num_bytes) + 1
        self.pieces[piece._obj.value] = num_bytes
        return 0

    def _cuMemRelease(self, piece: int) -> int:
        return INVALID_VALUE if self.pieces.pop(piece, None) is None else 0

    def _cuMemAddressReserve(
        self, address: Any, num_bytes: int, alignment: int, hint: int, flags: int
    ) -> int:
        if num_bytes % mmap.PAGESIZE or alignment or hint or flags:
            return INVALID_VALUE
        tensor = self._host.reserve(num_bytes)
        address._obj.value = tensor.data_ptr()
        self._ranges[tensor.data_ptr()], self.reserved[tensor.data_ptr()] = tensor, num_bytes
        return 0

    def _cuMemAddressFree(self, address: int, num_bytes: int) -> int:
        is_mapped = _overlaps(address, num_bytes, ((a, n) for a, (_, n) in self.mapped.items()))
        if self.reserved.get(address) != num_bytes or is_mapped:
            return INVALID_VALUE
        del self._ranges[address], self.reserved[address]
        return 0

    def _cuMemMap(self, address: int, num_bytes: int, offset: int, piece: int, flags: int) -> int:
        """Not accessible yet."""
        is_reserved = any(
            a <= address and address + num_bytes <= a + n for a, n in self.reserved.items()
        )
        is_mapped = _overlaps(address, num_bytes, ((a, n) for a, (_, n) in self.mapped.items()))
        is_whole = self.pieces.get(piece) == num_bytes and not offset and not flags
        if not is_reserved or is_mapped or not is_whole:
            return INVALID_VALUE
        self.mapped[address] = piece, num_bytes
        return 0

    def _cuMemSetAccess(self, address: int, num_bytes: int, access: Any, count: int) -> int:
        """Of adjacent pieces, all of them mapped and whole."""
        self.num_access_calls += 1
        assert (access._obj.location.type, access._obj.location.id) == (1, 0)
        if count != 1 or access._obj.flags != READ_WRITE:
            return INVALID_VALUE
        place, pieces = address, list[tuple[int, int, int]]()
        while place < address + num_bytes:
            piece, size = self.mapped.get(place, (0, 0))
            if not size:
                return INVALID_VALUE
            pieces.append((place, piece, size))
            place += size
        if place != address + num_bytes:
            return INVALID_VALUE
        for place, piece, size in pieces:
            self._host.map(place, [piece - 1], size)
        return 0

    def _cuMemUnmap(self, address: int, num_bytes: int) -> int:
        if self.mapped.get(address, (0, 0))[1] != num_bytes:
            return INVALID_VALUE
        del self.mapped[address]
        self._host.unmap(address, num_bytes)
        return 0

    def _cuMemHostRegister_v2(self, address: int, num_bytes: int, flags: int) -> int:
        if address % mmap.PAGESIZE or num_bytes % mmap.PAGESIZE or flags:
            return INVALID_VALUE
        if _overlaps(address, num_bytes, self.pinned.items()):
            return ALREADY_REGISTERED
        self.pinned[address] = num_bytes
        return 0

    def _cuMemHostUnregister(self, address: int) -> int:
        return INVALID_VALUE if self.pinned.pop(address, None) is None else 0


def _overlaps(address: int, num_bytes: int, ranges: Iterable[tuple[int, int]]) -> bool:
    return any(a < address + num_bytes and address < a + n for a, n in ranges)


def _view(addresses: Addresses) -> Tensor:
    """As torch does it on a GPU."""
    array: Any = addresses.__cuda_array_interface__
    address, (num_bytes,) = array["data"][0], array["shape"]
    owner = (ctypes.c_uint8 * num_bytes).from_address(address)
    owner.addresses = addresses  # pyright: ignore
    return torch.frombuffer(owner, dtype=torch.uint8)
