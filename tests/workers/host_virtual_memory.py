"""Virtual memory of the host, in which weights are mapped as on a GPU."""

from __future__ import annotations

import ctypes
import mmap
import os
import weakref
from ctypes import c_int, c_int64, c_size_t, c_void_p

import torch
from torch import Tensor

PROT_NONE, MAP_FIXED = 0, 0x10
"""Values of Linux constants that Python's `mmap` module does not have."""


class HostVirtualMemory:
    """Address space of a Linux process. Pieces are ranges of an in-memory file."""

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
        """No-op, because the file keeps the range. Pages that were never written take no memory."""

    def reserve(self, num_bytes: int) -> Tensor:
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
        address = _mmap(None, num_bytes, PROT_NONE, flags, -1, 0)
        owner = (ctypes.c_uint8 * num_bytes).from_address(address)
        weakref.finalize(owner, _LIBC.munmap, address, num_bytes)
        return torch.frombuffer(owner, dtype=torch.uint8)

    def map(self, address: int, pieces: list[int], piece_bytes: int) -> None:
        access, flags = mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_SHARED | MAP_FIXED
        end = address
        try:
            for piece in pieces:
                _mmap(end, piece_bytes, access, flags, self._file, piece)
                end += piece_bytes
        except OSError:
            if end > address:
                self.unmap(address, end - address)
            raise

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
