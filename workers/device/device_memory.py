"""The bytes that the arena's extents stand for, and where they go while weights have them."""

from __future__ import annotations

import mmap
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from memory.arena import Backing
from memory.errors import require
from workers.device.virtual_memory import VirtualMemory


class DeviceMemory(Backing, Protocol):
    """The bytes of the arena's extents, and in front of them one more that the arena does not have.

    Kernels get the address of the whole, and Triton refuses one that no kernel may access: the
    first extent is never lent. Padded sequences have their page there.

    tensor: uint8, extent after extent.
    """

    tensor: Tensor

    def reserve(self, num_extents: int) -> AddressRange | None:
        """For the weights of a model; None where they lie elsewhere."""
        ...

    def extend(self, num_extents: int) -> None:
        """Sees to memory for so many extents of weights more, beside the arena. Raises MemoryError,
        which says how much there is."""
        ...


class HostMemory:
    """On the CPU weights lie where the allocator puts them: what their extents stand for here goes
    back to the system, so that no byte is held twice."""

    def __init__(self, num_extents: int, extent_bytes: int) -> None:
        """num_extents: of the arena. extent_bytes: whole pages."""
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
        self._pages = mmap.mmap(-1, (1 + num_extents) * extent_bytes, flags=flags)
        self._extent_bytes = extent_bytes
        self.tensor = torch.frombuffer(self._pages, dtype=torch.uint8)

    def lend(self, extent: int) -> None:
        size = self._extent_bytes
        self._pages.madvise(mmap.MADV_DONTNEED, (1 + extent) * size, size)

    def restore(self, extent: int) -> None:
        """The system does, at the first write there."""

    def reserve(self, num_extents: int) -> None:
        return None

    def extend(self, num_extents: int) -> None:
        """The allocator takes the memory when the weights are loaded."""
        available = available_bytes()
        if num_extents * self._extent_bytes > available:
            raise MemoryError(f"this machine has {gib(available)}")


class MappedMemory:
    """As many pieces of memory as there are extents, taken once. Each lies behind an extent, or in
    the range of a model whose weights have that extent: so no byte is held twice, and none is asked
    for later. Reading or writing an extent of weights faults."""

    def __init__(self, virtual: VirtualMemory, num_extents: int, extent_bytes: int) -> None:
        """num_extents: of the arena. extent_bytes: whole granules of the virtual memory. Raises
        MemoryError."""
        self._virtual = virtual
        self._extent_bytes = extent_bytes
        self._spare = [virtual.create(extent_bytes) for _ in range(1 + num_extents)]
        self._addresses = self.reserve(1 + num_extents)
        self._addresses.back()
        self.tensor = self._addresses.tensor

    def lend(self, extent: int) -> None:
        self._addresses.unback_part(1 + extent)

    def restore(self, extent: int) -> None:
        self._addresses.back_part(1 + extent)

    def extend(self, num_extents: int) -> None:
        pieces: list[int] = []
        try:
            for _ in range(num_extents):
                pieces.append(self._virtual.create(self._extent_bytes))
        except (MemoryError, OSError) as error:
            for piece in pieces:
                self._virtual.release(piece)
            num_bytes = len(pieces) * self._extent_bytes
            raise MemoryError(f"the device has {gib(num_bytes)}") from error
        self._spare += pieces

    def reserve(self, num_extents: int) -> AddressRange:
        """Addresses for so many pieces, without memory yet."""
        return AddressRange(self._virtual, num_extents, self._extent_bytes, self._spare)


def available_bytes() -> int:
    """Memory of the host that can be had without swapping, within the limit of its control group
    (cgroup v2), in bytes."""
    fields = dict(line.split(":") for line in Path("/proc/meminfo").read_text().splitlines())
    available = int(fields["MemAvailable"].split()[0]) << 10
    group = Path("/sys/fs/cgroup")
    try:
        limit = int((group / "memory.max").read_text())
        return min(available, max(limit - int((group / "memory.current").read_text()), 0))
    except (OSError, ValueError):  # no control group, or none with a limit
        return available


def gib(num_bytes: int) -> str:
    """The number of bytes for people, such as `1.25 GiB`."""
    unit, size = ("GiB", 1 << 30) if num_bytes >= 1 << 30 else ("MiB", 1 << 20)
    return f"{num_bytes / size:.2f} {unit}"


class AddressRange:
    """Addresses that keep, whether there is memory behind them or not. What lies in their memory
    when it comes is undefined.

    tensor: uint8, of all of them.
    """

    def __init__(
        self, virtual: VirtualMemory, num_parts: int, part_bytes: int, spare: list[int]
    ) -> None:
        """spare: pieces that lie nowhere."""
        self.tensor = virtual.reserve(num_parts * part_bytes)
        self.virtual = virtual
        self._num_parts = num_parts
        self._part_bytes = part_bytes
        self._spare = spare
        self._pieces: dict[int, int] = {}
        """By the part that they lie behind."""

    def back(self) -> None:
        """All of it, with spare pieces, or nothing."""
        self._back(range(self._num_parts))

    def unback(self) -> None:
        """Its pieces are spare then. The device may not use it any more."""
        for part in list(self._pieces):
            self.unback_part(part)

    def back_part(self, part: int) -> None:
        self._back(range(part, part + 1))

    def _back(self, parts: range) -> None:
        for part in parts:
            require(part not in self._pieces, f"part {part} has memory already")
        require(len(self._spare) >= len(parts), "all memory lies somewhere")
        pieces = self._spare[len(self._spare) - len(parts) :]
        self.virtual.map(self._address(parts.start), pieces, self._part_bytes)
        del self._spare[len(self._spare) - len(parts) :]
        self._pieces.update(zip(parts, pieces, strict=True))

    def unback_part(self, part: int) -> None:
        require(part in self._pieces, f"part {part} has no memory")
        self.virtual.unmap(self._address(part), self._part_bytes)
        self._spare.append(self._pieces.pop(part))

    def _address(self, part: int) -> int:
        return self.tensor.data_ptr() + part * self._part_bytes
