"""Implementation of `VirtualMemory` for a GPU, with the CUDA driver API."""

from __future__ import annotations

import ctypes
import weakref
from collections.abc import Callable
from ctypes import POINTER, Structure, byref, c_char_p, c_int, c_size_t, c_uint, c_uint64, c_void_p
from functools import partial
from typing import Any

import torch
from torch import Tensor

PINNED, ON_DEVICE, READ_WRITE, MINIMUM = 1, 1, 3, 0
"""Values of CU_MEM_ALLOCATION_TYPE_PINNED, CU_MEM_LOCATION_TYPE_DEVICE,
CU_MEM_ACCESS_FLAGS_PROT_READWRITE and CU_MEM_ALLOC_GRANULARITY_MINIMUM."""
OUT_OF_MEMORY = 2


class Location(Structure):
    """Struct CUmemLocation of the CUDA driver."""

    _fields_ = (("type", c_int), ("id", c_int))


class AllocationProp(Structure):
    """Struct CUmemAllocationProp of the CUDA driver."""

    _fields_ = (
        ("type", c_int),
        ("requestedHandleTypes", c_int),
        ("location", Location),
        ("win32HandleMetaData", c_void_p),
        ("allocFlags", ctypes.c_ubyte * 8),
    )


class AccessDesc(Structure):
    """Struct CUmemAccessDesc of the CUDA driver."""

    _fields_ = (("location", Location), ("flags", c_int))


SIGNATURES: dict[str, tuple[Any, ...]] = {
    "cuGetErrorName": (c_int, POINTER(c_char_p)),
    "cuCtxGetCurrent": (POINTER(c_void_p),),
    "cuCtxSetCurrent": (c_void_p,),
    "cuCtxSynchronize": (),
    "cuMemGetAllocationGranularity": (POINTER(c_size_t), POINTER(AllocationProp), c_int),
    "cuMemCreate": (POINTER(c_uint64), c_size_t, POINTER(AllocationProp), c_uint64),
    "cuMemRelease": (c_uint64,),
    "cuMemAddressReserve": (POINTER(c_uint64), c_size_t, c_size_t, c_uint64, c_uint64),
    "cuMemAddressFree": (c_uint64, c_size_t),
    "cuMemMap": (c_uint64, c_size_t, c_size_t, c_uint64, c_uint64),
    "cuMemSetAccess": (c_uint64, c_size_t, POINTER(AccessDesc), c_size_t),
    "cuMemUnmap": (c_uint64, c_size_t),
    "cuMemHostRegister_v2": (c_void_p, c_size_t, c_uint),
    "cuMemHostUnregister": (c_void_p,),
}


class CudaDriver:
    """Functions of libcuda. Errors of the driver are raised as exceptions. Thread-safe."""

    def __init__(self, library: ctypes.CDLL) -> None:
        """Stores the calling thread's current CUDA context, in which all later calls are made. The
        calling thread must have a context."""
        self._library = library
        for name, arguments in SIGNATURES.items():
            function = getattr(library, name)
            function.argtypes, function.restype = arguments, c_int
        self._context = c_void_p()
        self._check("cuCtxGetCurrent", library.cuCtxGetCurrent(byref(self._context)))

    def call(self, name: str, *arguments: object) -> None:
        """Calls a function of the driver. Raises MemoryError if the device is out of memory, and
        OSError for other errors."""
        self._check("cuCtxSetCurrent", self._library.cuCtxSetCurrent(self._context))
        self._check(name, getattr(self._library, name)(*arguments))

    def _check(self, name: str, error: int) -> None:
        if error:
            words = c_char_p()
            self._library.cuGetErrorName(error, byref(words))
            kind = MemoryError if error == OUT_OF_MEMORY else OSError
            raise kind(f"{name}: {(words.value or b'error %d' % error).decode()}")


