"""Addresses without memory, memory without addresses, and one behind the other for a while."""

from __future__ import annotations

import ctypes
import mmap
import os
import weakref
from ctypes import c_int, c_int64, c_size_t, c_void_p
from typing import Protocol

import torch
from torch import Tensor

PROT_NONE, MAP_FIXED = 0, 0x10
"""Linux's values; Python does not name them."""


class VirtualMemory(Protocol):
    """What a device offers. All sizes and addresses are multiples of `granularity`. Every call
    raises OSError, or MemoryError where there is no more, with the system's name of the error."""

    granularity: int

    def create(self, num_bytes: int) -> int:
        """A piece of memory that has no address. Goes with this object."""
        ...

    def release(self, piece: int) -> None:
        """Gives back a piece that is mapped nowhere."""
        ...

    def reserve(self, num_bytes: int) -> Tensor:
        """uint8 [num_bytes]: addresses with nothing behind them, where every access is a fault.
        They go with the last tensor that views them."""
        ...

    def map(self, address: int, pieces: list[int], piece_bytes: int) -> None:
        """Puts whole pieces behind adjacent reserved addresses that have none: all, or none where
        it raises. They keep their content."""
        ...

    def unmap(self, address: int, num_bytes: int) -> None:
        """Takes the piece that begins there away. The device may not use it any more."""
        ...

    def pin(self, tensor: Tensor) -> None:
        """Whole pages of the host: as long as they live the device copies from them by itself."""
        ...


class HostVirtualMemory:
    """Address space on Linux: pieces are ranges of a file in memory."""

    granularity = mmap.PAGESIZE

    def __init__(self) -> None:
        self._file = os.memfd_create("loraplex")
        self._end = 0
        weakref.finalize(self, os.close, self._file)

    def create(self, num_bytes: int) -> int:
        piece, self._end = self._end, self._end + num_bytes
        os.ftruncate(self._file, self._end)
        return piece

    def release(self, piece: int) -> None:
        """The file keeps the range. What was never written takes no memory."""

    def reserve(self, num_bytes: int) -> Tensor:
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
        address = _mmap(None, num_bytes, PROT_NONE, flags, -1, 0)
        owner = (ctypes.c_uint8 * num_bytes).from_address(address)
        weakref.finalize(owner, _LIBC.munmap, address, num_bytes)
        return torch.frombuffer(owner, dtype=torch.uint8)

    def map(self, address: int, pieces: list[int], piece_bytes: int) -> None:
        access, flags = mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_SHARED | MAP_FIXED
        for start, piece in enumerate(pieces):
            place = address + start * piece_bytes
            _mmap(place, piece_bytes, access, flags, self._file, piece)

    def unmap(self, address: int, num_bytes: int) -> None:
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | MAP_FIXED
        _mmap(address, num_bytes, PROT_NONE, flags, -1, 0)

    def pin(self, tensor: Tensor) -> None:
        pass


_LIBC = ctypes.CDLL(None, use_errno=True)
_LIBC.mmap.argtypes = (c_void_p, c_size_t, c_int, c_int, c_int, c_int64)
_LIBC.mmap.restype = c_void_p
_LIBC.munmap.argtypes = (c_void_p, c_size_t)


def _mmap(
    address: int | None, num_bytes: int, access: int, flags: int, file: int, offset: int
) -> int:
    mapped = _LIBC.mmap(address, num_bytes, access, flags, file, offset)
    if mapped == c_void_p(-1).value:
        error = ctypes.get_errno()
        raise OSError(error, os.strerror(error))
    return mapped