class CudaVirtualMemory:
    """Address space of one GPU. The id of a piece of memory is the piece's handle in the driver."""

    def __init__(self, driver: CudaDriver, index: int, view: Callable[[Addresses], Tensor]) -> None:
        """index: index of the GPU. view: function that returns a tensor that views the addresses
        and keeps the `Addresses` object alive."""
        self._driver = driver
        self._view = view
        self._location = Location(ON_DEVICE, index)
        self._prop = AllocationProp(type=PINNED, location=self._location)
        granularity = c_size_t()
        arguments = (byref(granularity), byref(self._prop), MINIMUM)
        self._driver.call("cuMemGetAllocationGranularity", *arguments)
        self.granularity = granularity.value
        self._mapped: dict[int, int] = {}
        """Number of bytes of each mapped piece, by the piece's start address."""
        self._pieces: list[int] = []
        weakref.finalize(self, _release, self._driver, self._pieces).atexit = False

    @classmethod
    def of(cls, device: torch.device) -> CudaVirtualMemory:
        """Opens the driver for a device. Creates a CUDA context on the calling thread."""
        torch.zeros(1, device=device)
        index = torch.cuda.current_device() if device.index is None else device.index
        view = partial(torch.as_tensor, device=torch.device("cuda", index))
        return cls(CudaDriver(ctypes.CDLL("libcuda.so.1")), index, view)

    def create(self, num_bytes: int) -> int:
        piece = c_uint64()
        self._driver.call("cuMemCreate", byref(piece), num_bytes, byref(self._prop), 0)
        self._pieces.append(piece.value)
        return piece.value

    def release(self, piece: int) -> None:
        self._pieces.remove(piece)
        self._driver.call("cuMemRelease", piece)

    def reserve(self, num_bytes: int) -> Tensor:
        address = c_uint64()
        self._driver.call("cuMemAddressReserve", byref(address), num_bytes, 0, 0, 0)
        owner = Addresses(address.value, num_bytes)
        arguments = (self._driver, self._mapped, address.value, num_bytes)
        weakref.finalize(owner, _free, *arguments).atexit = False
        # Some memory must be mapped while torch asks the driver which device owns the addresses.
        piece = self.create(self.granularity)
        try:
            self.map(address.value, [piece], self.granularity)
            tensor = self._view(owner)
            self.unmap(address.value, self.granularity)
        finally:
            self.release(piece)
        assert tensor.data_ptr() == address.value, "torch made a copy"
        return tensor

    def map(self, address: int, pieces: list[int], piece_bytes: int) -> None:
        end, access = address, AccessDesc(self._location, READ_WRITE)
        try:
            for piece in pieces:
                self._driver.call("cuMemMap", end, piece_bytes, 0, piece, 0)
                self._mapped[end] = piece_bytes
                end += piece_bytes
            # One call covers all pieces, because its time does not depend on the number of bytes.
            self._driver.call("cuMemSetAccess", address, end - address, byref(access), 1)
        except Exception:
            for start in range(address, end, piece_bytes):
                self.unmap(start, piece_bytes)
            raise

    def unmap(self, address: int, num_bytes: int) -> None:
        self._driver.call("cuMemUnmap", address, num_bytes)
        del self._mapped[address]

    def pin(self, tensor: Tensor) -> None:
        address, storage = tensor.data_ptr(), tensor.untyped_storage()
        self._driver.call("cuMemHostRegister_v2", address, tensor.nbytes, 0)
        weakref.finalize(storage, self._driver.call, "cuMemHostUnregister", address).atexit = False


class Addresses:
    """Address range that torch can view as a tensor. Such a tensor keeps this object alive."""

    def __init__(self, address: int, num_bytes: int) -> None:
        self.__cuda_array_interface__ = {
            "shape": (num_bytes,),
            "typestr": "|u1",
            "data": (address, False),
            "version": 3,
        }


def _free(driver: CudaDriver, mapped: dict[int, int], address: int, num_bytes: int) -> None:
    """Unmaps and frees a range of addresses. As a finalizer, it may run on any thread, while
    another thread maps pieces of another range."""
    driver.call("cuCtxSynchronize")
    # Copying the keys is atomic, iterating over the dict is not.
    for start in [start for start in list(mapped) if address <= start < address + num_bytes]:
        driver.call("cuMemUnmap", start, mapped.pop(start))
    driver.call("cuMemAddressFree", address, num_bytes)


def _release(driver: CudaDriver, pieces: list[int]) -> None:
    """Releases all pieces. The driver frees the memory of a mapped piece once the piece is
    unmapped."""
    for piece in pieces:
        driver.call("cuMemRelease", piece)
